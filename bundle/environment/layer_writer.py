"""The files of layers, written by several processes, a frame at a time.

The bytes of a frame have been checked, but only the index, which the bundle's author made, knows
where a file begins and ends in them. So each file of a bundle that somebody else made is compared
with its digest, which costs half as much again.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..format.archive import BundleFile
from ..format.layer import Entry, Frame, Index, LayerError
from ..format.manifest import Layer
from ..format.zstd import Decompress
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import digest_of, disk_problem
from .process_pool import share

_NICENESS = 10
"""Of processes that unpack a bundle while it arrives. Other nodes wait for what this one's relay
passes on, which needs the same processors; nobody else waits for what is unpacked."""
Fresh = tuple[Layer, Index, Sequence[Entry]]
"""A layer that is written, its index, and the files of it that are wanted."""


@dataclass(frozen=True)
class WriteSettings:
    """The settings of writing."""

    decompress: Decompress
    """Turns a frame into its content."""
    processes: int
    """Number of processes."""
    compare: bool
    """True to compare each file with its digest."""


class _Task(NamedTuple):
    """One frame, and the files that have bytes in it."""

    offset: int
    """The start of its compressed bytes in the bundle."""
    frame: Frame
    start: int
    """The start of its content in the layer's tar."""
    entries: Sequence[Entry]


def write_layers(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[Fresh],
    work: WriteSettings,
) -> None:
    """Write the files of the given layers, one frame a task, in the order of the file.

    The frames of a file that is still being transferred arrive in that order, and a disk reads it
    best.
    """
    tasks = [task for item in fresh for task in _tasks(bundle, item)]

    def write(number: int) -> None:
        task = tasks[number]
        frame = task.frame
        data = bundle.frame(task.offset, frame.size, frame.sha256)
        with bundle.refusing(LayerError):
            content = work.decompress(data, frame.unpacked_size)
        try:
            with bundle.refusing(LayerError):
                _write_files(staging, memoryview(content), task.start, task.entries, work.compare)
        except OSError as exc:
            raise NodeError(write_problem(exc, staging)) from exc

    niceness = _NICENESS if bundle.is_arriving else 0
    share(len(tasks), write, work.processes, niceness=niceness)
    if work.compare:
        _compare_long(bundle, staging, fresh, work.processes)


def _tasks(bundle: BundleFile, item: Fresh) -> Iterator[_Task]:
    layer, index, entries = item
    offset = bundle.frames_start(layer)
    starts = [entry.offset for entry in entries]
    start = 0
    for frame in index.frames:
        end = start + frame.unpacked_size
        # The last entry that begins at or before `start` may reach into this frame.
        first = max(bisect_right(starts, start) - 1, 0)
        last = bisect_right(starts, end - 1)
        yield _Task(offset, frame, start, entries[first:last])
        offset += frame.size
        start = end


def _compare_long(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[Fresh],
    processes: int,
) -> None:
    """Compare files that span frames, the largest first; they are read again."""
    long: list[Entry] = []
    for _, index, entries in fresh:
        long += _across_frames(index, entries)
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


def _across_frames(index: Index, entries: Sequence[Entry]) -> Iterator[Entry]:
    ends = list(accumulate(frame.unpacked_size for frame in index.frames))
    for entry in entries:
        if not entry.size:
            continue
        frame = bisect_right(ends, entry.offset)
        if entry.offset + entry.size > ends[frame]:
            yield entry


def _compare(digest: str, entry: Entry) -> None:
    if digest != entry.sha256:
        raise LayerError(f"{entry.path} does not have the digest in the index of its layer")


def _write_files(
    staging: str, content: memoryview, start: int, entries: Sequence[Entry], compare: bool
) -> None:
    """Write one frame's part of each file; a file may continue in the next frame."""
    end = start + len(content)
    for entry in entries:
        begin, stop = max(entry.offset, start), min(entry.offset + entry.size, end)
        if begin > stop or (begin == stop and entry.offset < start):
            continue
        # O_NOFOLLOW, and no link in the tree yet: nothing can redirect a write.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(os.path.join(staging, entry.path), flags, entry.mode)
        try:
            position = begin - entry.offset
            part = content[begin - start : stop - start]
            if compare and len(part) == entry.size:
                _compare(hashlib.sha256(part).hexdigest(), entry)
            while part:
                written = os.pwrite(handle, part, position)
                part, position = part[written:], position + written
        finally:
            os.close(handle)


def write_problem(exc: OSError, where: str) -> Problem:
    """Return the problem behind an error while writing, such as a full disk or quota."""
    full, unwritable = ProblemCode.ENVIRONMENT_DISK_FULL, ProblemCode.ENVIRONMENT_UNWRITABLE
    return disk_problem(exc, str(exc.filename or where), full, unwritable)
