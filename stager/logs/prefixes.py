"""What stands before a line's own text: colours, and the prefixes of launchers and loggers.

A group of a pattern is named for what it tells and who writes it: ``rank_torch``, ``node_pdsh``.
"""

from __future__ import annotations

import functools
import json
import re
from typing import NamedTuple

from bundle.regex import compile_lazily

TRACEBACK = "Traceback (most recent call last)"
_ESCAPES = compile_lazily(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours, movements of the cursor
    rb"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # titles, links
    rb"|[ -/]*[0-Z\\-~])"
)
_REWRITTEN = compile_lazily(rb"^[^\n]*\r(?!\n|\Z)", re.M)
"""Text that a terminal no longer shows: a progress bar is overwritten by what follows it."""
_TAG = (
    rb"(?:[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})?"
    rb"\[[^\]\s,]{0,40}\d,\d+\]<std(?:out|err|diag)>:"
)
_TAGS = compile_lazily(rb"^([^\n]*?" + _TAG + rb")|" + _TAG, re.M)
_REPEATED = compile_lazily(rb"<std\w+>:[^\n]*<std")
"""Open MPI 4 tags what a process writes, not its lines: Python writes an exception in pieces."""
_BOX = "╭".encode()
_CUT_TITLE = compile_lazily(
    "(╭(?:─){1,400} Traceback )(?!\\(most recent call last\\))[^\n]{0,400}?╮".encode()
)
_WHOLE_TITLE = r"\1(most recent call last) ╮".encode()
"""The title of a box that is narrow, as that of rich's logger is where no terminal is."""
_NUMBER = compile_lazily(r"\d+")
_BOX_TOP = compile_lazily(
    r"( *)[╭┌]"
)  # the top of a box, which rich's logger draws behind its columns
_BOX_TITLES = ("╭╮", "┌┐")
_BOX_SIDES = ("││", "┃┃")  # first and last character of a title and of a line in a box
_MOST = 8  # prefixes of one line that are looked at
_COLUMN = r"(?: (?=(?:  )*(?! )))?"
"""A space of the prefix: lines of a traceback begin with an even number of their own."""
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|SUCCESS|WARN(?:ING)?|ERR(?:OR)?|CRIT(?:ICAL)?|FATAL)\b"
_HOST = r"[A-Za-z][\w-]*(?:\.[\w-]+)*"
_HOST_WORD = "node|nid|n|host|compute|cn|dgx|hgx|hpc|ip|worker|server|algo|master"
_NUMBERED_HOST = (
    rf"(?:(?:(?:{_HOST_WORD})-?\d[a-z\d-]*|[a-z][a-z-]*0\d+|[a-z]+\d+(?:[a-z]+\d+)+)"
    r"(?:\.[a-z\d-]+)*|[a-z][a-z\d-]*\d(?:\.[a-z][a-z\d-]*){2,}|\d{1,3}(?:\.\d{1,3}){3})"
)
"""Words that only hosts are called by, where a colon follows: node1, gpu07, c05r2n11."""
_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,]\d+)?"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_ISO = rf"\d{{4}}[-/.]\d\d[-/.]\d\d[ T_]{_CLOCK}(?:Z|(?: ?UTC)|[+-]\d\d:?\d\d)?"
_STAMP = (
    rf"(?:{_ISO}|\d\d/\d\d(?:/\d{{2,4}})?,? {_CLOCK}(?: [AP]M)?|\d\d-\d\d {_CLOCK}"
    rf"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?{_MONTH} [ \d]\d {_CLOCK}"
    r"(?: (?:[A-Z]{3,4} )?\d{4})?)"
)

