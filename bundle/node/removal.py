"""Trees on a node's disk: their users, the space that they free, and their deletion.

Symbolic links are deleted, never followed. A tree may be nested deeper than Python recurses, than a
path reaches, and than there are descriptors.
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
from pathlib import Path
from typing import TYPE_CHECKING

from ..protocol.dataclass import dataclass
from ..system import files, signals
from .node_root import close_after

if TYPE_CHECKING:
    Links = Counter[tuple[int, int]]  # how often each file was counted, by device and inode

STARTING_SECONDS = 0.2  # seconds that a program may take from its execve to its command line
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def measure(path: str, links: Links) -> int:
    """Return the bytes that a removal frees; a file counts once all its names are in `links`."""
    total = 0
    for status in _iterate_files(path):
        file = (status.st_dev, status.st_ino)
        links[file] += 1
        if links[file] == status.st_nlink:
            total += status.st_size
    return total


def count_new_bytes(path: str, counted: set[tuple[int, int]]) -> int:
    """Return the bytes of a tree's files that were not counted yet; add them to the counted."""
    sizes = {(status.st_dev, status.st_ino): status.st_size for status in _iterate_files(path)}
    new = sum(size for file, size in sizes.items() if file not in counted)
    counted.update(sizes)
    return new


def delete(path: str) -> int:
    """Delete a file, a link or a tree; return the bytes freed. OSError if a part remains."""
    folder, name = os.path.split(path)
    with close_after(os.open(folder or ".", _FOLDER & ~os.O_NOFOLLOW)) as parent:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            return _unlink(name, parent)
        deletion = _Deletion()
        deletion.empty(_open(name, parent))
        if failure := deletion.failure:
            raise OSError(failure.errno, failure.strerror, failure.filename or path)
        os.rmdir(name, dir_fd=parent)
        return deletion.freed


def remove_if_empty(path: str) -> bool:
    """Remove a directory if nothing is in it; return whether it is gone."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.lexists(path)


def delete_as_far_as_possible(path: str) -> None:
    """Delete a file, a link or a tree as far as possible; signals to end take effect after it."""
    with signals.defer_signals(), contextlib.suppress(OSError):
        delete(path)


@dataclass
class _Deletion:
    freed: int = 0
    failure: OSError | None = None  # the first one; that a file is missing is none

    def empty(self, handle: int) -> None:
        """Delete everything in an open directory, and close it; one is open at a time."""
        above: list[tuple[str, os.stat_result, list[str]]] = []
        try:
            folders = self._unlink_files(handle)
            while folders or above:
                if folders:
                    name = folders.pop()
                    with self._note_failure():
                        inner = _open(name, handle)
                        above.append((name, os.fstat(handle), folders))
                        os.close(handle)
                        handle = inner
                        folders = self._unlink_files(handle)
                    continue
                name, status, folders = above.pop()
                outer = os.open("..", _FOLDER, dir_fd=handle)
                os.close(handle)
                handle = outer
                if not os.path.samestat(os.fstat(handle), status):
                    raise OSError(errno.ESTALE, "it was moved while it was deleted", name)
                with self._note_failure():
                    os.rmdir(name, dir_fd=handle)
        finally:
            os.close(handle)

    def _unlink_files(self, handle: int) -> list[str]:
        items: list[os.DirEntry[str]] = []
        with self._note_failure(), os.scandir(handle) as listing:
            items = list(listing)
        folders = []
        for item in items:
            with self._note_failure():
                if item.is_dir(follow_symlinks=False):
                    folders.append(item.name)
                else:
                    self.freed += _unlink(item.name, handle)
        return folders

    @contextlib.contextmanager
    def _note_failure(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as exc:
            self.failure = self.failure or exc


def _open(name: str, parent: int) -> int:
    """Open a directory to empty, even if its mode denies its owner."""
    # No link can replace it.
    with close_after(os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)) as folder:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            with contextlib.suppress(PermissionError):  # another user's; the group may do
                os.chmod(f"/proc/self/fd/{folder}", mode | stat.S_IRWXU)
        return os.open(".", _FOLDER, dir_fd=folder)


def _unlink(name: str, parent: int) -> int:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    os.unlink(name, dir_fd=parent)
    return status.st_size if status.st_nlink == 1 else 0


def find_user_process(path: str) -> int | None:
    """Return the id of a process of this user, but this one, that names a directory or is in it."""
    mentions = [os.fsencode(path) + end for end in (b"/", b"\0", b":")]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                context = _read_context(f"/proc/{pid}")
                if any(mention in context for mention in mentions):
                    return int(pid)
    return None


def _read_context(process: str) -> bytes:
    """Return cwd, command line and variables; wait a moment for a program that is just starting."""
    deadline = time.monotonic() + STARTING_SECONDS
    while not (command_line := Path(process, "cmdline").read_bytes()):
        # A process that has ended, and a kernel thread, have no program.
        if time.monotonic() >= deadline or not os.path.exists(f"{process}/exe"):
            break
        time.sleep(STARTING_SECONDS / 20)
    directory = os.fsencode(os.readlink(f"{process}/cwd"))
    return b"\0".join((directory, command_line, Path(process, "environ").read_bytes(), b""))


def _iterate_statuses(path: str) -> Iterator[os.stat_result]:
    pending = [path]
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            status = os.stat(current, follow_symlinks=False)
            yield status
            if stat.S_ISDIR(status.st_mode):
                pending += [os.path.join(current, name) for name in os.listdir(current)]


def _iterate_files(path: str) -> Iterator[os.stat_result]:
    return (status for status in _iterate_statuses(path) if not stat.S_ISDIR(status.st_mode))


def get_last_change(path: str) -> float:
    """Return the time of the last change in a tree, in seconds since the epoch."""
    times = (max(status.st_mtime, status.st_ctime) for status in _iterate_statuses(path))
    return max(times, default=0.0)


def is_unlocked(path: str) -> bool:
    """Return True if nobody holds a lock on a file or directory itself."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError), close_after(os.open(path, flags)) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True  # also a link, a socket, which no job locks; or a file system without locks


def list_mounts(path: str) -> list[str]:
    """Return the mount points in a tree, its top included."""
    text = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    points = [mount.point for mount in files.parse_mounts(text)]
    return [point for point in points if point == path or point.startswith(path + "/")]
