"""Frames: messages of any length through ``srun``, from many nodes, with every loss detected.

``slurmstepd`` passes on what a task writes in blocks of about a kilobyte, whole lines as long as
they fit (``_task_build_message`` in slurmstepd's io.c). When a task ends, its last blocks ignore
line ends, so other tasks' bytes land inside a line. So every message is cut here into frames that
fit into a block, and that a reader finds again after any other bytes::

    <RS>SOURCE NUMBER LENGTH CRC32 MARK PAYLOAD<LF>

``<RS>`` (0x1e) is in no payload, as payloads are JSON. Each source counts its frames from 1: what
is missing shows, and can be sent again. The mark says which part of a message it is: ``.`` all of
it, ``(`` the first, ``+`` one in the middle, ``)`` the last. A shell, which counts nothing, sends
``<RS>SOURCE 0 0 - . PAYLOAD<LF>``; without a payload that is a heartbeat.
"""

from __future__ import annotations

import collections
import re
import zlib
from collections.abc import Iterator
from dataclasses import field

from ..protocol.dataclass import dataclass

# --- Lines out of pieces of any size, in a time that grows with the bytes and not with the pieces


class Lines:
    """Splits what comes piece by piece.

    Attributes:
        pending: the number of bytes that have no line's end yet.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self.pending = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what was read; return the lines that are now whole, without their ends."""
        first, *more = chunk.split(b"\n")
        self._rest.append(first)
        if not more:
            self.pending += len(first)
            return []
        lines = [b"".join(self._rest), *more[:-1]]
        self._rest, self.pending = [more[-1]], len(more[-1])
        return lines

    def last(self) -> bytes:
        """Return what has no end; nothing is pending then."""
        last = b"".join(self._rest)
        self._rest, self.pending = [], 0
        return last


LONGEST = 960  # bytes of one frame, its line end included
KEPT = 4 << 20
"""Bytes of frames that a writer keeps, to send them again, and that a reader holds behind a gap.

More than what is under way: Slurm holds up to a thousand blocks on each side."""
_RS = b"\x1e"
_HEAD = re.compile(rb"([^\s\x1e]{1,400}) (\d{1,15}) (\d{1,3}) ([0-9a-f]{8}) ([.(+)]) ")
_UNCOUNTED = re.compile(rb"([^\s\x1e]{1,400}) 0 0 - \. ([^\n]*)\n")
_LONGEST_UNCOUNTED = 1 << 13
_LONGEST_LINE = 1 << 16  # bytes outside any frame after which they are passed on without a line end

Gap = tuple[int, int]  # the first and the last number of frames that are missing


def heartbeat(source: str) -> bytes:
    """Return the frame by which a source shows that it is alive; it is never sent again."""
    return b"\x1e%s 0 0 - . \n" % source.encode()


class FrameWriter:
    """Cuts the messages of one source into frames, and keeps the last of them."""

    def __init__(self, source: str, number: int = 0) -> None:
        """Send as a source (a name without blanks), after the number of its last frame."""
        self.number = number
        self._source = source.encode()
        self._room = LONGEST - len(self._source) - 36
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque()
        self._bytes = 0

    def frames(self, message: bytes) -> bytes:
        """Return the frames of one message, which must be JSON in one line."""
        room = self._room
        last = max(0, len(message) - 1) // room
        frames = []
        for part in range(last + 1):
            payload = message[part * room : (part + 1) * room]
            frames.append(self._frame(_mark(part, last), payload))
        return b"".join(frames)

    def again(self, first: int, last: int) -> bytes:
        """Return those of the frames from one number to another that are still kept."""
        return b"".join(frame for number, frame in self._kept if first <= number <= last)

    def _frame(self, mark: bytes, payload: bytes) -> bytes:
        self.number += 1
        crc = _crc(self._source, self.number, mark, payload)
        head = (_RS, self._source, self.number, len(payload), crc, mark)
        frame = b"%s%s %d %d %08x %s %s\n" % (*head, payload)
        self._keep(frame)
        return frame

    def _keep(self, frame: bytes) -> None:
        self._kept.append((self.number, frame))
        self._bytes += len(frame)
        while self._bytes > KEPT:
            self._bytes -= len(self._kept.popleft()[1])


