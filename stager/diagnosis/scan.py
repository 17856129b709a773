"""What one log shows: the lines that the catalogue knows, and tracebacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..catalogue.catalogue import (
    CASCADE,
    EXIT,
    NOISE,
    PRIMARY,
    STUCK,
    Entry,
    Match,
    catalogue,
    match,
)
from ..catalogue.prefilter import Prefilter, PrefilterMatches
from ..logs.clock import Clock, stamp, year_of
from ..logs.files import LogFile
from .traceback import TRACEBACK, Trace, frame_above, marked, shown, trace_at

BLOCK = 4 << 20
"""Bytes that are read at a time."""
_DIGITS = b"0123456789"
_REWRITTEN = re.compile(rb"^[^\n]*\r(?!\n|\Z)", re.M)
"""What a terminal shows no longer: a progress bar is written over, and what follows it counts."""
_EVENT = b'{"v": , "'
"""How the driver's events begin in a batch job's own log: they tell of lines that others have."""
_PER_ENTRY = 8
"""Lines that are kept of one entry and file: the first ones count."""
_LONGEST = 2_000
"""Characters of a line that are looked at."""
_BACK = 400
"""Lines above a find in which a stamp is looked for."""
_LAUNCHERS = re.compile(r"torch[/.]distributed[/.](?:elastic|launcher|run)")
_LAUNCHER_FRAME = re.compile(r"torch/distributed/(?:run|launcher/api)\.py")
_PASSED_ON = (CASCADE, "unknown")
_OF_TORCHRUN = ("torchrun-report", "child-failed", "closing-signal")
"""Entries by which a torchrun shows itself."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A line, or a traceback, that tells something."""

    log: LogFile
    """The file."""
    number: int
    """The line's number, from 1; of a traceback, of its last line."""
    text: str
    """The line, without marks of whose it is."""
    rank: int | None
    """The rank that wrote it, as far as it is known."""
    time: float | None
    """When, in seconds since the epoch; None where nothing tells."""
    entry: Entry | None
    """What it means; None for a traceback of which the catalogue knows nothing."""
    groups: dict[str, str] = field(default_factory=dict)
    """What the entry's pattern has found in it."""
    trace: tuple[str, ...] = ()
    """The traceback that it ends; empty for a single line."""

    @property
    def primary(self) -> bool:
        """Whether it tells a cause."""
        return self.entry is None or (self.entry.role == PRIMARY and not self.entry.tells)


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """What all logs of a job show."""

    hits: tuple[Hit, ...]
    """Their finds, log after log."""
    lengths: dict[str, int]
    """The number of lines of each log, by its path."""

    @classmethod
    def of(cls, parts: Iterable[Scanned]) -> Scanned:
        """Several as one."""
        known = list(parts)
        hits = tuple(hit for part in known for hit in part.hits)
        return cls(hits=hits, lengths={k: v for part in known for k, v in part.lengths.items()})

    def stuck(self) -> list[Hit]:
        """The finds of ranks that waited for others in vain, the earliest first."""
        found = [hit for hit in self.hits if hit.entry is not None and hit.entry.tells == STUCK]
        return sorted(found, key=lambda hit: (hit.time is None, hit.time or 0.0))

    def memory(self, node: str) -> Hit | None:
        """A find that tells that memory ran out, on that node or on one that is not named."""
        for hit in self.hits:
            if hit.entry is not None and hit.entry.kind == "out-of-memory":
                named = hit.groups.get("node") or hit.log.node
                if not named or named == node:
                    return hit
        return None


def sieve() -> Prefilter:
    """One that finds what any log can be told by; for all logs of a job."""
    texts = {text for entry in catalogue() for text in (entry.needle, entry.over) if text}
    return Prefilter({*texts, TRACEBACK})


def scan(log: LogFile, clock: Clock, texts: Prefilter | None = None) -> Scanned:
    """All that a log shows, in its order; a file that cannot be read shows nothing.

    Args:
        log: the file.
        clock: tells when its lines were said.
        texts: from :func:`sieve`; the same one for many logs is quicker.
    """
    finder = _Finder(log, clock, texts or sieve())
    try:
        with log.path.open("rb") as handle:
            rest = b""
            while block := handle.read(BLOCK):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if newline:
                    rest = finder.look(whole) + rest
                elif len(rest) > BLOCK:  # a line without an end
                    rest = rest[-_LONGEST:]
            finder.look(rest, last=True)
    except OSError:
        pass
    return Scanned(hits=finder.found(), lengths={str(log.path): finder.line})


