"""The lock of a project: the current one, or a new one and what that changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bundle.protocol.dataclass import dataclass

from ..config.load import Config
from ..core.errors import ConfigError, ResolveError, WheelError
from ..core.store import Store
from ..core.values import Wheel
from ..hub.client import HubFiles, resolve
from ..hub.repositories import HubRequest
from ..lock.build_source import list_certain_builds, refuse_without_nvcc
from ..lock.indexes import TORCH_INDEX
from ..lock.lock import ResolveOptions, make_lock
from ..lock.pylock import (
    Lock,
    PackageChanges,
    compare_locks,
    find_earlier_lock,
    keep_assets,
    read_lock,
)
from ..lock.resolver import NONE
from ..lock.spec import Spec, read_spec
from ..pack.decompressor import decompressor_lock
from ..wheels import WheelSource
from .current_bundle import Listener, hub_requests, lock_path, offline_root

_LOCK_AGAIN = "run {}, review the difference, and build again"


def sort_upgrades(
    config: Config, options: ResolveOptions
) -> tuple[ResolveOptions, frozenset[HubRequest]]:
    """Return the options for packages, and the assets that move; ``org/name`` must be one."""
    requests = hub_requests(config)
    if options.upgrade:
        return options, frozenset(requests)
    named = {*options.upgrade_packages}
    moved = frozenset(one for one in requests if named & {one.name, one.label})
    packages = named.difference(*((one.name, one.label) for one in moved))
    for name in (name for name in packages if "/" in name):
        raise ConfigError(
            f"--upgrade-package {name}: no asset of {config.source.name} on the hub has this name",
            hint=f"there are {', '.join(one.label for one in requests) or 'none'}",
        )
    return replace(options, upgrade_packages=tuple(sorted(packages))), moved


def lock_assets(
    config: Config,
    lock: Lock,
    files: HubFiles,
    listener: Listener,
    *,
    locked: bool = False,
    moved: Collection[HubRequest] = (),
) -> Lock:
    """Return the lock with the assets of the settings; all but ``moved`` stay at their commits."""
    requests = hub_requests(config)
    known = {repository.request: repository.commit for repository in lock.assets}
    new = [request.label for request in requests if request not in known]
    if locked and new:
        raise ResolveError(
            f"the lock {lock.path} lacks {', '.join(new)}, and it may not be changed now",
            hint=_LOCK_AGAIN.format("`stager lock`"),
        )
    kept = [repository for repository in lock.assets if repository.request not in moved]
    resolved = resolve(requests, kept, files)
    for repository in resolved:
        request, commit = repository.request, repository.commit
        old = known.get(request, commit)
        if old != commit:
            listener.note(f"{request.kind} {request.label}: {old[:12]} -> {commit[:12]}")
    return keep_assets(lock, resolved)


@dataclass(frozen=True, kw_only=True)
class LockResult:
    """The result of ``stager lock``."""

    lock: Path
    packages: int
    first: bool  # there was no lock before
    changes: PackageChanges
    models: int = 0
    datasets: int = 0
    spaces: int = 0
    asset_bytes: int = 0  # of their files
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Files of each of them that are not taken, by its type and name."""


def lock_project(config: Config, options: ResolveOptions, listener: Listener) -> LockResult:
    """Make the project's lock anew."""
    store = Store(offline_root(config))
    spec = read_buildable_spec(config)
    options, moved = sort_upgrades(config, options)
    _refuse_without_effect(spec, options)
    listener.begin("lock")
    show = partial(listener.step, done=0, total=0)
    files = HubFiles(offline=options.offline, store=store, progress=show)
    with store.lock():
        earlier = find_earlier_lock(lock_path(config, spec), spec.target)
        lock = _make_lock(config, spec, store, options, listener)
        lock = lock_assets(config, lock, files, listener, moved=moved)
    kinds = Counter(repository.request.kind for repository in lock.assets)
    return LockResult(
        lock=lock.path,
        packages=len(lock.files),
        models=kinds["model"],
        datasets=kinds["dataset"],
        spaces=kinds["space"],
        asset_bytes=sum(repository.size for repository in lock.assets),
        first=earlier is None,
        changes=compare_locks(earlier, lock),
        left_out={
            f"{r.request.kind} {r.request.label}": r.left_out for r in lock.assets if r.left_out
        },
    )


