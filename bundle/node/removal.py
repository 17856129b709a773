"""Trees on a node's disk: their users, the space that they free, and their deletion.

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

from ..system import files, signals

if TYPE_CHECKING:
    Links = Counter[tuple[int, int]]
    """The number of names counted of each file, by device and inode."""

_LEVELS = 64
"""Directories that are open at the same time while a tree is deleted."""
STARTING_SECONDS = 0.2
"""Seconds that a program may take from its execve to its command line."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def measure(path: str, links: Links) -> int:
    """Return the bytes that a removal frees; a file counts once all its names are in `links`."""
    total = 0
    for status in _statuses(path):
        if _is_directory(status):
            continue
        file = (status.st_dev, status.st_ino)
        links[file] += 1
        if links[file] == status.st_nlink:
            total += status.st_size
    return total


def count_new_bytes(path: str, counted: set[tuple[int, int]]) -> int:
    """Return the bytes of a tree's files that were not counted yet; add them to the counted."""
    found = [status for status in _statuses(path) if not _is_directory(status)]
    files = {(status.st_dev, status.st_ino): status.st_size for status in found}
    new = sum(size for file, size in files.items() if file not in counted)
    counted.update(files)
    return new


def delete(path: str) -> int:
    """Delete a file, a link or a tree, links not followed; return the bytes that became free.

    A failure does not keep the rest from being deleted.

    Raises:
        OSError: it could not be deleted, or not all of it.
    """
    parent = os.open(os.path.dirname(path) or ".", _FOLDER & ~os.O_NOFOLLOW)
    try:
        name = os.path.basename(path)
        if not _is_directory(os.stat(name, dir_fd=parent, follow_symlinks=False)):
            return _unlink(name, parent)
        top = _Level(_open(name, parent), name, [])
        deletion = _Deletion(top)
        try:
            deletion.empty()
        finally:
            os.close(top.handle)
        failure = deletion.failure
        if failure is not None:
            raise OSError(failure.errno, failure.strerror, failure.filename or path)
        os.rmdir(name, dir_fd=parent)
        return deletion.freed
    finally:
        os.close(parent)


