"""The hits of a log: the lines that the catalogue knows, and tracebacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bundle.protocol.enumerations import FailureClass

from ..catalogue.catalogue import (
    CatalogueEntry,
    CatalogueMatch,
    LineRole,
    LineTells,
    Prefilter,
    PrefilterMatches,
    catalogue,
    match,
)
from ..logs.job_files import LogFile
from ..logs.lines import Clock, stamp, year_of
from ..logs.prefixes import TRACEBACK, parse_line, show_block_as_terminal
from .traceback import Trace, frame_above, shown, trace_at
from .wording import introduces_ignored, introduces_survived, says_gave_up, says_survived

BLOCK = 4 << 20
"""Bytes that are read at a time."""
_DIGITS = b"0123456789"
_EVENT = b'{"v": , "'
"""The beginning of the driver's events in a batch log: they repeat lines of other logs."""
_PER_ENTRY = 8
"""Hits that are kept of one entry and file: the first ones count."""
_LINE_CHARACTERS = 2_000
"""Characters of a line that are looked at."""
_STAMP_LINES = 400
"""Lines above a hit in which a time stamp is looked for."""
_LAUNCHER_LINE = re.compile(r"torch[/.]distributed[/.](?:elastic|launcher|run)")
LAUNCHER_FRAME = re.compile(r"torch/distributed/(?:run|launcher/api)\.py")
"""A frame of a traceback of torchrun itself, and of no rank."""
_FINALIZER = re.compile(r"multiprocessing/util\.py\", line \d+, in _run_finalizers")
"""The first frame of what multiprocessing prints, and no more, as a program ends."""
_PASSED_ON = (LineRole.CASCADE, FailureClass.UNKNOWN)
"""Role and class of an exception that only passes on what another process raised."""
_OF_TORCHRUN = ("torchrun-report", "child-failed", "closing-signal")
"""Entries that only a torchrun writes."""

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b|\[E(?:\d{3,4})? ")
"""An exception whose traceback is not there, or an error of torch's C++."""
_DATE_OR_NUMBER = re.compile(
    rb"\d+|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\b *"
)
_LETTER = re.compile(rb"[A-Za-z]")
_HEAD_BYTES, _HEADS = 6, 8
"""The fewest bytes by which a first line is known again, and how often it may come to count."""

EXCEPTION = CatalogueEntry(
    name="",
    needle="",
    expression=r"\Z",
    role=LineRole.PRIMARY,
    kind=FailureClass.PYTHON_ERROR,
    cause="",
    remedy="the traceback names the line",
    source="Python",
)
"""The meaning of a traceback that the catalogue does not know: its exception is the cause."""
_UNKNOWN = CatalogueMatch(entry=EXCEPTION, groups={})


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A line that the catalogue knows, or a traceback."""

    log: LogFile
    """The file."""
    number: int
    """The line's number, from 1; of a traceback, of its last line."""
    text: str
    """The line, without marks of its rank."""
    rank: int | None
    """The rank that wrote it; None if unknown."""
    time: float | None
    """The time, in seconds since the epoch; None if unknown."""
    known: CatalogueMatch
    """Its meaning; of ``EXCEPTION`` for a traceback that the catalogue does not know."""
    trace: tuple[str, ...] = ()
    """The traceback that it ends; empty for a single line."""
    last: int
    """The number of its last line."""
    below: int
    """The offset of the line below it in the file."""
    marks: tuple[tuple[str, str], ...] = ()
    """What names the process that wrote it, see :class:`~stager.logs.prefixes.ParsedLine`."""
    prefix_node: str = ""
    """The node that its prefixes name; empty for none."""
    is_weak: bool = False
    """True if programs print such a line and continue: alone, it does not show a failure."""

    @property
    def entry(self) -> CatalogueEntry:
        """Return the catalogue's entry."""
        return self.known.entry

    @property
    def groups(self) -> Mapping[str, str]:
        """Return the groups of the entry's pattern."""
        return self.known.groups

    @property
    def node(self) -> str:
        """Return the node that it is about, else the one that wrote it; empty if unknown."""
        return self.groups.get("node") or self.prefix_node or self.log.node

    @property
    def primary(self) -> bool:
        """True if it tells a cause."""
        return self.entry.role == LineRole.PRIMARY and not self.entry.tells


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """The hits of logs."""

    hits: tuple[Hit, ...]
    """The hits, log after log."""
    lengths: dict[str, int]
    """The number of lines of each log, by its path."""
    heads: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    """The numbers of the lines that begin as the first line of their log does, by its path."""

    @classmethod
    def joined(cls, parts: Iterable[Scanned]) -> Scanned:
        """Return several as one."""
        hits: list[Hit] = []
        lengths: dict[str, int] = {}
        heads: dict[Path, tuple[int, ...]] = {}
        for part in parts:
            hits += part.hits
            lengths |= part.lengths
            heads |= part.heads
        return cls(hits=tuple(hits), lengths=lengths, heads=heads)

    def waiting(self) -> list[Hit]:
        """Return the hits of ranks that waited for others in vain, the earliest first."""
        waiting = [hit for hit in self.hits if hit.entry.tells == LineTells.STUCK]
        return sorted(waiting, key=lambda hit: (hit.time is None, hit.time or 0.0))

    def out_of_memory(self, node: str) -> Hit | None:
        """Return a hit that tells that memory ran out on that node, or on one that is not named."""
        for hit in self.hits:
            if hit.entry.kind != FailureClass.OUT_OF_MEMORY:
                continue
            if hit.node in ("", node):
                return hit
        return None


def prefilter() -> Prefilter:
    """Return the prefilter for all that can make a hit; one is enough for all logs of a job."""
    texts = {TRACEBACK}
    for entry in catalogue():
        texts.add(entry.needle)
        if entry.over:
            texts.add(entry.over)
    return Prefilter(texts)


def scan(log: LogFile, clock: Clock, texts: Prefilter | None = None) -> Scanned:
    """Return the hits of a log in order, none if unreadable; sharing ``texts`` is quicker."""
    scanner = _Scanner(log, clock, texts or prefilter())
    try:
        with log.path.open("rb") as handle:
            rest = b""
            while block := handle.read(BLOCK):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if newline:
                    rest = scanner.look(whole) + rest
                elif len(rest) > BLOCK:  # a line without an end
                    scanner.skip(len(rest) - _LINE_CHARACTERS)
                    rest = rest[-_LINE_CHARACTERS:]
            scanner.look(rest, last=True)
    except OSError:
        pass
    heads = {log.path: tuple(scanner.heads)} if scanner.heads else {}
    return Scanned(hits=scanner.result(), lengths={str(log.path): scanner.line}, heads=heads)


class _Scanner:
    """Scan a file by blocks; ``heads`` are later lines that begin as the first one does."""

    def __init__(self, log: LogFile, clock: Clock, texts: Prefilter) -> None:
        self.line = 0
        self.heads: list[int] = []
        self._head, self._first = b"", b""
        self._above = b""
        self._log, self._pieces = log, clock.pieces(log)
        self._year = year_of(log.path)
        self._texts = texts
        self._hits: list[Hit] = []
        self._counts: dict[str, int] = {}
        self._offset = 0
        self._stamped: float | None = None
        self._labelled: set[int] = set()

    def result(self) -> tuple[Hit, ...]:
        """Return the hits that count; a task that runs torchrun is no rank."""
        names = {hit.entry.name for hit in self._hits}
        satisfied = {"", *names}
        hits = tuple(hit for hit in self._hits if hit.entry.needs in satisfied)
        return hits if names.isdisjoint(_OF_TORCHRUN) else tuple(map(self._without_task, hits))

    def _without_task(self, hit: Hit) -> Hit:
        return replace(hit, rank=None) if hit.number in self._labelled else hit

    def skip(self, count: int) -> None:
        """Skip bytes of a line that is too long."""
        self._offset += count

    def look(self, block: bytes, *, last: bool = False) -> bytes:
        """Scan whole lines; return those to scan again with the next block."""
        shown_text = show_block_as_terminal(block)
        shapes = shown_text.translate(None, _DIGITS).split(b"\n")
        matches = self._texts.among(shapes)
        lines = block.split(b"\n")
        self._look_for_heads(lines, shown_text)
        done = self._lines(lines, shapes, matches, last=last) if matches.at else len(lines)
        self._stamped = self._last_stamp(lines, done) or self._stamped
        self.line += done
        self._above = lines[done - 1] if done else self._above
        if done == len(lines):
            self._offset += len(block) + 1
            return b""
        rest = b"\n".join(lines[done:]) + b"\n"
        self._offset += len(block) + 1 - len(rest)
        return rest

    def _look_for_heads(self, lines: list[bytes], text: bytes) -> None:
        """Find lines that repeat the first one: the script was started again."""
        if self.line == 0 and not self._head:
            self._head, self._first = _beginning(lines[0]), _without_date(lines[0])
        if len(self._head) < _HEAD_BYTES or len(self.heads) > _HEADS:
            return
        if text.count(b"\n" + self._head) > _HEADS:
            self._head = b""
        elif b"\n" + self._head in text:
            for at, line in enumerate(lines):
                same = line.startswith(self._head) and _without_date(line) == self._first
                if same and self.line + at:
                    self.heads.append(self.line + at + 1)

    def _lines(
        self, lines: list[bytes], shapes: list[bytes], matches: PrefilterMatches, *, last: bool
    ) -> int:
        """Scan the lines that match a text; return the number of lines that are done."""
        entries = [entry for entry in catalogue() if entry.needle.encode() in matches.texts]
        taken: set[int] = set()
        for at in matches.at:
            shape = shapes[at]
            if at in taken or shape.startswith(_EVENT):
                continue
            if TRACEBACK.encode() not in shape:
                self._single(lines, at, entries)
                continue
            trace = trace_at(lines, at, _LINE_CHARACTERS)
            if trace.open and not last:
                return at
            if trace.closing:  # else its lines may tell something one by one
                taken.update(trace.at)
                self._trace(lines, trace, entries)
        return len(lines)

    def _single(self, lines: list[bytes], at: int, entries: Sequence[CatalogueEntry]) -> None:
        text = shown(lines[at], _LINE_CHARACTERS)
        # Patterns begin at the text; a few need what a logger puts before it.
        known = match(parse_line(text).text, entries) or match(text, entries)
        if known is None:
            self._hits = [hit for hit in self._hits if not _takes_back(text, hit)]
        elif known.entry.role != LineRole.NOISE and not self._is_enough(known.entry.name):
            author = self._author(text, self.line + at + 1)
            self._keep(lines, (at, at), author, known, frame_above(lines, at, _LINE_CHARACTERS))

    def _trace(self, lines: list[bytes], trace: Trace, entries: Sequence[CatalogueEntry]) -> None:
        """Keep a traceback, with its chain, under its most informative exception."""
        last = trace.closing[-1]
        at, known = _telling_exception(trace, entries) or (last, _UNKNOWN)
        if self._is_enough(f"traceback {trace.texts[last].partition(':')[0]}"):
            return
        line = trace.at[at]
        line_above = lines[trace.at[0] - 1] if trace.at[0] else self._above
        above = parse_line(shown(line_above, _LINE_CHARACTERS)).logged
        if introduces_ignored(above) or _FINALIZER.search("".join(trace.texts[:2])):
            return
        rank, _ = self._author(shown(lines[line], _LINE_CHARACTERS), self.line + line + 1)
        if any(LAUNCHER_FRAME.search(text) for text in trace.texts):
            rank = None
        self._keep(lines, (line, trace.at[last]), (rank, trace.texts[at]), known, trace.texts)
        if introduces_survived(above):
            self._hits[-1] = replace(self._hits[-1], is_weak=True)

    def _keep(
        self,
        lines: list[bytes],
        places: tuple[int, int],
        author: tuple[int | None, str],
        known: CatalogueMatch,
        trace: tuple[str, ...] = (),
    ) -> None:
        """Keep a hit; ``places`` is its main and its last line, ``author`` rank and bare text."""
        (at, last), (rank, text) = places, author
        line = parse_line(shown(lines[at], _LINE_CHARACTERS))
        self._hits.append(
            Hit(
                log=self._log,
                number=self.line + at + 1,
                text=text.strip(),
                rank=rank,
                time=self._time(lines, at),
                known=known,
                trace=trace,
                last=self.line + last + 1,
                below=self._offset_of(lines, last + 1),
                marks=line.marks,
                prefix_node=line.node,
                is_weak=not trace and _is_weak(known.entry, line.logged),
            )
        )

    def _author(self, text: str, number: int) -> tuple[int | None, str]:
        line = parse_line(text)
        if line.rank is not None:
            return line.rank, line.logged
        if self._log.rank is not None:
            return None if _LAUNCHER_LINE.search(text) else self._log.rank, line.logged
        if line.task is None or line.local_rank is not None or line.logged.startswith("srun: "):
            return None, line.logged
        self._labelled.add(number)
        return line.task, line.logged

    def _time(self, lines: list[bytes], at: int) -> float | None:
        if self._pieces is not None:
            return self._pieces.at(self._offset_of(lines, at))
        return self._last_stamp(lines, at + 1) or self._stamped

    def _offset_of(self, lines: list[bytes], at: int) -> int:
        return self._offset + sum(map(len, lines[:at])) + at

    def _last_stamp(self, lines: list[bytes], end: int) -> float | None:
        for line in reversed(lines[max(0, end - _STAMP_LINES) : end]):
            if (time := stamp(line, self._year)) is not None:
                return time
        return None

    def _is_enough(self, name: str) -> bool:
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name] > _PER_ENTRY