_MARKS = (
    # torch: [rank3]: before the lines of a traceback, [rank3]:[E1122 ... in C++
    rf"\[rank(?P<rank_torch>\d+)\]:{_COLUMN}",
    # Lightning: [rank: 3] text; Determined: [rank=3] || text, with time and container before it
    r"\[rank[:=] ?(?P<rank_lightning>\d+)\] (?:\|\| )?",
    rf"\[(?P<stamp_determined>{_ISO})\] [\da-f]{{4,}} (?:\|\| |(?=\[rank=))",
    # Composer: rank3[1234][MainThread]: ERROR: composer.trainer: text
    r"rank(?P<rank_composer>\d+)\[\d+\]\[\w+\]: ",
    # torchrun --tee 3 --role "$(hostname -s):"
    rf"\[(?!rank\b)(?P<node_torchrun>{_HOST}): ?(?P<local_host>\d+)\]:{_COLUMN}",
    # torchrun --tee 3, also with a template of two parts; torchx; the template [${rank}]:
    rf"\[(?:[A-Za-z][\w.-]*\|)?[A-Za-z][\w.-]*?(?P<local_torchrun>\d+)\]:{_COLUMN}",
    rf"[A-Za-z][\w-]*/\d+ \[(?P<local_torchx>\d+)\]:{_COLUMN}",
    rf"\[(?P<rank_template>\d+)\]:{_COLUMN}",
    # Open MPI and PRRTE: tag, tag-detailed, tag-fullname; SageMaker: [1,mpirank:3,algo-2]
    r"\[[^\]\s,]*\d,(?:mpirank:)?(?P<rank_openmpi>\d+)(?:,(?P<node_sagemaker>[\w.-]+))?\]"
    rf"(?:\[(?P<node_openmpi>{_HOST}):\d+\])?<std(?:out|err|diag)>:{_COLUMN}",
    # Open MPI and PRRTE with time stamps, which may stand before the tag or without one
    rf"\[?(?P<stamp_openmpi>{_STAMP})\]?(?=\[[^\]\s]*,\d+\](?:\[[^\]]*\])?<std)",
    rf"\[?(?P<stamp_untagged>{_STAMP})\]?<std(?:out|err|diag)>:{_COLUMN}",
    # srun --label, flux run --label-io
    r" *(?P<task_srun>\d{1,6}):(?: |$)",
    # Ray and vLLM: (RayTrainWorker pid=518, ip=10.0.0.5), (VllmWorker rank=1 pid=518), (pid=518)
    r"\((?:[\w.:<>()-]+ )?(?:rank=(?P<rank_vllm>\d+) )?pid=(?P<process_ray>\d+)"
    r"(?:, ip=(?P<node_ray>[\w.:-]+))?\) ?",
    # Kubernetes: kubectl logs --prefix; the files of CRI; Docker Compose
    r"\[pod/(?P<node_pod>[\w.-]+)/[\w.-]+\] ",
    rf"(?P<stamp_cri>{_ISO}) std(?:out|err) [FP] ",
    r"[a-z][\w.-]*-\d+ +\| ",
    # RFC 5424; journalctl and syslog; the kernel's own clock
    rf"<\d+>1 (?P<stamp_syslog>{_ISO}) (?P<node_syslog>\S+) \S+ \S+ \S+ (?:-|\[[^\]]*\]) ",
    rf"(?P<stamp_journal>{_STAMP}) (?!{_LEVEL})(?P<node_journal>{_HOST}) "
    r"(?:kernel: (?:\[ *\d+\.\d+\] )?|[\w./@()-]+\[\d+\]: )",
    r"\[ *\d+\.\d{6}\] ",
)
_LOGGERS = (
    # glog, and torch's loggers in Python: E1122 05:21:32.123456 4711 torch/x.py:880] text
    rf"(?P<level_glog>[IWEFVC])(?P<stamp_glog>\d{{3,4}} {_CLOCK}) +\d+ [^\]\s]+:\d+\]"
    r"(?: \[__\w+\])?",
    # submitit ERROR (2026-02-12 11:00:15,100) - text
    rf"submitit (?P<level_submitit>{_LEVEL}) \((?P<stamp_submitit>{_STAMP})\) - ",
    # [NeMo E 2026-03-04 10:00:00 model:12] text; detectron2: [03/04 10:00:00 d2.engine]: text
    rf"\[\w+ (?P<level_nemo>[IWEF]) (?P<stamp_nemo>{_STAMP}) [^\]]*\]",
    rf"\[(?P<stamp_detectron>{_STAMP}) [\w.]+\]: ?",
    # logging.basicConfig: ERROR:root:text
    rf"(?P<level_basic>{_LEVEL}):[\w.]+:(?=\S)",
    # vLLM: ERROR 07-29 21:48:54 [core.py:1141] text
    rf"\[?(?P<level_first>{_LEVEL})\]? +(?=\[?{_STAMP}|\[[\w./]+:\d+\])",
    # all others; TorchTitan has a word before the time
    rf"(?:\[[a-z]\w*\] )?\[?(?P<stamp_logger>{_STAMP})\]?(?=[ :|\[-])",
)
_MPICH = (
    r"\[(?P<rank_mpich>\d{1,5})\] "
    r"(?!\s*(?:[+-]|\d+\s*$|\d+ +killed\b|(?:Done|Exit|Killed|Terminated|Running)\b))"
)
"""MPICH and Intel MPI: [3] text; but a shell's "[1]+  Done", "[1]   Killed" and "[1] 4711"."""
_NODE = rf"(?!slurmstepd-)(?P<node_pdsh>{_NUMBERED_HOST}):(?: |$)"
"""pdsh, clush, and DeepSpeed's launcher over them."""
_ROW = (
    rf" ?(?:[-|] )?\[?(?P<level_row>{_LEVEL})\]? *(?:[-|:] ?)?(?:[a-z_][a-z\d_.]*:(?= ))?",
    r" ?: (?P<level_tensorflow>[IWEF]) +(?=\S+:\d+\])",
    r" ?\[[^\]\s:]*[\w>]:\d+(?::[^\]\s]*)?\](?: -)?",  # [launch.py:321:sigkill_handler]
    r" ?[\w./<>-]+:\d+\]",
    r" ?\[[A-Za-z_][\w.]*\](?: -)?(?=[ \[])",
    r" ?[-|:] ?(?=\S)",
    rf" ?(?!{_LEVEL})[A-Za-z_][\w.:<>]* - ",
    rf" [A-Za-z_][\w.]*(?= +\[?{_LEVEL})",
)
"""The parts that follow the time in the line of a logger, in any order."""

