"""The models and data sets of a project's lock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from ..config.load import Config
from ..core.errors import ConfigError, ResolveError
from ..core.store import Store
from ..hub.client import HubClient, HubFiles, resolve
from ..hub.repositories import HubRequest, LockedRepository
from ..lock.lock import ResolveOptions
from ..lock.pylock import Lock, keep_assets
from .current_bundle import Listener, hub_requests


def hub_files(store: Store, offline: bool, listener: Listener) -> HubFiles:
    """Return the files of the hub; none is fetched if that is not allowed."""
    return HubFiles(
        hub=None if offline else HubClient(),
        store=store,
        progress=lambda line: listener.step(line, 0, 0),
    )


def upgraded(
    config: Config, options: ResolveOptions
) -> tuple[ResolveOptions, frozenset[HubRequest]]:
    """Sort what is upgraded.

    Returns:
        The options with packages alone, and the models and data sets whose commits are not kept.

    Raises:
        ConfigError: what has an owner's name, as in ``org/name``, is none of the settings'.
    """
    requests = hub_requests(config)
    if options.upgrade:
        return options, frozenset(requests)
    packages, moved = [], set()
    for name in options.upgrade_packages:
        named = {request for request in requests if name in (request.name, request.label)}
        moved |= named
        if named:
            continue
        if "/" in name:
            known = ", ".join(dict.fromkeys(request.label for request in requests))
            raise ConfigError(
                f"--upgrade-package {name}: no asset of {config.source.name} on the hub has this "
                "name",
                hint=f"there are {known}" if known else "its assets name none",
            )
        packages.append(name)
    return replace(options, upgrade_packages=tuple(packages)), frozenset(moved)


def with_assets(
    config: Config,
    lock: Lock,
    files: HubFiles,
    listener: Listener,
    *,
    locked: bool = False,
    moved: Collection[HubRequest] = (),
) -> Lock:
    """Return the lock with the models and data sets that the settings name, and no others.

    Args:
        config: the project's settings.
        lock: the lock; what it has stays at its commit.
        files: where files come from.
        listener: told which commits have changed.
        locked: true if the lock may not change.
        moved: those for which the hub is asked again which commit the name stands for.

    Raises:
        StagerError: one cannot be resolved, or the lock lacks one and may not be made.
    """
    requests = hub_requests(config)
    known = {repository.request for repository in lock.assets}
    new = [request.label for request in requests if request not in known]
    if locked and new:
        raise ResolveError(
            f"the lock {lock.path} lacks {', '.join(new)}, and it may not be changed now",
            hint="run `stager lock`, review the difference, and build again",
        )
    if not requests and not lock.assets:
        return lock
    kept = [repository for repository in lock.assets if repository.request not in moved]
    resolved = resolve(requests, kept, files)
    for change in _new_commits(lock.assets, resolved):
        listener.note(change)
    return keep_assets(lock, resolved)


def _new_commits(
    earlier: Iterable[LockedRepository], resolved: Iterable[LockedRepository]
) -> Iterator[str]:
    commits = {repository.request: repository.commit for repository in earlier}
    for repository in resolved:
        request, old = repository.request, commits.get(repository.request)
        if old and old != repository.commit:
            yield f"{request.kind} {request.label}: {old[:12]} -> {repository.commit[:12]}"