def _telling_exception(
    trace: Trace, entries: Sequence[CatalogueEntry]
) -> tuple[int, CatalogueMatch] | None:
    """Return the most informative exception with its position; of equal ones the last."""
    telling: list[tuple[int, CatalogueMatch]] = []
    for at in reversed(trace.closing):
        known = match(trace.texts[at], entries)
        if known is not None and _tells(known.entry, alone=len(trace.closing) == 1):
            telling.append((at, known))
    return min(telling, key=lambda place: _doubt(place[1].entry), default=None)


def _tells(entry: CatalogueEntry, *, alone: bool) -> bool:
    if entry.tells == LineTells.EXIT:
        return False
    return alone or (entry.role, entry.kind) != _PASSED_ON


def _beginning(line: bytes) -> bytes:
    """Return a script's first line up to the first date or number, which differ between runs."""
    if line.startswith(TRACEBACK.encode()) or not _LETTER.search(line):
        return b""
    return _DATE_OR_NUMBER.split(line, maxsplit=1)[0].rstrip()


def _without_date(line: bytes) -> bytes:
    return _DATE_OR_NUMBER.sub(b"", line).rstrip()


def _is_weak(entry: CatalogueEntry, text: str) -> bool:
    """Return whether an error in a line, seen alone, may be one that its program survived."""
    if entry.over or entry.tells in (LineTells.EXIT, LineTells.END):
        return entry.weak
    if _EXCEPTION.match(text) or says_gave_up(text):
        return says_survived(text)
    return entry.weak or says_survived(text)


def _takes_back(text: str, hit: Hit) -> bool:
    return bool(hit.entry.over) and hit.entry.over in text


def _doubt(entry: CatalogueEntry) -> int:
    """Order exceptions of one traceback: a lower number is more informative."""
    if entry.role != LineRole.PRIMARY:
        return 2
    return 1 if entry.tells else 0