def remove_if_empty(path: str) -> bool:
    """Remove a directory if nothing is in it; return whether it is gone."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.lexists(path)


def delete_as_far_as_possible(path: str) -> None:
    """Delete a file, a link or a tree as far as possible; failures do not matter.

    A signal to end that comes meanwhile takes effect afterwards: what is swept is often the last
    that a job leaves, and nobody else would soon delete the rest of it.
    """
    try:
        with contextlib.suppress(OSError):
            delete(path)
    except signals.Stopped:  # it comes only once
        with contextlib.suppress(OSError):
            delete(path)
        raise


@dataclass
class _Level:
    handle: int
    name: str
    folders: list[str]
    """Directories in it that are still to be emptied."""


@dataclass
class _Deletion:
    """Delete everything in an open directory, without recursion."""

    top: _Level
    """The directory; what lies deeper than ``_LEVELS`` is first moved up to it."""
    freed: int = 0
    failure: OSError | None = None

    def empty(self) -> None:
        """Delete what can be deleted; keep the first failure."""
        self._unlink_files(self.top)
        levels = [self.top]
        try:
            while len(levels) > 1 or self.top.folders:
                try:
                    if levels[-1].folders:
                        self._descend(levels)
                    else:
                        _leave(levels)
                except OSError as exc:
                    self._note(exc)
        finally:
            for level in levels[1:]:
                os.close(level.handle)

    def _descend(self, levels: list[_Level]) -> None:
        name = levels[-1].folders.pop()
        handle = _open_below(name, levels)
        if handle is None:
            return
        level = _Level(handle, name, [])
        levels.append(level)
        self._unlink_files(level)
        if len(levels) > _LEVELS:
            _move_up(level, self.top)

    def _unlink_files(self, level: _Level) -> None:
        with os.scandir(level.handle) as listing:
            items = list(listing)
        for item in items:
            if item.is_dir(follow_symlinks=False):
                level.folders.append(item.name)
                continue
            try:
                self.freed += _unlink(item.name, level.handle)
            except OSError as exc:
                self._note(exc)

    def _note(self, exc: OSError) -> None:
        """Keep the first failure; a missing file was deleted by another process."""
        if self.failure is None and not isinstance(exc, FileNotFoundError):
            self.failure = exc


def _leave(levels: list[_Level]) -> None:
    level = levels.pop()
    os.close(level.handle)
    os.rmdir(level.name, dir_fd=levels[-1].handle)


def _open_below(name: str, levels: list[_Level]) -> int | None:
    """Open a subdirectory; None if it was moved up for lack of descriptors."""
    top, level = levels[0], levels[-1]
    try:
        return _open(name, level.handle)
    except OSError as exc:
        if exc.errno not in (errno.EMFILE, errno.ENFILE) or level is top:
            raise
    _move(name, level, top)
    return None


def _move_up(level: _Level, top: _Level) -> None:
    """Move the directories in a level to the top, under new names."""
    while level.folders:
        folder = level.folders.pop()
        # A directory closed to its owner cannot be moved either, until opening it changes its mode.
        os.close(_open(folder, level.handle))
        _move(folder, level, top)


def _move(name: str, level: _Level, top: _Level) -> None:
    new = f".{os.getpid()}-{time.monotonic_ns()}"
    os.rename(name, new, src_dir_fd=level.handle, dst_dir_fd=top.handle)
    top.folders.append(new)


def _open(name: str, parent: int) -> int:
    """Open a directory to empty, even if its mode denies its owner."""
    folder = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)  # no link can replace it
    try:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            with contextlib.suppress(PermissionError):  # another user's; the group may do
                os.chmod(f"/proc/self/fd/{folder}", mode | stat.S_IRWXU)
        return os.open(".", _FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def _unlink(name: str, parent: int) -> int:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    os.unlink(name, dir_fd=parent)
    return status.st_size if status.st_nlink == 1 else 0


def find_user_process(path: str) -> int | None:
    """Return the id of a process, other than this one, that names a directory or works in it.

    Only processes whose command line and variables this user may read are seen: its own.
    """
    mentions = [os.fsencode(path) + end for end in (b"/", b"\0", b":")]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            context = _context_of(f"/proc/{pid}") + b"\0"
        except OSError:
            continue  # it has ended, or belongs to another user
        if any(mention in context for mention in mentions):
            return int(pid)
    return None


def _context_of(process: str) -> bytes:
    """Return cwd, command line and variables; wait a moment for a program that is just starting."""
    command_line = _content(f"{process}/cmdline")
    deadline = time.monotonic() + STARTING_SECONDS
    while not command_line and time.monotonic() < deadline and _has_program(process):
        time.sleep(STARTING_SECONDS / 20)
        command_line = _content(f"{process}/cmdline")
    directory = os.fsencode(os.readlink(f"{process}/cwd"))
    return b"\0".join((directory, command_line, _content(f"{process}/environ")))


def _has_program(process: str) -> bool:
    """Return False for a process that has ended, and for a kernel thread."""
    try:
        return bool(os.readlink(f"{process}/exe"))
    except OSError:
        return False


def _content(path: str) -> bytes:
    with open(path, "rb") as handle:
        return handle.read()


def _is_directory(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode)


def _statuses(path: str) -> Iterator[os.stat_result]:
    pending = [path]
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            status = os.stat(current, follow_symlinks=False)
            yield status
            if _is_directory(status):
                pending += [os.path.join(current, name) for name in os.listdir(current)]


def get_last_change(path: str) -> float:
    """Return the time of the last change in a tree, in seconds since the epoch."""
    latest = 0.0
    for status in _statuses(path):
        latest = max(latest, status.st_mtime, status.st_ctime)
    return latest


def is_unlocked(path: str) -> bool:
    """Return True if nobody holds a lock on a file or directory itself."""
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


def list_mounts_below(path: str) -> list[str]:
    """Return the mount points in a tree, its top included."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as handle:
            points = [mount.point for mount in files.parse_mounts(handle.read())]
    except OSError:
        return []
    return [point for point in points if point == path or point.startswith(path + "/")]
