"""Removing trees: no link followed, no depth too great, and never the end of a command."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_OWNER = stat.S_IRWXU
_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: Path) -> bool:
    """Remove a file, a link or a tree; what cannot be removed stays, and is logged.

    A directory that lies in another one is moved to the tree's top before it is emptied: so neither
    the depth of a tree nor the length of its paths matters.

    Returns:
        Whether it is gone.
    """
    faults: list[OSError] = []
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            faults = _empty(path)
            if not faults:
                path.rmdir()
        else:
            path.unlink()
    except FileNotFoundError:
        return True
    except OSError as exc:
        faults.append(exc)
    if faults:
        why = faults[0].strerror or str(faults[0])
        log.warning("%s could not be removed, or not all of it: %s", path, why)
    return not faults


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of every file in a tree, that has no other name.

    What cannot be looked at, or vanishes meanwhile, counts as nothing.
    """
    total = 0
    waiting = [str(path)]
    while waiting:
        here = waiting.pop()
        with contextlib.suppress(OSError):
            status = os.lstat(here)
            if stat.S_ISDIR(status.st_mode):
                waiting += [f"{here}/{name}" for name in os.listdir(here)]  # noqa: PTH208
            elif status.st_nlink == 1:
                total += status.st_size
    return total


def _empty(tree: Path) -> list[OSError]:
    """Remove all that is in a directory; give what stood in the way."""
    faults: list[OSError] = []
    stuck: set[str] = set()
    with _opened(str(tree), None) as top:
        while left := [entry for entry in _entries(top) if entry.name not in stuck]:
            for entry in left:
                try:
                    _remove(entry, top)
                except FileNotFoundError:
                    stuck.add(entry.name)  # somebody else removed it, and may go on
                except OSError as exc:
                    stuck.add(entry.name)
                    faults.append(exc)
    return faults


def _remove(entry: os.DirEntry[str], top: int) -> None:
    """Remove an entry of the top directory; what directories it holds become entries there."""
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.name, dir_fd=top)
        return
    with _opened(entry.name, top) as folder:
        for inner in _entries(folder):
            if not inner.is_dir(follow_symlinks=False):
                os.unlink(inner.name, dir_fd=folder)
                continue
            with _opened(inner.name, folder):  # a directory must be writable to be moved
                new = f"moved-{secrets.token_hex(8)}"
                os.rename(inner.name, new, src_dir_fd=folder, dst_dir_fd=top)
    os.rmdir(entry.name, dir_fd=top)


def _entries(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(found)


@contextlib.contextmanager
def _opened(name: str, parent: int | None) -> Iterator[int]:
    """Open a directory, made readable and writable first where its owner, this user, may not."""
    handle = os.open(name, os.O_PATH | _FLAGS, dir_fd=parent)
    try:
        mode = os.fstat(handle).st_mode
        if mode & _OWNER != _OWNER:
            with contextlib.suppress(PermissionError):  # somebody else's, whose group may do
                Path(f"/proc/self/fd/{handle}").chmod(stat.S_IMODE(mode) | _OWNER)
        readable = os.open(".", os.O_RDONLY | _FLAGS, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield readable
    finally:
        os.close(readable)
