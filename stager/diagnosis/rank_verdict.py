"""The failure of one rank, as its record tells it: its exception, its words, its exit status."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from bundle.launch.rank_results import CAUSE, LOST_PEER, weight
from bundle.launch.wrapper import is_own_frame, keep_own_frame
from bundle.protocol.enumerations import FailureClass
from bundle.protocol.reports import FailureRecord

from ..catalogue.catalogue import CatalogueEntry, CatalogueMatch, LineRole, LineTells, match
from .failure import FirstFailure

_HIGHEST_SIGNAL = 64
LINES = 20
"""Lines that are kept of a failure."""

_ERROR = re.compile(
    r"(?:\[RANK \d+\] )?(?!srun|slurm|sbatch)(?:[\w./][\w./ -]*: )?error: \S.*", re.IGNORECASE
)
"""The form in which programs say why they end: ``error: ...``, ``train.py: error: ...``."""
_HINT = "hint: "
_LOG_TELLS = "the lines before that in its log say why"
_SIGNAL_HINTS = {
    "SIGTERM": "not its launcher: see whether the program signals itself, or who else sent it",
    "SIGKILL": "usually the machine ran out of memory: use a smaller batch or fewer ranks",
    "SIGBUS": "usually /dev/shm is full, or a file was cut off: check the free space there",
    "SIGABRT": "a library gave up: the last lines of its log say why",
    "SIGSEGV": "a crash in compiled code: set PYTHONFAULTHANDLER=1 and run again to see where",
    "SIGILL": "a wheel uses instructions that this processor lacks: exclude the node",
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The cause of a failure, in words."""

    text: str
    """The cause, in one line."""
    kind: FailureClass
    """Its class."""
    hint: str
    """What to do about it."""


def of_rank(record: FailureRecord) -> FirstFailure:
    """Return the failure of a rank; what the catalogue knows of it comes before its own words."""
    cause = _cause(record)
    words, own_hint = own_words(record)
    if words:
        cause = Cause(text=words, kind=FailureClass.PYTHON_ERROR, hint=cause.hint)
    failure = FirstFailure(
        node=record.node,
        rank=record.rank,
        exit_code=record.exit_code,
        kind=cause.kind,
        cause=cause.text,
        hint=cause.hint,
        lines=tuple(keep_own_frame(record.lines, LINES)),
        time=record.time,
    )
    known = explained(record) or (match(words) if words else None)
    if known is not None:
        failure = failure.explained_by(known)
    return replace(failure, hint=own_hint or failure.hint)


def _cause(record: FailureRecord) -> Cause:
    exception, summary = record.exception, _summary(record)
    if not exception:
        return of_code(record.exit_code)
    if exception == "SystemExit":
        text, hint = _exit_of_its_own(summary)
    else:
        text = f"{exception}: {summary}" if summary else exception
        has_line = any("Traceback" in line or is_own_frame(line) for line in record.lines)
        hint = "the traceback names the line in your program" if has_line else _LOG_TELLS
    return Cause(text=text, kind=FailureClass.PYTHON_ERROR, hint=hint)


def _exit_of_its_own(value: str) -> tuple[str, str]:
    """Return words and hint for a ``sys.exit``, whose value is a status or a message."""
    if not value or value.lstrip("-").isdigit():
        return f"the program ended itself: sys.exit({value})", _LOG_TELLS
    return f"the program ended itself: {value}", "these are the program's own words"


def _summary(record: FailureRecord) -> str:
    return next(iter(record.message.strip().splitlines()), "")


def of_code(code: int) -> Cause:
    """Return the cause that the exit status of a silent process tells."""
    number = signal_of(code)
    if number == 0:
        text, hint = f"it ended with exit status {code}", "its log holds all it wrote"
        return Cause(text=text, kind=FailureClass.UNKNOWN, hint=hint)
    name = _signal_name(number)
    hint = _SIGNAL_HINTS.get(name, "see who sent the signal")
    return Cause(text=f"it was killed by {name}", kind=FailureClass.KILLED, hint=hint)


def signal_of(code: int) -> int:
    """Return the number of the signal that an exit status stands for; 0 for none.

    A shell adds 128 to a signal's number; ssh, Apptainer and ``sys.exit(-1)`` end with 255.
    """
    number = -code if code < 0 else code - 128
    return number if 0 < number <= _HIGHEST_SIGNAL else 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def own_words(record: FailureRecord) -> tuple[str, str]:
    """Return the words with which a rank ended itself, and its hint; empty if it did not.

    An exception with a line in the user's own code tells more, and so does one that they lack.
    """
    if not 0 < record.exit_code < 128 or any(map(is_own_frame, record.lines)):
        return "", ""
    said = "" if record.exception == "SystemExit" else _summary(record)
    hint = ""
    for line, below in zip(reversed(record.lines), ("", *reversed(record.lines)), strict=False):
        if _ERROR.match(line) and said in line:
            return f"{line.strip()} {below.strip() if line.endswith(':') else ''}".strip(), hint
        if line.startswith(_HINT):
            hint = line.removeprefix(_HINT).strip()
    return "", ""


def weigh(record: FailureRecord) -> int:
    """Return the relation of a failure to those of others: cause, lost peer, or ended by others.

    The far side weighs it; but a rank whose collective did not end in time has lost its peers, too.
    """
    seen = weight(record.exit_code, record.exception, record.message, record.told_to_end)
    if seen != CAUSE:
        return seen
    known = explained(record)
    follows = known is not None and known.entry.role == LineRole.CASCADE
    return LOST_PEER if follows else CAUSE


def waited_in_vain(record: FailureRecord) -> bool:
    """Return whether a rank failed because it had waited too long for another one."""
    known = explained(record)
    return known is not None and known.entry.tells == LineTells.STUCK


def explained(record: FailureRecord) -> CatalogueMatch | None:
    """Return what the catalogue knows of a rank's failure.

    Its exception counts, then those that it followed from. Of a rank that left none, the lines may
    be anybody's.
    """
    if not record.exception:
        return None
    closing = match(f"{record.exception}: {_summary(record)}")
    if closing is not None and _explains(closing.entry):
        return closing
    last: CatalogueMatch | None = None
    for line in reversed(_exception_lines(record)):
        known = match(line)
        if known is None or not _explains(known.entry):
            continue
        if known.entry.role == LineRole.PRIMARY:
            return known
        last = last or known
    return last


def _exception_lines(record: FailureRecord) -> list[str]:
    """Return the lines that may be exceptions; of a ``sys.exit``, the errors logged before it."""
    if record.exception == "SystemExit":
        return [line for line in record.lines if "rror" in line]
    return [line for line in record.lines if line[:1].strip()]


def _explains(entry: CatalogueEntry) -> bool:
    return entry.role != LineRole.NOISE and entry.tells != LineTells.EXIT
