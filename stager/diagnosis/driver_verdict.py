"""The first failure as the driver's result tells it: from ranks' records, problems and statuses."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from bundle.launch.rank_results import CAUSE, LOST_PEER, weight
from bundle.protocol.problem import Problem

from ..catalogue.catalogue import CASCADE, EXIT, NOISE, PRIMARY, STUCK, Match, match
from . import slurm_endings
from .failure import FirstFailure
from .wording import goes_on

LINES = 20
_TOLD_TO_END = 128 + signal.SIGTERM
_AT_ONCE = 1.0
"""Seconds by which a busy node may be late to tell that a rank has ended."""

_NODE_SIGNS = (
    ("killed", re.compile(r"gave no answer.*: Killed$")),
    ("environment", re.compile(r"gave no answer.*Exited with exit code")),
    ("node-failure", re.compile(r"gave no answer")),
    ("hang", re.compile(r"the ranks did not end")),
    ("damaged-copy", re.compile(r"damaged|another bundle")),
    ("disk-full", re.compile(r" are free|No space left")),
    ("interface", re.compile(r"no such interface")),
    ("name-resolution", re.compile(r"name cannot be resolved")),
    ("port", re.compile(r"ports .* can be listened on")),
)
"""How the far side words its problems, by class; anything else is the environment's."""

_ERROR = re.compile(
    r"(?:\[RANK \d+\] )?(?!srun|slurm|sbatch)(?:[\w./][\w./ -]*: )?error: \S.*", re.IGNORECASE
)
"""How programs say why they end: ``error: ...``, ``train.py: error: ...``."""
_HINT = "hint: "

_TAKEN_ALONG = re.compile(r"srun ended it, as \S+ had failed")
"""A node that did nothing wrong."""


def verdict(result: Mapping[str, Any], job_id: str) -> FirstFailure | None:
    """What went wrong first; what Slurm did to the job comes before what followed from it.

    Args:
        result: the driver's ``result`` event, see :func:`before_the_interrupt`; empty for a job
            that has none.
        job_id: the allocation.
    """
    ended_by = str(result.get("ended_by") or "")
    if result.get("ok"):
        return None
    if ended_by:
        lost = next(iter(result.get("problems", {})), "") if ended_by == "node-failure" else ""
        return slurm_endings.failure(ended_by, job_id, lost)
    return first_failure(result)


def before_the_interrupt(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result without what only followed from its user's ending the job, if that was its end."""
    if not result.get("interrupted") or result.get("ended_by"):
        return dict(result)
    stopped = result.get("stopped", [])
    failures = [one for one in result.get("failures", []) if not one.get("told_to_end")]
    codes = result.get("exit_codes", {})
    own = {node: code for node, code in codes.items() if node not in stopped}
    return {**result, "failures": failures, "exit_codes": own}


def first_failure(result: Mapping[str, Any]) -> FirstFailure | None:
    """The earliest failure that is a cause and not a consequence.

    A rank that failed by itself comes first; then a node that could not do its part; then a rank
    that ended well, or left its process group, while others went on and missed it; then a launcher
    that failed before it had ranks. Only where there is none of these is a rank blamed that lost
    its connection to the others, or that somebody ended; or one that goes on for too long.

    Args:
        result: the driver's ``result`` event.
    """
    ranked = sorted(result.get("failures", []), key=_order)
    if ranked and part(ranked[0]) == CAUSE:
        return _of_rank(_speaker(ranked))
    listed = result.get("problems", {}).items()
    said = [(node, Problem.from_json(raw)) for node, problems in listed for raw in problems]
    for node, problem in sorted(said, key=lambda one: _TAKEN_ALONG.search(one[1].why) is not None):
        own = (record for record in ranked if record["node"] == node)
        return _of_node(node, problem, next(own, None), _lingering(result, node))
    if (gone := _vanished(result) or _first_to_leave(result, ranked)) is not None:
        return gone
    codes = {node: int(code) for node, code in result.get("exit_codes", {}).items() if code}
    with_ranks = {record["node"] for record in ranked}
    silent = {node: code for node, code in codes.items() if node not in with_ranks}
    # A launcher that was told to end is a consequence, too.
    for node in sorted(silent, key=lambda node: silent[node] == _TOLD_TO_END):
        if silent[node] != _TOLD_TO_END or not ranked:
            return _of_launcher(node, silent[node], result.get("tails", {}).get(node, []))
    return _of_rank(ranked[0]) if ranked else _lingering(result)


def _order(record: Mapping[str, Any]) -> tuple[int, float, bool]:
    """A cause first, then by time; of two at the same time, the one that torchrun blames."""
    return part(record), float(record["time"]), not record.get("root_cause")


def _vanished(result: Mapping[str, Any]) -> FirstFailure | None:
    """The rank that made its launcher end the others, with a status that nobody saw."""
    gone = min(result.get("vanished", []), key=lambda one: float(one["time"]), default=None)
    if gone is None:
        return None
    return FirstFailure(
        node=str(gone["node"]),
        rank=int(gone["rank"]),
        exit_code=None,
        kind="unknown",
        cause="its process ended, and its launcher began to end the others because of it",
        hint="its log holds all it wrote; its exit status is told when all of them have ended",
        lines=(),
        time=float(gone["time"]),
    )


def _first_to_leave(
    result: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]
) -> FirstFailure | None:
    """The rank that others failed for want of: it ended with status 0, or had left the group."""
    # Their processes' ends count: an exception is often noted before the kernel tells of the end
    # that it follows from.
    missed = [float(one.get("ended") or one["time"]) for one in ranked if part(one) == LOST_PEER]
    gone = min(result.get("left", []), key=lambda one: float(one["time"]), default=None)
    if not missed or gone is None or float(gone["time"]) > min(missed) + _AT_ONCE:
        return None
    if gone.get("goes_on"):
        return _of_lingering({**gone, "finished": None, "left": gone["time"]})
    return FirstFailure(
        node=str(gone["node"]),
        rank=int(gone["rank"]),
        exit_code=0,
        kind="hang",
        cause="it ended, with exit status 0, while other ranks went on and waited for it",
        hint="see why it ended before the others: sys.exit or os._exit on one rank only, fewer "
        "batches than the others have, or a loop that it leaves earlier",
        lines=(),
        time=float(gone["time"]),
    )