_MARK = compile_lazily("|".join(_MARKS))
_BAR = compile_lazily(
    r".{0,80}?(?:(?:\d+%\|[^|]*\| *\S+|\d+it) \[\d+:\d\d[^\]]*\](?=\s*\S)"
    r"|━[━╸╺]* +(?:\d+/\d+ [\d:]+ • [\d:-]+ [\d.]+it/s|\d+% [\d:-]+) *(?:[\w/]+: \S+ +)*(?=\S))"
)
"""A bar of tqdm or rich: it has no end of its own, so what is printed next follows it."""
_FIRST_MARK = compile_lazily(
    rf"{_NODE}|{_MPICH}"
)  # prefixes that mean something else behind a time
_LOGGER = compile_lazily("|".join(_LOGGERS))
_PART = compile_lazily("|".join(_ROW))
_PLAIN = compile_lazily(
    rf"(?!(?:submitit|Mon|Tue|Wed|Thu|Fri|Sat|Sun|{_MONTH}|{_LEVEL}) )[A-Za-z_]+(?:[ =,;]|$)"
    r"| +[A-Za-z_~^]"
)
"""The beginning of a line without any prefix, which most lines are, and those of tracebacks."""
_TOGETHER = {
    name: tuple(re.findall(r"\(\?P<(\w+)>", part))
    for part in (*_MARKS, *_LOGGERS, *_ROW, _MPICH, _NODE)
    for name in re.findall(r"\(\?P<(\w+)>", part)
}
"""For each group of the patterns, all those of its prefix."""
_COLUMN_SPACE = compile_lazily(_COLUMN)
_GROUP = compile_lazily(
    r"  (?:  )*[|+] (?=Traceback|Exception Group|  File|    |[A-Za-z_][\w.]*: )"
)
"""The margin of an exception group (Python 3.11)."""
_LONGEST_NUMBER = 8
_OF_WRITER = ("rank", "local", "task", "node", "process")
_JSON_TEXTS = ("log", "message", "msg")
_JSON_STAMPS = ("time", "timestamp", "asctime", "ts")


class ParsedLine(NamedTuple):
    """One line, and what its prefixes tell; the prefix nearest to the text counts most."""

    text: str
    logged: str = ""  # the text with what a logger put before it: level, place, time
    marks: tuple[tuple[str, str], ...] = ()
    """What names its writer: each group of the patterns above, and its text."""
    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None  # the task of ``srun --label``: a rank, unless each task is a torchrun
    node: str = ""
    level: str = ""  # a logger's level as it wrote it, such as ``ERROR`` or ``E``; empty for none
    stamp: str = ""
    """The time as it is written, see :func:`stager.logs.lines.read_stamp`; empty for none."""


@functools.lru_cache(maxsize=1 << 11)  # a block of lines is gone through twice
def parse_line(line: str) -> ParsedLine:
    """Separate a line of a log from its prefixes."""
    text = show_as_terminal(line)
    if _is_plain(text):
        return ParsedLine(text=text, logged=text)
    told: dict[str, str] = {}
    groups: dict[str, str] = {}
    if text.startswith("{"):
        text = _unwrap_json(text, told)
    rest, logger = text, ""
    for _ in range(_MOST):
        if _is_plain(rest):
            break
        mark = _match_mark(rest, has_stamp="stamp" in told)
        if mark is not None:
            _collect(mark, told, groups)
            rest = rest[mark.end() :]
            continue
        end = _find_logger_end(rest, told)
        logger, rest = logger + rest[:end], rest[end:]
        if not end:
            break
    return ParsedLine(
        text=_unbox(rest),
        logged=logger + rest,
        marks=tuple(item for item in groups.items() if item[0].partition("_")[0] in _OF_WRITER),
        rank=_number(told, "rank"),
        local_rank=_number(told, "local"),
        task=_number(told, "task"),
        node=told.get("node", ""),
        level=told.get("level", ""),
        stamp=told.get("stamp", ""),
    )


