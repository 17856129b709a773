"""The lines that a process printed after a hit: whether it survived what the hit tells.

Programs print errors that they survive: a download that is tried again, a batch that is skipped, an
optional import. Only what follows such a line tells it from the one that ended the process.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..catalogue.catalogue import match
from .scan import Hit, says_recovered
from .traceback import Marked, marked, shown

_BYTES = 1 << 16
"""Bytes below a hit that are read."""
_ENOUGH = 200
"""Ordinary lines after which nothing more is counted."""
_NEAR = 3
"""Ordinary lines below a hit that may tell what its program did about it."""
_CHARACTERS = 500
"""Characters of a line that are looked at."""
_OF_TRACE, _OF_LINE, _OF_OTHERS = 10, 5, 100
"""Ordinary lines from which on the writer of a traceback, or of a line, has survived it; the last
counts where several processes may have written them."""

_RESTARTED = re.compile(
    r"(?<!not )\b(?:re-?start(?:s|ed|ing)?|resum(?:e[ds]?|ing)|re-?launch(?:ed|ing)?|requeue[ds]?|"
    r"(?:attempt|try|retry)\W{0,3}\d+|restart_count)\b",
    re.IGNORECASE,
)
"""Words at the beginning of another attempt."""
_ENDED_WELL = re.compile(
    r"\b(?:finished|completed?|done|success(?:ful(?:ly)?)?|succeeded|ended well)\b"
    r"|\bexit(?:ed)?\b.{0,12}\b(?:code|status)\W{0,3}0\b",
    re.IGNORECASE,
)
_ENDED_BADLY = re.compile(
    r"error|fail|abort|unsuccess|\bnot\b|\b(?:code|status|rc)\W{0,3}-?[1-9]", re.IGNORECASE
)
_OF_THE_END = re.compile(
    # launchers, schedulers, shells, and what a batch script says at its end
    r"\s|\W*$|[-=*#+~_]{4,}"
    r"|(?:srun|sbatch|slurmstepd|slurmd|salloc|mpirun|mpiexec|prterun|orterun|torchrun|accelerate|bash|sh)\b"
    r"|\S+: line \d+:|\+ |(?:real|user|sys)\s+\d|usage: |wandb:|(?:job|exit|end(?:ed)?|finish\w*) ?\w*\W"
    # crashes: frames and stacks of C++, of Python's faulthandler, and of MPI
    r"|frame #|#\d+ |\*\*\* |\[[\w.-]+:\d+\] |terminate called|Fatal Python error|Current thread|Thread 0x"
    r"|Extension modules|Aborted|Killed|Segmentation fault|Bus error|Traceback|File \"|> File \""
    # exceptions and what hangs on them, torch's own stamps and its table
    r"|[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b|Exception ignored|During handling|The above"
    r"|\[?[IWEF]\d{3,4} \d\d:\d\d:\d\d|Failures:|Root Cause|.*\bFAILED$|.*\bNCCL (?:INFO|WARN|ERROR)\b"
    r"|.*\b(?:kill|terminat|abort|shut(?:ting)? ?down|clos(?:e|ing)|clean(?:ing)? ?up|exit(?:s|ed|ing)?\b"
    r"|errors?\b|fail)",
    re.IGNORECASE,
)
"""Lines, by their beginning or by a word in them, that a process may print as it comes to its end."""


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """What the writer of a hit printed after it."""

    ordinary: int
    """Lines that are not about an end; no more than a few hundred are counted."""
    recovered: bool
    """Whether its program says that it went on: it tries again, skips, falls back."""
    restarted: bool
    """Whether another attempt says that it begins."""
    ended_well: bool
    """Whether the last of the lines say that all ended well."""

    def shows_survival(self, hit: Hit, *, shared: bool) -> bool:
        """Return whether the writer survived what the hit tells.

        Args:
            hit: the hit.
            shared: whether other processes may have written these lines.
        """
        if hit.trace and "rank" in dict(hit.marks):  # torch marks what nothing has caught
            return False
        enough = _OF_TRACE if hit.trace else _OF_LINE
        if shared and not hit.marks:
            enough = _OF_OTHERS
        if self.ordinary >= enough or self.recovered:
            return True
        return self.ended_well and self.ordinary >= _NEAR


def aftermath(hit: Hit, until: int | None = None) -> Aftermath:
    """Return what the writer of a hit printed after it.

    Args:
        hit: the hit.
        until: the number of the line at which to stop; None for the end of the file.
    """
    ordinary: list[str] = []
    last: collections.deque[str] = collections.deque(maxlen=_NEAR)
    for number, line in enumerate(_below(hit), start=hit.last + 1):
        if (until is not None and number >= until) or len(ordinary) >= _ENOUGH:
            break
        mark = marked(line)
        if not mark.text.strip() or (hit.marks and not _is_same_process(hit, mark)):
            continue
        last.append(mark.text)
        if not _OF_THE_END.match(mark.text) and match(mark.text) is None:
            ordinary.append(mark.text)
    return Aftermath(
        ordinary=len(ordinary),
        recovered=any(map(says_recovered, ordinary[:_NEAR])),
        restarted=any(map(_RESTARTED.search, ordinary[:20])),
        ended_well=any(_ENDED_WELL.search(text) and not _ENDED_BADLY.search(text) for text in last),
    )


def _is_same_process(hit: Hit, mark: Marked) -> bool:
    """Return whether the marks of a line name the process that wrote a hit."""
    mine, other = dict(hit.marks), dict(mark.marks)
    common = mine.keys() & other.keys()
    return bool(common) and all(mine[name] == other[name] for name in common)


def _below(hit: Hit) -> Iterator[str]:
    """Yield the lines below a hit, as many as are looked at."""
    try:
        with hit.log.path.open("rb") as handle:
            handle.seek(hit.below)
            raws = handle.read(_BYTES).split(b"\n")
    except OSError:
        return
    for raw in raws:
        yield shown(raw, _CHARACTERS)
