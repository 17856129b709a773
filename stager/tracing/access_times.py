"""Access times: a place where they are kept, and which files of a tree were read.

Every file gets an access time of long ago before a program runs. Linux renews it when the file is
read or mapped, even with the mount option ``relatime``, which is the default: that holds back only
times of less than a day (mount(8)). With ``noatime``, and on many network file systems, nothing is
renewed; so a file is read to find out, before a place is used.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bundle.node.node_root import automatic_bases, choose_base
from bundle.protocol.counts import sized
from bundle.protocol.problem import NodeError

from ..core.errors import StagerError
from ..core.store import Store, remove

LONG_AGO = 946_684_800 * 10**9
"""The first second of 2000, in nanoseconds: the access time of files that nobody has read."""


@contextlib.contextmanager
def traced_place(store: Store, room: tuple[int, int]) -> Iterator[Path]:
    """Yield an empty directory on a file system that keeps access times; it is removed at the end.

    The offline root is tried first, where the next build sweeps what a killed command leaves; then
    the directories in which a node root may lie.

    Args:
        store: the offline root.
        room: bytes and inodes that are needed.

    Raises:
        StagerError: no place will do; every one is listed with the reason.
    """
    refused: list[str] = []
    with contextlib.ExitStack() as stack:
        for name, candidate in _candidates(store):
            with contextlib.ExitStack() as tried:
                try:
                    folder = tried.enter_context(candidate)
                    reason = _refusal(folder, room)
                except (OSError, StagerError) as exc:
                    reason = getattr(exc, "strerror", None) or str(exc)
                if not reason:
                    stack.push(tried.pop_all())
                    break
            refused.append(f"{name}: {reason}")
        else:
            raise StagerError(
                "there is no place here where it shows which files a program reads",
                hint="set $TMPDIR to a directory on a local file system that is not mounted with "
                f"noatime and has room for {sized(room[0])}",
                context=refused,
            )
        yield folder


def _candidates(
    store: Store,
) -> Iterator[tuple[str, contextlib.AbstractContextManager[Path]]]:
    yield str(store.root), store.scratch_without_lock("trace")
    for _, base in automatic_bases(os.environ):
        yield base, _temporary(base)


@contextlib.contextmanager
def _temporary(base: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="stager-trace-", dir=base))
    try:
        yield folder
    finally:
        remove(folder)


def _refusal(folder: Path, room: tuple[int, int]) -> str:
    try:
        choose_base(str(folder), {}, room)
    except NodeError as exc:
        return exc.problem.values["why"].replace(f"{folder}: ", "")
    if keeps_access_times(folder):
        return ""
    if os.statvfs(folder).f_flag & os.ST_NOATIME:
        return "it is mounted with noatime"
    return "its file system does not renew the access time of a file that is read"


def keeps_access_times(folder: Path) -> bool:
    """Return whether reading a file in a directory renews the file's access time."""
    file = folder / "read"
    file.write_bytes(b"read")
    try:
        _set_back(str(file), file.stat())
        file.read_bytes()
        return is_read(str(file))
    finally:
        file.unlink()


def set_back(tree: Path) -> None:
    """Give every file of a tree an access time of long ago; other times stay as they are.

    Raises:
        StagerError: it cannot be done.
    """
    pending = [str(tree)]
    try:
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        _set_back(entry.path, entry.stat(follow_symlinks=False))
    except OSError as exc:
        raise StagerError(
            f"{exc.filename}: its access time cannot be set: {exc.strerror}",
            hint="set $TMPDIR to a directory on a local file system",
        ) from exc


def _set_back(path: str, status: os.stat_result) -> None:
    # The other time is compared with the environment's listing when a job uses it.
    os.utime(path, ns=(LONG_AGO, status.st_mtime_ns), follow_symlinks=False)


def is_read(path: str) -> bool:
    """Return whether a file was read since its time was set back; one that is gone counts, too."""
    try:
        return os.lstat(path).st_atime_ns != LONG_AGO
    except FileNotFoundError:
        return True
