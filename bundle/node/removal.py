"""Trees on a node's disk: who uses one, how much becomes free with it, and deleting it.

Symbolic links are deleted, never followed. A tree may be nested as deeply as the file system
allows, and so deeper than Python recurses, than a path reaches, and than there are descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..system import files

if TYPE_CHECKING:
    Links = Counter[tuple[int, int]]
    """How many names of each file have been counted, by device and inode."""

_LEVELS = 64
"""Directories of a tree that are open at a time while it is deleted."""
STARTING_SECONDS = 0.2
"""How long a program may take from its execve to its command line."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def measure(path: str, links: Links) -> int:
    """Bytes that become free with a tree: of files whose every name has been counted.

    Args:
        path: the tree, or a file or link.
        links: what has been counted before as about to go, and is added to.
    """
    total = 0
    for found in _statuses(path):
        if not _is_directory(found):
            links[found.st_dev, found.st_ino] += 1
            if links[found.st_dev, found.st_ino] == found.st_nlink:
                total += found.st_size
    return total


def delete(path: str) -> int:
    """Delete a file, a link or a tree, no links followed; the bytes that became free.

    What can be deleted is, also where something else cannot.

    Raises:
        OSError: it could not be deleted, or not all of it.
    """
    parent = os.open(os.path.dirname(path) or ".", _FOLDER & ~os.O_NOFOLLOW)
    try:
        name = os.path.basename(path)
        if not _is_directory(os.stat(name, dir_fd=parent, follow_symlinks=False)):
            return _unlink(name, parent)
        top = _Level(_open(name, parent), name, [])
        try:
            size, failure = _empty(top)
        finally:
            os.close(top.handle)
        if failure is not None:
            raise OSError(failure.errno, failure.strerror, failure.filename or path)
        os.rmdir(name, dir_fd=parent)
        return size
    finally:
        os.close(parent)


def sweep(path: str) -> None:
    """Delete a file, a link or a tree as far as that goes: nobody depends on its being gone."""
    with contextlib.suppress(OSError):
        delete(path)


@dataclass
class _Level:
    """An open directory that is being emptied."""

    handle: int
    name: str
    folders: list[str]
    """Directories in it that are still to be emptied."""


def _empty(top: _Level) -> tuple[int, OSError | None]:
    """Delete everything in an open directory; the bytes that became free, and the first failure.

    What lies deeper than ``_LEVELS`` is first moved up to the top.
    """
    size, failure = _unlink_files(top)
    levels = [top]
    try:
        while len(levels) > 1 or top.folders:
            level = levels[-1]
            try:
                if not level.folders:
                    levels.pop()
                    os.close(level.handle)
                    os.rmdir(level.name, dir_fd=levels[-1].handle)
                    continue
                name = level.folders.pop()
                handle = _open_below(name, levels)
                if handle is None:
                    continue
                levels.append(_Level(handle, name, []))
                freed, problem = _unlink_files(levels[-1])
                size, failure = size + freed, failure or problem
                if len(levels) > _LEVELS:
                    _move_up(levels[-1], top)
            except FileNotFoundError:
                continue  # somebody else deletes it, too
            except OSError as exc:
                failure = failure or exc
    finally:
        for level in levels[1:]:
            os.close(level.handle)
    return size, failure


def _open_below(name: str, levels: list[_Level]) -> int | None:
    """Open a directory in the last level; None where it was moved up for want of descriptors."""
    top, level = levels[0], levels[-1]
    try:
        return _open(name, level.handle)
    except OSError as exc:
        if exc.errno not in (errno.EMFILE, errno.ENFILE) or level is top:
            raise
    _move(name, level, top)
    return None


def _move_up(level: _Level, top: _Level) -> None:
    """Move the directories in one to the top, under names of their own."""
    while level.folders:
        folder = level.folders.pop()
        os.close(_open(folder, level.handle))  # one that is closed cannot be moved either
        _move(folder, level, top)


