"""Files of a hub that were fetched into the offline root and are waiting for a build.

They lie in the layout of ``huggingface_hub``: a folder for each repository, in it ``blobs`` and,
for each commit, a folder of links to them. A build removes all of them once it has their layers, so
what is here was fetched for a lock only, or for a build that failed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from ..core.store import remove, size_of
from ..hub.client import is_the_users
from .files import files_in, folders_in

_REPOSITORIES = ("models--", "datasets--", "spaces--")
_OWN = "own-"
"""Small files that a build writes for its layers."""
_SNAPSHOTS, _BLOBS, _LOCKS = "snapshots", "blobs", ".locks"


def unused(hub: Path, commits: Collection[str], limit: float) -> Iterator[tuple[Path, int, str]]:
    """Yield path, bytes and reason of unused files; none if ``hub`` is the user's own cache."""
    if hub.is_symlink() or is_the_users(hub, os.environ):
        return
    for path in files_in(hub, ""):
        if path.name.startswith(_OWN) and _last_use(path) <= limit:
            yield path, size_of(path), "a build left it"
    for repository in folders_in(hub):
        if repository.name.startswith(_REPOSITORIES):
            yield from _unused_in(repository, commits, limit)


def _unused_in(
    repository: Path, commits: Collection[str], limit: float
) -> Iterator[tuple[Path, int, str]]:
    """Yield a repository as a whole, or those of its commits that no lock names."""
    snapshots = folders_in(repository / _SNAPSHOTS)
    unnamed = [snapshot for snapshot in snapshots if snapshot.name not in commits]
    if len(unnamed) == len(snapshots):
        if _last_use(repository) <= limit:
            yield repository, size_of(repository), "no lock names it"
        return
    for snapshot in unnamed:
        parts = [snapshot, *_only_in(snapshot)]
        if max(map(_last_use, parts)) <= limit:
            yield snapshot, sum(map(size_of, parts)), "no lock names this commit"


def remove_unused(path: Path) -> bool:
    """Remove what :func:`unused` named; return whether it is gone."""
    if path.parent.name == _SNAPSHOTS:
        for blob in _only_in(path):
            remove(blob)
    elif not path.is_file():
        remove(path.parent / _LOCKS / path.name)
    return remove(path)


def _only_in(snapshot: Path) -> list[Path]:
    """Return the blobs that no other commit of the repository has."""
    others: set[Path] = set()
    for other in folders_in(snapshot.parent):
        if other != snapshot:
            others |= _blobs(other)
    return sorted(_blobs(snapshot) - others)


def _blobs(snapshot: Path) -> set[Path]:
    folder = snapshot.parents[1] / _BLOBS
    found = set()
    for path in snapshot.rglob("*"):
        blob = folder / path.readlink().name if path.is_symlink() else folder
        if blob.is_file():
            found.add(blob)
    return found


def _last_use(path: Path) -> float:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return max(status.st_mtime, status.st_atime)
    return max((status.st_mtime, *map(_last_use, path.iterdir())))
