"""The verdict: which of many candidates failed first, and why it is that one.

Two front ends make the candidates: :mod:`.driver_verdict` from the driver's typed result, and
:mod:`.log_verdict` from lines of logs, whoever's launcher wrote them. Both are ranked here, by one
rule: the :class:`Role` counts first, then whether a writer went on after its line, then whether its
launcher saw another rank fail first, then the time.
Of two that are still equal, the one that its front end gives first counts. Then, if a cause has no
words of its own, the next candidate of the same failure that has some speaks for it.

The order of the roles goes from what needs nobody else to what needs an explanation itself:

1. One that failed by itself explains the others, so a cause always counts first, however late it
   came: a rank that loses its peers often raises before the one that left has been noticed.
2. A signal comes after a written cause, since a launcher kills those that wait for the failed rank.
3. A symptom (ranks cannot meet) names no culprit, but does say what is wrong.
4. A node that could not do its part explains the ranks that missed it, and not the other way
   round. A node that only followed another one counts where that other one is not known.
5. Ranks that somebody missed come next: one whose launcher ended the others because of it, one that
   left early, one that never came. Nothing is wrong with them but their absence.
6. Slurm's end of the job follows: what came before it may have made the job hang until its limit.
   A cause that its writer survived comes after it.
7. A bare exit status of a launcher or process says that it failed, but not why. It counts only
   after Slurm's end, which leaves such statuses behind.
8. Consequences count where there is nothing else: better a rank that lost its peers than none. Logs
   do not name it, since another one failed first. One that was told to end says less than one that
   lost its peers, and a launcher that was told to end says less than its ranks.
9. A process that goes on for too long is no failure unless nothing else ended the job.

The front ends differ in three ways, because their evidence does:

- The driver knows who sent a signal, so a rank that was killed, or that ended without a word, is a
  ``CAUSE`` for it. Logs cannot tell, so there it is ``KILLED`` or a ``BARE_STATUS``.
- The driver asks Slurm whether it ended the job. If it did, what ranks and nodes report followed
  from that, and there is nothing to rank. Logs are compared with the line of the end, by place and
  by time, and what came after it is no candidate.
- Candidates of both are never mixed. Where the driver has a verdict, logs explain it
  (:mod:`.diagnose`): their times are less exact than the driver's, and they tell of the same ranks
  again, less reliably. Of a job without a result, Slurm's accounting may know that Slurm ended it.
  That has no time to compare, so what a log tells comes before it, unless the end may have caused
  that: a signal, a hang, a bare status, or consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum, auto

from .exit_reports import Exit
from .failure import FirstFailure
from .scan import Hit


class Role(IntEnum):
    """The part that a candidate has in a failure; the lowest one counts."""

    CAUSE = auto()
    """A rank or a line that failed by itself."""
    KILLED = auto()
    """A process that a signal ended, as logs report it."""
    SYMPTOM = auto()
    """A line that tells what often follows from something else."""
    NODE = auto()
    """A node that could not do its part."""
    FOLLOWING_NODE = auto()
    """A node whose problem follows from that of another one."""
    VANISHED = auto()
    """A rank that made its launcher end the others, with unknown status."""
    LEFT_EARLY = auto()
    """A rank that ended well, or left its process group, and that others missed then."""
    ABSENT = auto()
    """Ranks that did not come to where others waited."""
    SLURM_END = auto()
    """Slurm's end of the job."""
    SURVIVED = auto()
    """A line that tells a cause, though its writer went on after it."""
    BARE_STATUS = auto()
    """A process of which nothing but a bad exit status is known, such as a launcher's."""
    LOST_PEER = auto()
    """A rank or a line that tells of the failure of another one."""
    ENDED_BY_OTHERS = auto()
    """A rank that was told to end."""
    ENDED_LAUNCHER = auto()
    """A launcher that was told to end."""
    LINGERING = auto()
    """A process that goes on for too long."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One thing that may have failed first."""

    role: Role
    """Its part in the failure."""
    failure: Callable[[], FirstFailure]
    """Makes the first failure, if it is this one."""
    node: str = ""
    """The node of a rank; empty for any other candidate."""
    time: float | None = None
    """The time, in seconds since the epoch; one without a time comes after those that have one."""
    survived: bool = False
    """Whether its writer went on for long after it."""
    passed_over: bool = False
    """Whether its launcher saw another rank fail first."""
    silent: bool = False
    """Whether another candidate of the same failure may speak for it."""
    same: object = None
    """Equal for candidates of the same failure; only looked at if one of them is silent."""
    shown: tuple[Hit | Exit, ...] = ()
    """The lines that show it."""
    missing: tuple[int, ...] = ()
    """Ranks that did not come, for ``ABSENT``."""


def blamed(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate that failed first, or the one that speaks for it; None for none."""
    ranked = sorted(candidates, key=_order)
    if not ranked:
        return None
    first = ranked[0]
    if not first.silent:
        return first
    same = (other for other in ranked if (other.role, other.same) == (first.role, first.same))
    return next((other for other in same if not other.silent), first)


def _order(candidate: Candidate) -> tuple[Role, bool, bool, float]:
    time = float("inf") if candidate.time is None else candidate.time
    return candidate.role, candidate.survived, candidate.passed_over, time