def _lingering(result: Mapping[str, Any], node: str = "") -> FirstFailure | None:
    """The rank, of that node if one is given, whose process goes on for too long; None for none."""
    found = [one for one in result.get("lingering", []) if node in ("", one["node"])]
    out = [one for one in found if one.get("left") is not None]
    if len(out) == result.get("world_size"):
        return None  # nobody is in the group any more, so nobody waits there for anybody
    return _of_lingering(min(found, key=_since)) if found else None


def _since(rank: Mapping[str, Any]) -> tuple[bool, bool, float, int]:
    """Order ranks that go on: those that have finished, that have left their group, all others."""
    finished, left = rank["finished"], rank.get("left")
    return finished is None, left is None, finished or left or 0.0, rank["rank"]


def _of_lingering(event: Mapping[str, Any]) -> FirstFailure:
    cause, hint = goes_on(event)
    return FirstFailure(
        node=str(event["node"]),
        rank=int(event["rank"]),
        exit_code=None,
        kind="hang",
        cause=cause,
        hint=hint,
        lines=(),
        time=event["finished"] or event.get("left"),
    )


def _speaker(ranked: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first rank; of some that ended alike, without an exception, the one that said why.

    Ranks that agree to give up end together, and one of them speaks for all.
    """
    first = ranked[0]
    if first["exception"] or said(first)[0]:
        return first
    alike = (one for one in ranked if not one["exception"] and part(one) == CAUSE)
    speaking = (one for one in alike if one["exit_code"] == first["exit_code"] and said(one)[0])
    return next(speaking, first)


def said(record: Mapping[str, Any]) -> tuple[str, str]:
    """With which words a rank ended itself, and its own hint; empty where it did otherwise."""
    if record["exception"] not in ("", "SystemExit") or not 0 < int(record["exit_code"]) < 128:
        return "", ""
    lines = [str(line) for line in record["lines"]]
    for at in reversed(range(len(lines))):
        if _ERROR.match(lines[at]):
            below = next((line for line in lines[at + 1 :] if line.startswith(_HINT)), "")
            return lines[at].strip(), below.removeprefix(_HINT).strip()
    return "", ""


def part(record: Mapping[str, Any]) -> int:
    """What a rank's failure is to the others: as the far side weighs it, and by the catalogue.

    A rank whose collective did not end in time has lost its peers as well.
    """
    found = explained(record)
    weighed = weight(record)
    if weighed == CAUSE and found is not None and found[0].role == CASCADE:
        return LOST_PEER
    return weighed


def stuck(record: Mapping[str, Any]) -> bool:
    """Whether a rank failed because it had waited too long for another one."""
    found = explained(record)
    return found is not None and found[0].tells == STUCK


def explained(record: Mapping[str, Any]) -> Match | None:
    """What the catalogue knows of a rank's failure.

    Its exception counts, then those that it followed from. Of a rank that left none, the lines may
    be anybody's.
    """
    exception, message = str(record["exception"]), str(record["message"]).split("\n")[0]
    if not exception:
        return None
    if exception == "SystemExit":
        above = [line for line in record["lines"] if "rror" in line]
    else:
        above = [line for line in record["lines"] if line[:1].strip()]
    found = [match(line) for line in (f"{exception}: {message}", *reversed(above))]
    known = [one for one in found if one and one[0].role != NOISE and one[0].tells != EXIT]
    if found[0] in known:
        return found[0]
    return next(iter([one for one in known if one[0].role == PRIMARY] or known), None)


def _of_rank(record: Mapping[str, Any]) -> FirstFailure:
    code = int(record["exit_code"])
    exception, message = str(record["exception"]), str(record["message"]).split("\n")[0]
    if exception == "SystemExit":
        cause = f"the program ended itself: sys.exit({message})"
        kind, hint = "python-error", "the lines before that in its log say why"
    elif exception:
        cause = f"{exception}: {message}" if message else exception
        kind, hint = "python-error", "the traceback names the line in your program"
    else:
        cause, kind, hint = of_code(code)
    words, own_hint = said(record)
    if words:
        cause, kind = words, "python-error"
    known = explained(record) or (match(words) if words else None)
    meaning = ""
    if known is not None:
        kind, (meaning, hint) = known[0].kind, known[0].said(known[1])
    hint = own_hint or hint
    return FirstFailure(
        node=str(record["node"]),
        rank=int(record["rank"]),
        exit_code=code,
        kind=kind,
        cause=cause,
        hint=hint,
        lines=tuple(str(line) for line in record["lines"][-LINES:]),
        meaning=meaning,
        time=float(record["time"]),
        entry=known[0].name if known else "",
    )


def of_code(code: int) -> tuple[str, str, str]:
    """Cause, class and hint of a process that left no word."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number == 0:
        return f"it ended with exit status {code}", "unknown", "its log holds all it wrote"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hints = {
        "SIGTERM": "not its launcher: see whether the program signals itself, or who else sent it",
        "SIGKILL": "usually the machine ran out of memory: use a smaller batch or fewer ranks",
        "SIGBUS": "usually /dev/shm is full, or a file was cut off: look at the room there",
        "SIGABRT": "a library gave up: the last lines of its log say why",
        "SIGSEGV": "a crash in compiled code: set PYTHONFAULTHANDLER=1 and run again to see where",
        "SIGILL": "a wheel uses instructions that this processor has not: exclude the node",
    }
    return f"it was killed by {name}", "killed", hints.get(name, "see who sent the signal")


def _of_launcher(node: str, code: int, tail: Sequence[str]) -> FirstFailure:
    """The launcher itself failed, before or beside its ranks."""
    matched = ((line, match(line)) for line in tail)
    found = [(line, one) for line, one in matched if one and one[0].role == PRIMARY]
    found = [(line, one) for line, one in found if one[0].tells != EXIT]
    last = next((line.strip() for line in reversed(tail) if line.strip()), "")
    line, known = next(iter(found), (last, None))
    meaning, hint = known[0].said(known[1]) if known else ("", "")
    return FirstFailure(
        node=node,
        rank=None,
        exit_code=code,
        kind=known[0].kind if known else "unknown",
        cause=line.strip() or f"the launcher ended with exit status {code}",
        hint=hint or "the node's log holds all that was written",
        lines=tuple(tail[-LINES:]),
        meaning=meaning,
        entry=known[0].name if known else "",
    )


def _of_node(
    node: str,
    problem: Problem,
    record: Mapping[str, Any] | None = None,
    lingering: FirstFailure | None = None,
) -> FirstFailure:
    """The node could not do its part; where ranks had been started, with the one it was."""
    why = f"{problem.what}: {problem.why}" if problem.why else problem.what
    kinds = [kind for kind, pattern in _NODE_SIGNS if pattern.search(why)]
    if lingering is not None and record is None and kinds[:1] == ["hang"]:
        return lingering
    return FirstFailure(
        node=node,
        rank=None if record is None else int(record["rank"]),
        exit_code=None if record is None else int(record["exit_code"]),
        kind=next(iter(kinds), "environment"),
        cause=f"{problem.where}: {why}" if problem.where else why,
        hint=problem.fix,
        lines=() if record is None else tuple(str(line) for line in record["lines"][-LINES:]),
    )