class _Finder:
    """Goes through one file, block by block."""

    def __init__(self, log: LogFile, clock: Clock, texts: Prefilter) -> None:
        self.hits: list[Hit] = []
        self._log, self._pieces = log, clock.pieces(log)
        self._year = year_of(log.path)
        self._texts = texts
        self._counts: dict[str, int] = {}
        self.line, self._offset = 0, 0
        self._stamped: float | None = None
        self._tasks: set[int] = set()

    def found(self) -> tuple[Hit, ...]:
        """All finds that count; a task that is a torchrun is no rank."""
        names = {hit.entry.name for hit in self.hits if hit.entry is not None}
        tasks = set() if names.isdisjoint(_OF_TORCHRUN) else self._tasks
        return tuple(
            replace(hit, rank=None) if hit.number in tasks else hit
            for hit in self.hits
            if hit.entry is None or not hit.entry.needs or hit.entry.needs in names
        )

    def look(self, block: bytes, *, last: bool = False) -> bytes:
        """Look at whole lines; returns those that are to be seen again, with more behind them."""
        seen = _REWRITTEN.sub(b"", block) if b"\r" in block else block
        shapes = seen.translate(None, _DIGITS).split(b"\n")
        sifted = self._texts.among(shapes)
        lines = block.split(b"\n")
        done = self._lines(lines, shapes, sifted, last=last) if sifted.at else len(lines)
        self._stamped = self._last_stamp(lines, done) or self._stamped
        kept = b"\n".join(lines[done:])
        self.line += done
        self._offset += len(block) + 1 - (len(kept) + 1 if done < len(lines) else 0)
        return kept + b"\n" if done < len(lines) else b""

    def _lines(
        self, lines: list[bytes], shapes: list[bytes], sifted: PrefilterMatches, *, last: bool
    ) -> int:
        """Look at the lines that have one of the texts; returns how many are done with."""
        entries = [entry for entry in catalogue() if entry.needle.encode() in sifted.texts]
        taken: set[int] = set()
        for at in sifted.at:
            shape = shapes[at]
            if at in taken or shape.startswith(_EVENT):
                continue
            if TRACEBACK.encode() in shape:
                trace = trace_at(lines, at, _LONGEST)
                if trace.open and not last:
                    return at
                if trace.closing:  # else its lines may tell something one by one
                    taken.update(trace.at)
                    self._trace(lines, trace, entries)
            else:
                self._single(lines, at, entries)
        return len(lines)

    def _single(self, lines: list[bytes], at: int, entries: Sequence[Entry]) -> None:
        text = shown(lines[at], _LONGEST)
        found = match(text, entries)
        if found is None:
            self.hits = [hit for hit in self.hits if not _over(hit, text)]
        elif found[0].role != NOISE and not self._enough(found[0].name):
            whose = self._whose(text, self.line + at + 1)
            self._keep(lines, at, whose, found, frame_above(lines, at, _LONGEST))

    def _trace(self, lines: list[bytes], trace: Trace, entries: Sequence[Entry]) -> None:
        """A traceback, with those that led to it: the last exception that the catalogue knows."""
        matched = ((at, match(trace.texts[at], entries)) for at in reversed(trace.closing))
        known = [(at, found) for at, found in matched if found and found[0].tells != EXIT]
        if len(trace.closing) > 1:  # who only passes on what another process raised
            known = [one for one in known if (one[1][0].role, one[1][0].kind) != _PASSED_ON]
        known.sort(key=lambda one: _doubt(one[1][0]))
        last = trace.closing[-1]
        at, told = next(iter(known), (last, None))
        if self._enough(f"traceback {trace.texts[last].partition(':')[0]}"):
            return
        rank, _ = self._whose(shown(lines[trace.at[at]], _LONGEST), self.line + trace.at[at] + 1)
        if any(_LAUNCHER_FRAME.search(text) for text in trace.texts):
            rank = None
        self._keep(lines, trace.at[at], (rank, trace.texts[at]), told, trace.texts)

    def _keep(
        self,
        lines: list[bytes],
        at: int,
        whose: tuple[int | None, str],
        known: Match | None,
        trace: tuple[str, ...] = (),
    ) -> None:
        """Note a find; ``whose`` is its rank and its line."""
        rank, text = whose
        entry, groups = known or (None, {})
        self.hits.append(
            Hit(
                log=self._log,
                number=self.line + at + 1,
                text=text.strip(),
                rank=rank,
                time=self._time(lines, at),
                entry=entry,
                groups=groups,
                trace=trace,
            )
        )

    def _whose(self, text: str, number: int) -> tuple[int | None, str]:
        """The rank that wrote a line, and the line without its marks."""
        found = marked(text)
        if found.rank is not None:
            return found.rank, found.text
        if self._log.rank is not None:
            of_launcher = _LAUNCHERS.search(text) is not None
            return (None if of_launcher else self._log.rank), found.text if text[
                :1
            ] == "[" else text
        if found.task is None or found.text.startswith("srun: "):
            return None, found.text
        self._tasks.add(number)
        return found.task, found.text

    def _time(self, lines: list[bytes], at: int) -> float | None:
        if self._pieces is not None:
            offset = self._offset + sum(map(len, lines[:at])) + at
            return self._pieces.at(offset)
        return self._last_stamp(lines, at + 1) or self._stamped

    def _last_stamp(self, lines: list[bytes], end: int) -> float | None:
        for line in reversed(lines[max(0, end - _BACK) : end]):
            if (time := stamp(line, self._year)) is not None:
                return time
        return None

    def _enough(self, name: str) -> bool:
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name] > _PER_ENTRY


def _over(hit: Hit, text: str) -> bool:
    """Whether a line takes back what an earlier one has told."""
    return hit.entry is not None and bool(hit.entry.over) and hit.entry.over in text


def _doubt(entry: Entry) -> int:
    """How little an exception tells beside the others of its traceback."""
    if entry.role != PRIMARY:
        return 1
    return 2 if entry.tells else 0