def read_buildable_spec(config: Config, launcher: tuple[str, ...] = ()) -> Spec:
    """Return the project's spec; what has to be compiled without the compiler is refused now."""
    spec = read_spec(config)
    builds = replace(spec.builds, launcher=launcher)
    names = [canonicalize_name(Requirement(text).name) for text in spec.requirements]
    refuse_without_nvcc(list_certain_builds(names, builds, spec.indexes), builds)
    return replace(spec, builds=builds)


def ensure_lock(
    config: Config,
    spec: Spec,
    store: Store,
    options: ResolveOptions,
    listener: Listener,
    *,
    locked: bool,
) -> Lock:
    """Return the lock on disk if it matches the spec, else a new one."""
    _refuse_without_effect(spec, options)
    path = lock_path(config, spec)
    if path.exists():
        lock = read_lock(path, spec.target)
        if lock.is_current(spec) and not options.requires_new_lock(lock.exclude_newer):
            return lock
    if locked:
        state = "is out of date" if path.exists() else "does not exist"
        first = f"`{spec.uv_lock.command}`, then " if spec.uv_lock else ""
        raise ResolveError(
            f"the lock {path} {state}, and --locked does not allow making it",
            hint=_LOCK_AGAIN.format(f"{first}`stager lock`"),
        )
    return _make_lock(config, spec, store, options, listener)


def _refuse_without_effect(spec: Spec, options: ResolveOptions) -> None:
    supplied = spec.uv_lock.file if spec.uv_lock else spec.pylock
    cutoff = options.exclude_newer not in (None, NONE)
    if supplied is not None and (options.upgrade or options.upgrade_packages or cutoff):
        writer = f"`{spec.uv_lock.command}`" if spec.uv_lock else "the tool that wrote it"
        raise ConfigError(
            f"{'--exclude-newer' if cutoff else '--upgrade'} has no effect: {supplied} decides all "
            "versions",
            hint=f"give the option to {writer}, and run this command again without it",
        )


def _make_lock(
    config: Config, spec: Spec, store: Store, options: ResolveOptions, listener: Listener
) -> Lock:
    path = lock_path(config, spec)
    earlier = find_earlier_lock(path, spec.target)
    lock = make_lock(spec, path=path, store=store, options=replace(options, note=listener.note))
    lock = keep_assets(lock, earlier.assets if earlier else ())
    for remark in _list_remarks(spec, lock, options):
        listener.note(remark)
    return lock


def _list_remarks(spec: Spec, lock: Lock, options: ResolveOptions) -> Iterator[str]:
    yield from spec.remarks
    yield from _note_torch_index(spec, lock, options)
    names = {file.name for file in lock.files}
    for name in options.upgrade_packages:
        if canonicalize_name(name) not in names:
            yield f"--upgrade-package {name}: the lock has no such package"
    if lock.exclude_newer and options.exclude_newer is None:
        before = f"files uploaded after {lock.exclude_newer} did not count, as in the lock before"
        yield f"{before}; --exclude-newer none lifts that"


def _note_torch_index(spec: Spec, lock: Lock, options: ResolveOptions) -> Iterator[str]:
    backend = lock.torch_backend or spec.torch_backend
    index = f"{TORCH_INDEX}{backend}"
    is_resolved = not (options.offline or spec.pylock or spec.uv_lock)
    if backend and is_resolved and index not in lock.indexes.extra_index_urls:
        yield f"PyTorch's own index, {index}, did not answer: its packages came from the others"


def fetch_decompressor(source: WheelSource, bundled_python: bool) -> Wheel | None:
    """Return what bundles are decompressed with; None where the nodes' Python can do that.

    The project's own indexes are asked first: they may be all there is. The digest is pinned.
    """
    lock = decompressor_lock(source.spec.target, bundled_python=bundled_python)
    if lock is None:
        return None
    indexes = source.spec.all_indexes.strip_credentials()
    if indexes != lock.indexes:
        with suppress(WheelError, ResolveError):
            return source.fetch(replace(lock, indexes=indexes))[0]
    try:
        return source.fetch(lock)[0]
    except WheelError as exc:
        (file,) = lock.files
        raise WheelError(
            "the zstd decompressor that every bundle carries cannot be obtained",
            hint=f"put {file.filename} into {source.store.wheels}, "
            "or build once where an index has it",
            context=exc.context or (exc.message,),
        ) from exc
