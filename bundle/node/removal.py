"""Trees on a node's disk: who uses one, how much becomes free with it, and deleting it.

Symbolic links are deleted, never followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import fs

if TYPE_CHECKING:
    Links = Counter[tuple[int, int]]
    """How many names of each file have been counted, by device and inode."""


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

    Raises:
        OSError: it could not be deleted, or not all of it.
        RecursionError: it is nested too deeply.
    """
    if os.path.islink(path) or not os.path.isdir(path):
        size = measure(path, Counter())
        os.unlink(path)
        return size
    _open_up(path)
    size = measure(path, Counter())
    shutil.rmtree(path)
    return size


def user_of(path: str) -> int | None:
    """The id of a process, other than this one, that names a directory or works in it.

    Only processes whose command line and variables this user may read are seen: its own.
    """
    wanted = [os.fsencode(path) + end for end in (b"/", b"\0", b":")]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            said = os.fsencode(os.readlink(f"/proc/{pid}/cwd"))
            for name in ("cmdline", "environ"):
                with open(f"/proc/{pid}/{name}", "rb") as handle:
                    said += b"\0" + handle.read()
        except OSError:
            continue  # it has ended, or is somebody else's
        if any(one in said + b"\0" for one in wanted):
            return int(pid)
    return None


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


def _open_up(path: str) -> None:
    """Let directories be emptied whose owner, this user, has closed them to himself."""
    waiting = [path]
    while waiting:
        here = waiting.pop()
        mode = os.stat(here, follow_symlinks=False).st_mode & 0o7777
        if mode & 0o700 != 0o700:
            os.chmod(here, mode | 0o700)
        with os.scandir(here) as listing:
            waiting += [one.path for one in listing if one.is_dir(follow_symlinks=False)]


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
            points = [mount.point for mount in fs.parse_mounts(handle.read())]
    except OSError:
        return []
    return [point for point in points if point == path or point.startswith(path + "/")]
