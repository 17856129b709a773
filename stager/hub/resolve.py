"""From what the user asks for to a commit and the digest of each file."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.format.layer import abridged
from bundle.protocol.counts import counted

from ..core.errors import StagerError
from .caches import HubFiles
from .client import HubAnswer
from .locked import HubFile, LockedRepository, is_safe
from .names import HubRequest
from .selection import selected


def resolve(
    requests: Sequence[HubRequest], known: Sequence[LockedRepository], files: HubFiles
) -> tuple[LockedRepository, ...]:
    """Resolve requests, each at most once: what is known stays as it is.

    Raises:
        StagerError: repositories that cannot be resolved; all of them.
    """
    resolved = {repository.request: repository for repository in known}
    faults: list[StagerError] = []
    for request in requests:
        if request in resolved:
            continue
        try:
            resolved[request] = _resolved(request, files)
        except StagerError as exc:
            faults.append(exc)
            if exc.context:  # the hub did not answer: it would not answer for the others either
                break
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise StagerError(
            f"{counted(len(faults), 'model or data set', 'models and data sets')} cannot be had",
            hint="; ".join(dict.fromkeys(fault.hint for fault in faults)),
            context=[fault.message for fault in faults],
        )
    return tuple(resolved[request] for request in dict.fromkeys(requests))


def _resolved(request: HubRequest, files: HubFiles) -> LockedRepository:
    if files.hub is None:
        raise StagerError(
            f"{request.kind} {request.label} is not in the lock, and nothing may be fetched",
            hint="run `stager lock` once where the hub can be reached",
        )
    answer = files.hub.describe(request)
    paths = selected(request, [entry.path for entry in answer.entries], answer.configs)
    return LockedRepository(
        request=request,
        commit=answer.commit,
        licence=answer.licence,
        files=tuple(_locked_files(request, answer, set(paths), files)),
        left_out=_left_out(answer, set(paths)),
    )


def _left_out(answer: HubAnswer, paths: set[str]) -> tuple[str, ...]:
    others = {entry.path for entry in answer.entries} - paths
    return tuple(sorted(filter(is_safe, others)))


def _locked_files(
    request: HubRequest, answer: HubAnswer, paths: set[str], files: HubFiles
) -> list[HubFile]:
    unusable = [entry for entry in answer.entries if entry.path in paths and entry.problem]
    if unusable:
        raise StagerError(
            f"{request.kind} {request.label}: the hub lists files that cannot be used",
            hint="name the files to take with files = [...] in its entry of stager.toml"
            if all(entry.is_named_badly for entry in unusable)
            else "check HF_ENDPOINT: what answers there does not list sizes and digests as the hub "
            "does; lock where the hub itself can be reached",
            context=[f"{abridged(entry.path)!r}: {entry.problem}" for entry in unusable],
        )
    locked = []
    for entry in sorted(answer.entries, key=lambda entry: entry.path):
        if entry.path not in paths:
            continue
        digest = entry.sha256
        if digest is None:
            digest = files.digest(request, answer.commit, entry)
        locked.append(HubFile(path=entry.path, size=entry.size, sha256=digest))
    return locked