@dataclass
class _Source:
    """The frames of one source that have come so far."""

    next: int = 1
    pieces: list[bytes] = field(default_factory=list)
    broken: bool = False  # true if frames are passed over until a message begins
    early: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Frames behind a gap, by number: mark and payload."""
    early_bytes: int = 0


class FrameReader:
    """Puts the frames of many sources together again.

    Each frame is either delivered, whole and in its source's order, or counted as lost.

    Attributes:
        lost: how many frames of each source are given up.
    """

    def __init__(self) -> None:
        self.lost: collections.Counter[str] = collections.Counter()
        self._rest = b""
        """A frame that has begun."""
        self._stray = Lines()
        self._sources: dict[bytes, _Source] = {}
        self._incomplete: set[bytes] = set()
        """The sources with frames behind a gap."""

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str]]:
        """Take what was read; yield source and message for each that is now whole and in order.

        A line outside any frame (a message of Slurm's own, or a piece of a frame that was cut) is
        yielded with an empty source.
        """
        stray, *parts = (self._rest + chunk).split(_RS)
        self._rest = b""
        yield from self._outside(stray)
        for part in parts[:-1]:
            yield from self._part(part)
        if parts and _unfinished(parts[-1]):
            self._rest = _RS + parts[-1]
        elif parts:
            yield from self._part(parts[-1])

    def find_gaps(self) -> dict[str, list[Gap]]:
        """Return what is missing before frames that have come, by source."""
        return {name.decode(): _gaps(self._sources[name]) for name in self._incomplete}

    def give_up(self, source: str) -> Iterator[tuple[str, str]]:
        """Go on behind the gaps of a source; what is missing is counted as lost."""
        name = source.encode()
        state = self._sources[name]
        while state.early:
            self._skip(name, state)
            yield from self._in_order(name, state)

    def end(self) -> Iterator[tuple[str, str]]:
        """Yield what is left when nothing more will come."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from self._part(rest[1:])
        for name in list(self._incomplete):
            yield from self.give_up(name.decode())
        if self._stray.pending:
            yield from self._outside(b"\n")
        for name, source in self._sources.items():
            self.lost[name.decode()] += len(source.pieces)  # its end never came
            source.pieces = []
        self.lost = +self.lost

    def _part(self, part: bytes) -> Iterator[tuple[str, str]]:
        """Take the bytes from behind one <RS> up to the next."""
        head = _HEAD.match(part)
        if head is None:
            yield from self._without_head(part)
            return
        end = head.end() + int(head[3])
        payload = part[head.end() : end]
        number, mark = int(head[2]), head[5]
        if part[end : end + 1] != b"\n" or _crc(head[1], number, mark, payload) != int(head[4], 16):
            yield from self._outside(part)
            return
        yield from self._take(head[1], number, mark, payload)
        if len(part) > end + 1:
            yield from self._outside(part[end + 1 :])

    def _without_head(self, part: bytes) -> Iterator[tuple[str, str]]:
        """Take bytes that begin no counted frame: a shell's message, or none at all."""
        uncounted = _UNCOUNTED.match(part)
        if uncounted is not None:
            yield uncounted[1].decode(errors="replace"), uncounted[2].decode(errors="replace")
            part = part[uncounted.end() :]
        yield from self._outside(part)

    def _take(
        self, name: bytes, number: int, mark: bytes, payload: bytes
    ) -> Iterator[tuple[str, str]]:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source()
        if number < source.next or number in source.early:
            return  # sent again, and not needed
        if number > source.next:
            source.early[number] = mark, payload
            source.early_bytes += len(payload)
            self._incomplete.add(name)
            if source.early_bytes > KEPT:  # nobody has any more what is missing
                yield from self.give_up(name.decode())
            return
        source.next += 1
        message = self._deliver(name, source, mark, payload)
        if message is not None:
            yield name.decode(), message
        if source.early:
            yield from self._in_order(name, source)

    def _in_order(self, name: bytes, source: _Source) -> Iterator[tuple[str, str]]:
        while source.next in source.early:
            mark, payload = source.early.pop(source.next)
            source.early_bytes -= len(payload)
            source.next += 1
            message = self._deliver(name, source, mark, payload)
            if message is not None:
                yield name.decode(), message
        if not source.early:
            self._incomplete.discard(name)

    def _deliver(self, name: bytes, source: _Source, mark: bytes, payload: bytes) -> str | None:
        if mark in b".(":
            source.broken = False
        if source.broken:
            self.lost[name.decode()] += 1
            return None
        if mark in b"(+":
            source.pieces.append(payload)
            return None
        if source.pieces:
            payload = b"".join([*source.pieces, payload])
            source.pieces = []
        return payload.decode(errors="replace")

    def _skip(self, name: bytes, source: _Source) -> None:
        """Give up the frames before the first that came early, and what they are parts of."""
        first = min(source.early)
        self.lost[name.decode()] += first - source.next + len(source.pieces)
        source.next, source.pieces, source.broken = first, [], True

    def _outside(self, data: bytes) -> Iterator[tuple[str, str]]:
        if not data:
            return
        lines = self._stray.feed(data)
        if self._stray.pending > _LONGEST_LINE:
            lines.append(self._stray.last())
        for line in lines:
            if line:
                yield "", line.decode(errors="replace")


def _mark(part: int, last: int) -> bytes:
    if last == 0:
        return b"."
    if part == 0:
        return b"("
    return b")" if part == last else b"+"


def _unfinished(part: bytes) -> bool:
    """Return whether more bytes may make a frame of this."""
    return len(part) < _LONGEST_UNCOUNTED and b"\n" not in part


def _gaps(source: _Source) -> list[Gap]:
    gaps, expected = [], source.next
    for number in sorted(source.early):
        if number > expected:
            gaps.append((expected, number - 1))
        expected = number + 1
    return gaps


def _crc(source: bytes, number: int, mark: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(b"%s %d %s" % (source, number, mark)))
