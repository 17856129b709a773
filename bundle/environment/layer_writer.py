"""Writing the files of layers, several frames at a time.

What a frame holds has been checked; where a file begins and ends in it, and its digest, only the
index says, which was made by whoever made the bundle. So each file of a bundle that somebody else
made is compared with its digest, which costs half as much again.
"""

from __future__ import annotations

import errno
import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..format.archive import BundleFile
from ..format.decompressor import Decompress
from ..format.layer import Entry, Index, LayerError
from ..format.manifest import Layer
from ..protocol.problem import NodeError, Problem
from ..system.files import digest_of
from .process_pool import share

Fresh = tuple[Layer, Index, Sequence[Entry]]
"""A layer that is written, what it holds, and which of its files are wanted."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Work:
    """How layers are written."""

    decompress: Decompress
    """Turns a frame into its content."""
    processes: int
    """How many processes work."""
    compare: bool
    """Whether each file is compared with its digest."""


def write_layers(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[Fresh],
    work: Work,
) -> None:
    """Write the files of the given layers, one frame a task, in the order of the file.

    That is the order in which the frames arrive where it is still being sent, and in which a disk
    reads best.
    """
    tasks = []
    for layer, index, entries in fresh:
        offset, start = bundle.frames_start(layer), 0
        starts = [entry.offset for entry in entries]
        for frame in index.frames:
            end = start + frame.unpacked_size
            # The last entry that begins at or before `start` may reach into this frame.
            first = max(bisect_right(starts, start) - 1, 0)
            last = bisect_right(starts, end - 1)
            tasks.append((offset, frame, start, entries[first:last]))
            offset, start = offset + frame.size, end

    def write(number: int) -> None:
        offset, frame, start, entries = tasks[number]
        data = bundle.frame(offset, frame.size, frame.sha256)
        with bundle.refusing(LayerError):
            content = work.decompress(data, frame.unpacked_size)
        try:
            with bundle.refusing(LayerError):
                _write_files(staging, memoryview(content), start, entries, work.compare)
        except OSError as exc:
            raise NodeError(write_problem(exc, staging)) from exc

    share(len(tasks), write, work.processes)
    if work.compare:
        _compare_long(bundle, staging, fresh, work.processes)


def _compare_long(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[Fresh],
    processes: int,
) -> None:
    """Compare the files that lie in several frames, the largest first; they are read again."""
    long = [
        entry
        for _, index, entries in fresh
        for entry, whole in zip(entries, _in_one_frame(index, entries))
        if not whole
    ]
    long.sort(key=lambda entry: -entry.size)

    def work(number: int) -> None:
        entry = long[number]
        try:
            with open(os.path.join(staging, entry.path), "rb") as file:
                digest = digest_of(file.fileno())
        except OSError as exc:
            raise NodeError(write_problem(exc, staging)) from exc
        with bundle.refusing(LayerError):
            _compare(digest, entry)

    share(len(long), work, processes)


def _in_one_frame(index: Index, entries: Sequence[Entry]) -> Iterator[bool]:
    """Tell of each file, in the order of the index, whether one frame holds all of it."""
    ends = list(accumulate(frame.unpacked_size for frame in index.frames))
    for entry in entries:
        frame = bisect_right(ends, entry.offset)
        yield not entry.size or entry.offset + entry.size <= ends[frame]


def _compare(digest: str, entry: Entry) -> None:
    """Compare the digest of a file with that in the index.

    Raises:
        LayerError: it is another one.
    """
    if digest != entry.sha256:
        raise LayerError(f"{entry.path} does not have the digest in the index of its layer")


def _write_files(
    staging: str, content: memoryview, start: int, entries: Sequence[Entry], compare: bool
) -> None:
    """Write what one frame holds of each file; a file may go on in the next frame."""
    end = start + len(content)
    for entry in entries:
        begin, stop = max(entry.offset, start), min(entry.offset + entry.size, end)
        if begin > stop or (begin == stop and entry.offset < start):
            continue
        # O_NOFOLLOW and no link in the tree yet: nothing can redirect what is written.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(os.path.join(staging, entry.path), flags, entry.mode)
        try:
            place = begin - entry.offset
            part = content[begin - start : stop - start]
            if compare and len(part) == entry.size:
                _compare(hashlib.sha256(part).hexdigest(), entry)
            while part:
                written = os.pwrite(handle, part, place)
                part, place = part[written:], place + written
        finally:
            os.close(handle)


def write_problem(exc: OSError, where: str) -> Problem:
    """What an error while writing means; a full disk and a full quota have their own words."""
    full = exc.errno in _NO_ROOM
    return Problem(
        what="the environment does not fit" if full else "the environment cannot be written",
        where=str(exc.filename or where),
        why=exc.strerror or str(exc),
        fix="see the space, the inodes and the permissions there, or name another place with "
        "[cluster] node-root or $STAGER_NODE_ROOT",
    )