class TracebackPrefix:
    """What stands before each line of one traceback."""

    def __init__(self, first: str, below: str) -> None:
        """Learn the prefix from a traceback's first two lines, empty if there is no second yet."""
        box = _BOX_TOP.match(first)
        self._indent = box[1] if box else ""
        line = parse_line(first)
        self._marks = line.marks
        head, self.first, rest = line.text.partition(TRACEBACK)
        self.first += rest
        # A logger that nobody knows: its times and counts differ from line to line.
        head = _NUMBER.sub(r"\\d+", re.escape(head.rstrip()))
        self._head = re.compile(head + "(?: |$)?") if head else None
        if self._head is not None and not self._head.match(parse_line(below).text):
            self._head = None

    @property
    def writer_key(self) -> object:
        """Return what tells its lines from another traceback's."""
        return self._marks, None if self._head is None else self._head.pattern

    def strip(self, line: str) -> str | None:
        """Return the text of a line that may belong to the traceback; None for another writer's."""
        parsed = parse_line(line.removeprefix(self._indent))
        if parsed.marks != self._marks:
            return None
        if self._head is None:
            return parsed.text
        head = self._head.match(parsed.text)
        return None if head is None else parsed.text[head.end() :]


def show_block_as_terminal(block: bytes) -> bytes:
    """Return lines as a terminal shows them; there are as many, and the last may be cut."""
    if b"\r" in block:
        block = _REWRITTEN.sub(b"", block)
    if b"\x1b" in block:
        block = _ESCAPES.sub(b"", block)
    if not block.isascii() and _BOX in block:
        block = _CUT_TITLE.sub(_WHOLE_TITLE, block)
    if b"<" in block and b"<std" in block and _REPEATED.search(block):
        block = _TAGS.sub(rb"\1", block)
    return block


def show_as_terminal(line: str) -> str:
    """Return a line as a terminal shows it: without colours, and without overwritten text."""
    line = line.rstrip("\r\n")
    if "\r" in line:
        line = line.rpartition("\r")[2]
    if "\x1b" in line or "╭" in line or "<std" in line:
        block = line.encode("utf-8", "surrogatepass")
        line = show_block_as_terminal(block).decode("utf-8", "surrogatepass")
    return line.replace("\0", "") if "\0" in line else line


def show_line(raw: bytes, longest: int | None = None) -> str:
    """Return a line, as it is in a file, as a terminal shows it; no more than its beginning."""
    last = raw.rstrip(b"\r\n").rpartition(b"\r")[2]
    if longest is None:
        return show_as_terminal(last.decode(errors="replace"))
    return show_as_terminal(last[: 2 * longest].decode(errors="replace"))[:longest]


def _is_plain(text: str) -> bool:
    return _PLAIN.match(text) is not None and not any(part in text for part in ("%|", "it [", "━"))


def _match_mark(text: str, *, has_stamp: bool) -> re.Match[str] | None:
    mark = _MARK.match(text) or (_GROUP.match(text) if text.startswith("  ") else None)
    if mark is None and not has_stamp:  # after a time, a word is no host
        mark = _FIRST_MARK.match(text)
    return _BAR.match(text) if mark is None and ("[" in text or "━" in text) else mark


def _find_logger_end(text: str, told: dict[str, str]) -> int:
    start = _LOGGER.match(text)
    if start is None:
        return 0
    _collect(start, told)
    end = start.end()
    while (part := _PART.match(text, end)) is not None and part.end() > end:
        _collect(part, told)
        end = part.end()
    space = _COLUMN_SPACE.match(text, end)
    return end if space is None else space.end()


def _collect(
    match: re.Match[str], told: dict[str, str], groups: dict[str, str] | None = None
) -> None:
    for name in _TOGETHER.get(match.lastgroup or "", ()):
        if value := match[name]:
            told[name.partition("_")[0]] = value
            if groups is not None:
                groups[name] = value


def _number(told: dict[str, str], name: str) -> int | None:
    text = told.get(name, "")
    return int(text) if text and len(text) < _LONGEST_NUMBER else None


def _unbox(text: str) -> str:
    """Return a line without its box; keep the last line of rich's, which Python does not write."""
    box = text.strip(" ")
    ends = box[:1] + box[-1:] if len(box) > 1 else ""
    if ends in _BOX_TITLES:
        return box[1:-1].strip("─ ")
    if ends in _BOX_SIDES and box[1] == " ":
        indent = len(text) - len(text.lstrip(" "))
        return " " * (indent + 2) + box[2:-1].rstrip(" ")
    return text


def _unwrap_json(text: str, told: dict[str, str]) -> str:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return text
    inner = next((fields[key] for key in _JSON_TEXTS if isinstance(fields.get(key), str)), None)
    if inner is None:
        return text
    for key in _JSON_STAMPS:
        if isinstance(fields.get(key), (str, int, float)):
            told["stamp"] = str(fields[key])
            break
    return show_as_terminal(inner)
