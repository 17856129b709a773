"""The lines that a process printed after a hit: whether it survived what the hit tells.

Programs print errors that they survive: a download that is tried again, a batch that is skipped, an
optional import. Only what follows such a line tells it from the one that ended the process.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..catalogue.catalogue import match
from ..logs.lines import last_lines
from ..logs.prefixes import ParsedLine, parse_line
from .scan import Hit
from .traceback import shown
from .wording import is_of_an_end, says_ended_well, says_recovered, says_restarted, says_trained

_BYTES = 1 << 16
"""Bytes below a hit that are read."""
_ENOUGH = 200
"""Ordinary lines after which nothing more is counted."""
_NEAR = 3
"""Ordinary lines below a hit that may tell what its program did about it."""
_LAST_OUTPUT = 5
"""Lines at the end of a standard output that may say how it ended."""
_STREAMS = (
    (re.compile(r"\.err$"), ".out"),
    (re.compile(r"\.e$"), ".o"),
    (re.compile(r"\.e(?=\d+$)"), ".o"),
    (re.compile(r"\bstderr\b"), "stdout"),
)
"""The names of a file of standard errors, and of the standard output beside it."""
_RULE = re.compile(r"-{60,}")
"""The line above and below each of Open MPI's messages, which have many lines."""
_FIRST = 20
"""Lines below an end in which another attempt says that it begins."""
_CHARACTERS = 500
"""Characters of a line that are looked at."""
_OF_TRACE, _OF_LINE, _OF_OTHERS = 10, 5, 100
"""Ordinary lines from which on the writer of a traceback, or of a line, has survived it; the last
counts where several processes may have written them."""


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
    trained: bool
    """Whether the output of the same process, in a file of its own, ends with a trained model."""

    def shows_survival(self, hit: Hit, *, shared: bool) -> bool:
        """Return whether the writer survived the hit; ``shared``: others may have written here."""
        if hit.trace and "rank_torch" in dict(hit.marks):  # torch marks what nothing has caught
            return False
        enough = _OF_TRACE if hit.trace else _OF_LINE
        if shared and not hit.marks:
            enough = _OF_OTHERS
        if self.ordinary >= enough or self.recovered or self.trained:
            return True
        return self.ended_well and self.ordinary >= _NEAR


def aftermath(hit: Hit, until: int | None = None) -> Aftermath:
    """Return what the writer of a hit printed after it, before line ``until`` (None: the end)."""
    first: list[str] = []
    ordinary: list[str] = []
    last: collections.deque[str] = collections.deque(maxlen=_NEAR)
    boxed = hit.entry.source.startswith("Open MPI") and not hit.trace
    for number, line in enumerate(_below(hit), start=hit.last + 1):
        if (until is not None and number >= until) or len(ordinary) >= _ENOUGH:
            break
        mark = parse_line(line)
        if not mark.logged.strip() or (hit.marks and not _is_same_process(hit, mark)):
            continue
        is_rule = _RULE.fullmatch(mark.logged) is not None
        boxed ^= is_rule
        if boxed or is_rule:
            continue
        last.append(mark.logged)
        known = match(mark.logged) is not None
        if not known and len(first) < _FIRST:
            first.append(mark.logged)
        if not known and not is_of_an_end(mark.logged):
            ordinary.append(mark.logged)
    return Aftermath(
        ordinary=len(ordinary),
        recovered=any(map(says_recovered, ordinary[:_NEAR])),
        restarted=any(map(says_restarted, first)),
        ended_well=any(map(says_ended_well, last)),
        trained=any(map(says_trained, _last_output(hit.log.path))),
    )


def _last_output(errors: Path) -> tuple[str, ...]:
    """Return the last lines of the stdout file that belongs to a stderr file."""
    for of_errors, of_output in _STREAMS:
        name = of_errors.sub(of_output, errors.name)
        if name != errors.name:
            return last_lines(errors.with_name(name), _LAST_OUTPUT)
    return ()


def _is_same_process(hit: Hit, mark: ParsedLine) -> bool:
    mine, other = dict(hit.marks), dict(mark.marks)
    common = mine.keys() & other.keys()
    return bool(common) and all(mine[name] == other[name] for name in common)


def _below(hit: Hit) -> Iterator[str]:
    try:
        with hit.log.path.open("rb") as handle:
            handle.seek(hit.below)
            raws = handle.read(_BYTES).split(b"\n")
    except OSError:
        return
    for raw in raws:
        yield shown(raw, _CHARACTERS)
