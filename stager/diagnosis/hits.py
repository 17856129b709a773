"""The hits of a log: the lines that the catalogue knows, and tracebacks."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import FailureClass
from bundle.protocol.log_names import ATTEMPT_MARK
from bundle.regex import compile_lazily

from ..catalogue.catalogue import (
    CatalogueEntry,
    CatalogueMatch,
    LineRole,
    LineTells,
    Prefilter,
    catalogue,
    match_line,
)
from ..logs.job_files import JobFiles, LogFile
from ..logs.lines import Pieces, find_stamp, read_order, read_year
from ..logs.prefixes import (
    TRACEBACK,
    TracebackPrefix,
    parse_line,
    show_block_as_terminal,
    show_line,
)

_LEVEL = compile_lazily(
    r"""^\W*(?:WARNING|WARN|INFO|DEBUG)\b       # WARNING step 41: text
    |^\[?W\d{3,4}\ \d\d:|^\[W\                  # torch in C++ and in Python
    |\bNCCL\ INFO\b
    |^.{0,40}\d\d:\d\d.{0,40}\b(?:WARNING|WARN|INFO|DEBUG)\b""",
    re.VERBOSE,
)
_LOGGED = compile_lazily(
    r"(?<!NCCL )\bWARN(?:ING)?\b.*"
    r"(?:fail|cannot|can't|could ?n.t|could not|unable|error|exception)",
    re.IGNORECASE,
)
_IN_THREAD = compile_lazily(r"^Exception in thread ")
"""The line above a traceback that ends a thread, and no process."""
_IGNORED = compile_lazily(
    r"^Exception ignored (?:in|on|while)\b|\bsafe(?:ly)? to ignore\b"
    r"|^--- Logging error ---|^Error in atexit\._run_exitfuncs:"
)
_RECOVERED = compile_lazily(
    r"""(?<!max\ )(?<!maximum\ )(?<!fork:\ )\bre-?try(?:ing)?\b
    |\bwill\ (?:be\ )?(?:re)?tr(?:y|ied)\b|\btrying\ again\b
    |\bskip(?:ping|ped)\b|\bfall(?:ing|s)?\ ?back\b|\bcontinuing\b|\brecovered\b
    |\bignor(?:ing|ed)\b|\breconnect(?:ing|ed)\b|\bdecreasing\ batch\ size\b
    |\busing\ the\ default\b""",
    re.IGNORECASE | re.VERBOSE,
)
_GAVE_UP = compile_lazily(
    r"\b(?:stopping|aborting|exiting|giving up|gave up|terminating)\b", re.IGNORECASE
)
_RESTARTED = compile_lazily(
    r"""(?<!not\ )\b(?:re-?start(?:s|ed|ing)?|resum(?:e[ds]?|ing)|re-?launch(?:ed|ing)?
    |requeue[ds]?|(?:attempt|try|retry)\W{0,3}\d+|restart_count)\b""",
    re.IGNORECASE | re.VERBOSE,
)
_OF_RUNTIME = ("[", "srun: ", "slurm")
"""The beginning of lines of torch's C++ and of Slurm, which count their own attempts."""
_ENDED_WELL = compile_lazily(
    r"""\b(?:finished|completed?|done|success(?:ful(?:ly)?)?|succeeded|ended\ well)\b
    |\bexit(?:ed)?\b.{0,12}\b(?:code|status)\W{0,3}0\b""",
    re.IGNORECASE | re.VERBOSE,
)
_TRAINED = compile_lazily(
    r"""\b(?:train(?:ing)?|fit(?:ting)?|epochs?)\b.{0,30}\b(?:finished|completed?|done|ended)\b
    |\b(?:finished|completed|done)\b.{0,20}\b(?:training|epochs?)\b
    |\bmax_(?:epochs|steps)\S*\ reached|\btrain_runtime\b""",
    re.IGNORECASE | re.VERBOSE,
)
_ENDED_BADLY = compile_lazily(
    r"error|fail|abort|unsuccess|\bnot\b|\b(?:code|status|rc)\W{0,3}-?[1-9]", re.IGNORECASE
)
_OF_AN_END = compile_lazily(
    r"""
    # launchers, schedulers, shells, and what a batch script says at its end
    \s|\W*$|[-=*\#+~_]{4,}|\S+:\ line\ \d+:|\+\ |(?:real|user|sys)\s+\d|usage:\ |wandb:
    |(?:srun|sbatch|slurmstepd|slurmd|salloc|mpirun|mpiexec|prterun|orterun|torchrun|accelerate
        |bash|sh)\b
    |(?:job|exit|end(?:ed)?|finish\w*)\ ?\w*\W
    # crashes: frames and stacks of C++, of Python's faulthandler, and of MPI
    |frame\ \#|\#\d+\ |\*\*\*\ |\[[\w.-]+:\d+\]\ |terminate\ called|Fatal\ Python\ error
    |Current\ thread|Thread\ 0x|Extension\ modules|Aborted|Killed|Segmentation\ fault|Bus\ error
    # exceptions and what hangs on them, torch's own stamps and its table
    |Traceback|(?:>\ )?File\ "|Exception\ ignored|During\ handling|The\ above
    |[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b|\[?[IWEF]\d{3,4}\ \d\d:\d\d:\d\d
    |Failures:|Root\ Cause|.*\bFAILED$|.*\bNCCL\ (?:INFO|WARN|ERROR)\b
    |.*\b(?:kill|terminat|abort|shut(?:ting)?\ ?down|clos(?:e|ing)|clean(?:ing)?\ ?up
        |exit(?:s|ed|ing)?\b|errors?\b|fail)""",
    re.IGNORECASE | re.VERBOSE,
)


def says_recovered(text: str) -> bool:
    """Return whether a line says that its program goes on after an error."""
    return bool(_RECOVERED.search(text))


def says_restarted(text: str) -> bool:
    """Return whether a line says that another attempt begins."""
    return bool(_RESTARTED.search(text)) and not text.startswith(_OF_RUNTIME)


def says_ended_well(text: str, *, training: bool = False) -> bool:
    """Return whether a line says that all, or the training itself, ended well."""
    is_end = (_TRAINED if training else _ENDED_WELL).search(text)
    return is_end is not None and not _ENDED_BADLY.search(text)


def is_of_an_end(text: str) -> bool:
    """Return whether a line is one that a process may print as it comes to its end."""
    return _OF_AN_END.match(text) is not None


# --- Tracebacks in logs that several ranks write to ----------------------------------------------

_LINE_CHARACTERS = 2_000
_LINES = 200
_WINDOW = 1_000  # lines among which those of one traceback are, where several ranks' are mixed
_CHAIN = 4  # lines within which one traceback says that it led to another one
_OTHERS = 25  # lines of other processes among which such another one is still looked for
_FRAME = 4  # lines of the place above an exception: file, source, marks below it, and one more
_EXCEPTION_LINE = compile_lazily(r"^(?P<type>[A-Za-z_][\w.]*)(?::\s*(?P<message>.*))?$")
_CHAINED = compile_lazily(
    r"^(?:During handling of the above|The above exception was the direct|-- Process \d+ term)"
)
_ORIGINAL = "Original Traceback"
"""The words after the message of an exception that came from another process."""
_FRAMED = " \t╰+"
"""The first characters of the line above an exception; ``rich`` draws the last two."""


class Trace:
    """A traceback, with those that led to it."""

    def __init__(self) -> None:
        self.at: list[int] = []  # the places of its lines among those that were given
        self.texts: list[str] = []  # its lines, without the mark before each of them
        self.closing: list[int] = []  # the indexes of its exceptions; empty where it breaks off
        self.is_open = True  # whether lines that are not there yet may belong to it
        self._inside = True
        self._chained = True  # the first line says "Traceback" as well

    def take(self, place: int, text: str) -> None:
        """Add a line, or find that it is no part any more."""
        if TRACEBACK in text:
            # Another one, with nothing that connects it to this one, does not belong to it.
            self.is_open = self._chained or text.startswith(_ORIGINAL)
            self._inside, self._chained = True, False
        if not self.is_open:
            return
        self.at.append(place)
        self.texts.append(text)
        if not self._inside:
            self._look_for_another(text)
        elif _is_exception(self.texts):
            self._inside = False
            self.closing.append(len(self.texts) - 1)
        self.is_open = self.is_open and len(self.texts) < _LINES

    def skip(self, place: int) -> None:
        """Skip a line of another process; many of them below an exception end the search."""
        self.is_open = self._inside or place - self.at[-1] <= _OTHERS

    def _look_for_another(self, text: str) -> None:
        if _CHAINED.match(text):
            self._inside = self._chained = True
            return
        last = self.closing[-1]
        exception = _EXCEPTION_LINE.match(self.texts[last])
        if exception and exception["message"] == "" and text.strip():  # it begins on another line
            self.texts[last] = f"{exception['type']}: {text.strip()}"
        self.is_open = len(self.texts) - 1 - last < _CHAIN


def read_trace(lines: Sequence[bytes], start: int) -> Trace:
    """Return the traceback that begins in a line."""
    trace = Trace()
    end = min(start + 1 + _WINDOW, len(lines))
    below = _show_line(lines[start + 1]) if start + 1 < end else ""
    prefix = TracebackPrefix(_show_line(lines[start]), below)
    trace.take(start, prefix.first)
    for place in range(start + 1, end):
        text = prefix.strip(_show_line(lines[place]))
        if text is not None:
            trace.take(place, text)
        else:
            trace.skip(place)
        if not trace.is_open:
            break
    trace.is_open = trace.is_open and end == len(lines) and end < start + 1 + _WINDOW
    if trace.closing:
        del trace.at[trace.closing[-1] + 1 :], trace.texts[trace.closing[-1] + 1 :]
    return trace


def _find_frame(lines: Sequence[bytes], at: int) -> tuple[str, ...]:
    """Return an exception with the place above it: all that Python shows of an unreadable file."""
    frame = [parse_line(_show_line(lines[at])).text]
    for line in reversed(lines[max(0, at - _FRAME) : at]):
        text = parse_line(_show_line(line)).text
        if not text.startswith("  "):
            break
        frame.insert(0, text)
        if text.startswith('  File "'):
            return tuple(frame)
    return ()


def _show_line(raw: bytes) -> str:
    return show_line(raw, _LINE_CHARACTERS)


def _is_exception(texts: Sequence[str]) -> bool:
    *before, text = texts
    if not before or not text or text[0].isspace() or _CHAINED.match(text):
        return False
    above = before[-1]
    if not above and texts[1] == "":  # loguru puts empty lines between frames
        above = next(filter(None, reversed(before)), "")
    return bool(_EXCEPTION_LINE.match(text)) and above.startswith(tuple(_FRAMED))


# --- The hits of a log: the lines that the catalogue knows, and tracebacks -----------------------

BLOCK = 4 << 20
_DIGITS = b"0123456789"
_EVENT = b'{"v": , "'  # begins the driver's events in a batch log, which repeat other logs' lines
_PER_ENTRY = 8  # hits that are kept of one entry and file: the first ones count
_STAMP_LINES = 400  # lines above a hit in which a time stamp is looked for
_LAUNCHER_LINE = compile_lazily(r"torch[/.]distributed[/.](?:elastic|launcher|run)")
LAUNCHER_FRAME = compile_lazily(r"torch/distributed/(?:run|launcher/api)\.py")
"""A frame of a traceback of torchrun itself, and of no rank."""
_FINALIZER = compile_lazily(r"multiprocessing/util\.py\", line \d+, in _run_finalizers")
"""The first frame of what multiprocessing prints, and no more, as a program ends."""
_PASSED_ON = (LineRole.CASCADE, FailureClass.UNKNOWN)
"""Role and class of an exception that only passes on what another process raised."""
_OF_TORCHRUN = ("torchrun-report", "child-failed", "closing-signal")
"""Entries that only a torchrun writes."""

_EXCEPTION = compile_lazily(r"[A-Za-z_][\w.]*(?:Error|Exception)\b|\[E(?:\d{3,4})? ")  # or of C++
_DATE_OR_NUMBER = compile_lazily(
    rb"\d+|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\b *"
)
_LETTER = compile_lazily(rb"[A-Za-z]")
_HEAD_BYTES, _HEADS = 6, 8  # fewest bytes of a first line that is known again; its most repeats

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


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A line that the catalogue knows, or a traceback."""

    log: LogFile
    number: int  # the line's number, from 1; of a traceback, of its last line
    text: str
    rank: int | None
    time: float | None
    entry: CatalogueEntry
    """Its meaning; ``EXCEPTION`` for a traceback that the catalogue does not know."""
    groups: Mapping[str, str]  # the groups of the entry's pattern
    trace: tuple[str, ...] = ()  # the traceback that it ends; empty for a single line
    last: int
    below: int  # the offset of the line below it in the file
    marks: tuple[tuple[str, str], ...] = ()
    """What names the process that wrote it, see :class:`~stager.logs.prefixes.ParsedLine`."""
    prefix_node: str = ""  # the node that its prefixes name; empty for none
    is_weak: bool = False
    """True if programs print such a line and continue: alone, it does not show a failure."""

    @property
    def node(self) -> str:
        """Return the node that it is about, else the one that wrote it; empty if unknown."""
        return self.groups.get("node") or self.prefix_node or self.log.node


def scan_logs(
    logs: Iterable[LogFile], files: JobFiles
) -> tuple[list[Hit], dict[Path, tuple[int, ...]]]:
    """Return the hits of a job's logs, and by log the lines that begin as its first one does."""
    order = read_order(files)
    texts = {text for entry in catalogue() for text in (entry.needle, entry.over) if text}
    prefilter = Prefilter({TRACEBACK, *texts})
    hits: list[Hit] = []
    heads: dict[Path, tuple[int, ...]] = {}
    for log in logs:
        pieces = order.get((log.node, log.rank)) if log.own else None
        scanner = _Scanner(log, pieces, prefilter)
        with suppress(OSError), log.path.open("rb") as handle:
            rest = b""
            while block := handle.read(BLOCK):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if newline:
                    rest = scanner.look(whole) + rest
                elif len(rest) > BLOCK:  # a line without an end
                    scanner.offset += len(rest) - _LINE_CHARACTERS
                    rest = rest[-_LINE_CHARACTERS:]
            scanner.look(rest, last=True)
        hits += scanner.select_hits()
        heads[log.path] = tuple(scanner.heads)
    return hits, heads


_ATTEMPT = ATTEMPT_MARK.encode()


class _Scanner:
    """Scan a file by blocks; ``heads`` are later lines that begin as the first one does."""

    def __init__(self, log: LogFile, pieces: Pieces | None, texts: Prefilter) -> None:
        self.line = self.offset = 0
        self.heads: list[int] = []
        self._begin = 0  # the line of the driver's below which its last attempt begins
        self._head, self._first = b"", b""
        self._above = b""
        self._log, self._pieces = log, pieces
        self._year = read_year(log.path)
        self._texts = texts
        self._hits: list[Hit] = []
        self._counts: collections.Counter[str] = collections.Counter()
        self._stamped: float | None = None
        self._labelled: set[int] = set()

    def select_hits(self) -> list[Hit]:
        """Return the hits that count; a task that runs torchrun is no rank."""
        own = [hit for hit in self._hits if hit.number > self._begin]
        names = {"", *(hit.entry.name for hit in own)}
        hits = [hit for hit in own if hit.entry.needs in names]
        tasks = set[int]() if names.isdisjoint(_OF_TORCHRUN) else self._labelled
        return [replace(hit, rank=None) if hit.number in tasks else hit for hit in hits]

    def look(self, block: bytes, *, last: bool = False) -> bytes:
        """Scan whole lines; return those to scan again with the next block."""
        shown_text = show_block_as_terminal(block)
        shapes = shown_text.translate(None, _DIGITS).split(b"\n")
        texts, places = self._texts.find(shapes)
        entries = [entry for entry in catalogue() if entry.needle.encode() in texts]
        lines = block.split(b"\n")
        self._look_for_heads(lines, shown_text)
        if _ATTEMPT in shown_text:
            self._look_for_attempts(lines)
        suspected = [at for at in places if not shapes[at].startswith(_EVENT)]
        traces = {at for at in suspected if TRACEBACK.encode() in shapes[at]}
        done = self._look_at_lines(lines, suspected, traces, entries, last=last)
        self._stamped = self._find_stamp(lines, done)
        self.line += done
        self._above = lines[done - 1] if done else self._above
        rest = b"".join(line + b"\n" for line in lines[done:])
        self.offset += len(block) + 1 - len(rest)
        return rest

    def _look_for_heads(self, lines: list[bytes], text: bytes) -> None:
        if self.line == 0:
            self._head, self._first = _cut_at_number(lines[0]), _remove_dates(lines[0])
        if len(self._head) < _HEAD_BYTES or len(self.heads) > _HEADS:
            return
        if text.count(b"\n" + self._head) > _HEADS:
            self._head = b""
        elif b"\n" + self._head in text:
            for number, line in enumerate(lines, self.line + 1):
                same = line.startswith(self._head) and _remove_dates(line) == self._first
                if same and number > 1:
                    self.heads.append(number)

    def _look_for_attempts(self, lines: list[bytes]) -> None:
        for number, line in enumerate(lines, self.line + 1):
            if line.startswith(_ATTEMPT):
                self._begin = number

    def _look_at_lines(
        self,
        lines: list[bytes],
        suspected: Iterable[int],
        traces: Collection[int],
        entries: Sequence[CatalogueEntry],
        *,
        last: bool,
    ) -> int:
        taken: set[int] = set()
        for at in suspected:
            if at in taken:
                continue
            if at not in traces:
                self._look_at_line(lines, at, entries)
                continue
            trace = read_trace(lines, at)
            if trace.is_open and not last:
                return at
            if trace.closing:  # else its lines may tell something one by one
                taken.update(trace.at)
                self._look_at_trace(lines, trace, entries)
        return len(lines)

    def _look_at_line(self, lines: list[bytes], at: int, entries: Sequence[CatalogueEntry]) -> None:
        text = _show_line(lines[at])
        # Patterns begin at the text; a few need what a logger puts before it.
        known = match_line(parse_line(text).text, entries) or match_line(text, entries)
        if known is None:
            self._hits = [
                hit for hit in self._hits if not (hit.entry.over and hit.entry.over in text)
            ]
        elif known.entry.role != LineRole.NOISE and not self._is_enough(known.entry.name):
            author = self._find_author(text, self.line + at + 1)
            self._keep(lines, (at, at), author, known, _find_frame(lines, at))

    def _look_at_trace(
        self, lines: list[bytes], trace: Trace, entries: Sequence[CatalogueEntry]
    ) -> None:
        last = trace.closing[-1]
        at, known = _choose_exception(trace, entries) or (last, CatalogueMatch(EXCEPTION, {}))
        if self._is_enough(f"traceback {trace.texts[last].partition(':')[0]}"):
            return
        line = trace.at[at]
        line_above = lines[trace.at[0] - 1] if trace.at[0] else self._above
        above = parse_line(_show_line(line_above)).logged
        if _IGNORED.search(above) or _FINALIZER.search("".join(trace.texts[:2])):
            return
        rank, _ = self._find_author(_show_line(lines[line]), self.line + line + 1)
        author = None if any(map(LAUNCHER_FRAME.search, trace.texts)) else rank, trace.texts[at]
        self._keep(lines, (line, trace.at[last]), author, known, tuple(trace.texts))
        if _LOGGED.search(above) or _IN_THREAD.match(above) or says_recovered(above):
            self._hits[-1] = replace(self._hits[-1], is_weak=True)

    def _keep(
        self,
        lines: list[bytes],
        places: tuple[int, int],
        author: tuple[int | None, str],
        known: CatalogueMatch,
        trace: tuple[str, ...],
    ) -> None:
        """Keep a hit; ``places`` is its main and its last line, ``author`` rank and bare text."""
        (at, last), (rank, text) = places, author
        line = parse_line(_show_line(lines[at]))
        if self._pieces is None:
            time = self._find_stamp(lines, at + 1)
        else:
            time = self._pieces.find_time(self._find_offset(lines, at))
        self._hits.append(
            Hit(
                log=self._log,
                number=self.line + at + 1,
                text=text.strip(),
                rank=rank,
                time=time,
                entry=known.entry,
                groups=known.groups,
                trace=trace,
                last=self.line + last + 1,
                below=self._find_offset(lines, last + 1),
                marks=line.marks,
                prefix_node=line.node,
                is_weak=not trace and _is_weak(known.entry, line.logged),
            )
        )

    def _find_author(self, text: str, number: int) -> tuple[int | None, str]:
        line = parse_line(text)
        if line.rank is not None:
            return line.rank, line.logged
        if self._log.rank is not None:
            return None if _LAUNCHER_LINE.search(text) else self._log.rank, line.logged
        if line.task is None or line.local_rank is not None or line.logged.startswith("srun: "):
            return None, line.logged
        self._labelled.add(number)
        return line.task, line.logged

    def _find_offset(self, lines: list[bytes], at: int) -> int:
        return self.offset + sum(map(len, lines[:at])) + at

    def _find_stamp(self, lines: list[bytes], end: int) -> float | None:
        return find_stamp(lines[max(0, end - _STAMP_LINES) : end], self._year) or self._stamped

    def _is_enough(self, name: str) -> bool:
        self._counts[name] += 1
        return self._counts[name] > _PER_ENTRY


def _choose_exception(
    trace: Trace, entries: Sequence[CatalogueEntry]
) -> tuple[int, CatalogueMatch] | None:
    telling: list[tuple[int, CatalogueMatch]] = []
    for at in reversed(trace.closing):
        known = match_line(trace.texts[at], entries)
        if known is None or known.entry.tells == LineTells.EXIT:
            continue
        if len(trace.closing) == 1 or (known.entry.role, known.entry.kind) != _PASSED_ON:
            telling.append((at, known))
    causes = [place for place in telling if place[1].entry.role == LineRole.PRIMARY]
    exact = [place for place in causes if not place[1].entry.tells]
    return next(iter((*exact, *causes, *telling)), None)


def _cut_at_number(line: bytes) -> bytes:
    """Return a script's first line up to the first date or number, which differ between runs."""
    if line.startswith(TRACEBACK.encode()) or not _LETTER.search(line):
        return b""
    return _DATE_OR_NUMBER.split(line, maxsplit=1)[0].rstrip()


def _remove_dates(line: bytes) -> bytes:
    return _DATE_OR_NUMBER.sub(b"", line).rstrip()


def _is_weak(entry: CatalogueEntry, text: str) -> bool:
    if entry.over or entry.tells in (LineTells.EXIT, LineTells.END):
        return entry.weak
    survived = bool(_LEVEL.search(text)) or says_recovered(text)
    # An exception, or words by which its program gives up, show an end.
    shows_end = _EXCEPTION.match(text) or (_GAVE_UP.search(text) and not survived)
    return survived or (entry.weak and not shows_end)