def _move(name: str, level: _Level, top: _Level) -> None:
    new = f".{os.getpid()}-{time.monotonic_ns()}"
    os.rename(name, new, src_dir_fd=level.handle, dst_dir_fd=top.handle)
    top.folders.append(new)


def _open(name: str, parent: int) -> int:
    """Open a directory that is to be emptied, also one that its owner has closed to himself."""
    place = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)  # which no link can take the place of
    try:
        mode = stat.S_IMODE(os.fstat(place).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            with contextlib.suppress(PermissionError):  # somebody else's, whose group may do
                os.chmod(f"/proc/self/fd/{place}", mode | stat.S_IRWXU)
        return os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)


def _unlink_files(level: _Level) -> tuple[int, OSError | None]:
    """Delete all but the directories, which are noted; bytes that became free, first failure."""
    size, failure = 0, None
    with os.scandir(level.handle) as listing:
        items = list(listing)
    for item in items:
        if item.is_dir(follow_symlinks=False):
            level.folders.append(item.name)
            continue
        try:
            size += _unlink(item.name, level.handle)
        except FileNotFoundError:
            continue  # somebody else deletes it, too
        except OSError as exc:
            failure = failure or exc
    return size, failure


def _unlink(name: str, parent: int) -> int:
    """Delete one name of a file; the bytes that became free."""
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    os.unlink(name, dir_fd=parent)
    return found.st_size if found.st_nlink == 1 else 0


def user_of(path: str) -> int | None:
    """The id of a process, other than this one, that names a directory or works in it.

    Only processes whose command line and variables this user may read are seen: its own.
    """
    wanted = [os.fsencode(path) + end for end in (b"/", b"\0", b":")]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            said = _said_by(f"/proc/{pid}")
        except OSError:
            continue  # it has ended, or is somebody else's
        if any(one in said + b"\0" for one in wanted):
            return int(pid)
    return None


def _said_by(process: str) -> bytes:
    """Where a process works, its command line and its variables.

    A program that is just being started has no command line yet: it is asked again, for a moment.
    """
    line = _content(f"{process}/cmdline")
    until = time.monotonic() + STARTING_SECONDS
    while not line and time.monotonic() < until and _has_program(process):
        time.sleep(STARTING_SECONDS / 20)
        line = _content(f"{process}/cmdline")
    where = os.fsencode(os.readlink(f"{process}/cwd"))
    return b"\0".join((where, line, _content(f"{process}/environ")))


def _has_program(process: str) -> bool:
    """Whether this is neither a thread of the kernel nor a process that has ended."""
    try:
        return bool(os.readlink(f"{process}/exe"))
    except OSError:
        return False


def _content(path: str) -> bytes:
    with open(path, "rb") as handle:
        return handle.read()


def _is_directory(found: os.stat_result) -> bool:
    return found.st_mode & 0o170000 == 0o040000


def _statuses(path: str) -> Iterator[os.stat_result]:
    """The status of everything in a tree, links not followed; what vanishes is passed over."""
    waiting = [path]
    while waiting:
        here = waiting.pop()
        with contextlib.suppress(OSError):
            found = os.stat(here, follow_symlinks=False)
            yield found
            if _is_directory(found):
                waiting += [os.path.join(here, name) for name in os.listdir(here)]


def last_change(path: str) -> float:
    """When something in a tree was last written, made or renamed; seconds since the epoch."""
    return max((max(one.st_mtime, one.st_ctime) for one in _statuses(path)), default=0.0)


def lock_is_free(path: str) -> bool:
    """Whether nobody holds a lock on a file or directory itself."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)
    except OSError:
        return True  # a link, a socket: nothing that a job would lock
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks; the other signs count
    finally:
        os.close(handle)
    return True


def mounts_below(path: str) -> list[str]:
    """Where file systems are mounted in a tree, its top included."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as handle:
            points = [mount.point for mount in files.parse_mounts(handle.read())]
    except OSError:
        return []
    return [point for point in points if point == path or point.startswith(path + "/")]
