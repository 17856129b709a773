"""The first failure as logs alone tell it, whoever's launcher wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..catalogue.catalogue import CASCADE, END, STUCK, SYMPTOM
from .driver_verdict import LINES, of_code
from .exit_reports import Exit, exits
from .failure import FirstFailure
from .scan import Hit

_GONE_ON = 500
"""Lines that a file has after a find: its writer survived it."""
_IN_COLLECTIVE = re.compile(r"torch/distributed/|c10d|ProcessGroup|multiprocessing/connection")
_LOST = re.compile(
    r"(?:[\w.]*\.)?(?:RuntimeError|\w*(?:Backend|Network|Store|Connection\w*|EOF)Error)\b"
)
_NEVER = float("inf")
LOG_TELLS = (
    "its log shows what it did last; look for code that only some ranks run, and for different "
    "numbers of batches"
)
"""What to do about a rank that others waited for."""

Found = TypeVar("Found", Hit, Exit)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What logs tell of a failure."""

    first: FirstFailure | None
    """The failure that the others follow from; None where nothing failed."""
    shown: tuple[Hit | Exit, ...] = ()
    """The lines that tell so."""
    failed: tuple[int, ...] = ()
    """All ranks that failed."""
    missing: tuple[int, ...] = ()
    """For a hang: ranks that did not come to what the others waited at."""


def judge(hits: Sequence[Hit], lengths: Mapping[str, int], nodes: Mapping[int, str]) -> Judged:
    """Say what failed first, or that it is unknown.

    The earliest line that tells a cause counts, if its writer did not go on for long. Where there
    is none, a process that a signal ended does; then a symptom, such as ranks that cannot meet;
    then ranks that waited in vain. Each counts only if it came before Slurm ended the job, which is
    next; then a bare exit status. Where there are only consequences, the failure is unknown.

    Args:
        hits: what all logs show.
        lengths: the number of lines of each log, by its path.
        nodes: the node of each rank, as far as it is known.
    """
    ended = exits(hits)
    ranks = {hit.rank for hit in _telling(hits)} | {one.rank for one in ended}
    end = next(iter(_sorted(_tell(hits, END), lengths)), None)
    causes = _before(end, _sorted(_causes(hits, lengths), lengths))
    alone = _before(end, [one for one in ended if one.by_itself])
    symptoms = _before(end, _sorted(_tell(hits, SYMPTOM), lengths))
    waiting = _before(end, _tell(hits, STUCK))
    own = [one for one in ended if one.code not in (-15, 143) and not one.followed]
    rest = [hit for hit in hits if hit.entry is None or hit.entry.role == CASCADE]
    shown: Sequence[Hit | Exit]
    missing: tuple[int, ...] = ()
    if causes:
        cause = _with_rank(causes)
        first, shown = _of_hit(cause, ended, nodes), [cause]
    elif alone:
        first, shown = _of_exit(alone[0]), alone[:1]
    elif symptoms:
        first, shown = _of_hit(symptoms[0], ended, nodes), symptoms[:1]
    elif waiting:
        missing = absent(waiting, nodes)
        first, shown = hang(waiting[0], missing, nodes), waiting[:3]
    elif end is not None:
        first, shown = _of_hit(end, ended, nodes), [end]
    elif own:
        first, shown = _of_exit(own[0]), own[:1]
    elif rest or ended:
        shown = rest[:3] or ended[:1]
        first = _unknown(shown[0])
    else:
        return Judged(first=None)
    failed = tuple(sorted(rank for rank in ranks if rank is not None))
    return Judged(first=first, shown=tuple(shown), failed=failed, missing=missing)


def _tell(hits: Sequence[Hit], what: str) -> list[Hit]:
    return [hit for hit in hits if hit.entry is not None and hit.entry.tells == what]


def _sorted(hits: Sequence[Hit], lengths: Mapping[str, int]) -> list[Hit]:
    """Those whose writer did not go on first, and by time."""
    return sorted(hits, key=lambda hit: _order(hit, lengths))


def _with_rank(causes: Sequence[Hit]) -> Hit:
    """The first one; where the same is said again in that file by a rank, what the rank said."""
    first = causes[0]
    if first.rank is not None or first.entry is None:
        return first
    same = (one for one in causes if one.entry == first.entry and one.log == first.log)
    return next((one for one in same if one.rank is not None), first)


def _before(end: Hit | None, found: Sequence[Found]) -> list[Found]:
    """What happened before Slurm ended the job, as far as that is told."""
    if end is None:
        return list(found)
    return [one for one in found if not _after(one, end)]


def _after(one: Hit | Exit, end: Hit) -> bool:
    if one.log.path == end.log.path:
        return one.number > end.number
    return one.time is not None and end.time is not None and one.time > end.time


def absent(waiting: Sequence[Hit], nodes: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks that others waited for: those they name, else those that have said nothing."""
    named = {
        int(number) for hit in waiting for number in re.findall(r"\d+", hit.groups.get("ranks", ""))
    }
    if named:
        return tuple(sorted(named))
    behind = _behind(waiting)
    if behind:
        return behind
    waited = {hit.rank for hit in waiting}
    return tuple(sorted(set(nodes) - waited)) if waited - {None} else ()


def hang(waited: Hit, missing: Sequence[int], nodes: Mapping[int, str]) -> FirstFailure:
    """The failure of a rank that others waited for."""
    rank = missing[0] if len(missing) == 1 else None
    who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
    entry = waited.entry
    return FirstFailure(
        node=nodes.get(missing[0], "") if missing else "",
        rank=rank,
        exit_code=None,
        kind="hang",
        cause=f"{who} did not come to a collective that the others waited at",
        hint=LOG_TELLS,
        lines=(*waited.trace[-LINES:],) or (waited.text,),
        time=waited.time,
        meaning=entry.said(waited.groups)[0] if entry else "",
        entry=entry.name if entry else "",
    )


def _behind(waiting: Sequence[Hit]) -> tuple[int, ...]:
    """Of ranks whose watchdogs name the collective they wait at: those of an earlier one.

    Collectives are counted for each group of ranks. A rank that tells of several numbers has
    several groups, and where groups are not named nothing can be said of them.
    """
    least: dict[str, dict[int, int]] = {}
    several: set[str] = set()
    for hit in waiting:
        rank = hit.rank if hit.rank is not None else int(hit.groups.get("at") or -1)
        if not hit.groups.get("seq") or rank < 0:
            continue
        group, number = hit.groups.get("group", ""), int(hit.groups["seq"])
        known = least.setdefault(group, {}).setdefault(rank, number)
        if known != number and not group:
            several.add(group)
    for group, numbers in least.items():
        if group not in several and len(set(numbers.values())) > 1:
            lowest = min(numbers.values())
            return tuple(sorted(rank for rank, at in numbers.items() if at == lowest))
    return ()


def _telling(hits: Sequence[Hit]) -> list[Hit]:
    return [hit for hit in hits if hit.trace or (hit.entry and hit.entry.tells == STUCK)]


def _causes(hits: Sequence[Hit], lengths: Mapping[str, int]) -> list[Hit]:
    """Finds that tell a cause; of one rank's tracebacks the last, as it survived the others."""
    last = {
        (hit.log.path, hit.rank): hit.number for hit in hits if hit.trace and hit.rank is not None
    }
    found = []
    for hit in hits:
        if not hit.primary or (hit.entry is None and _lost(hit)):
            continue
        if hit.trace and hit.rank is not None and last[hit.log.path, hit.rank] != hit.number:
            continue
        found.append(hit)
    return found


def _lost(hit: Hit) -> bool:
    """Whether an exception that nobody knows came out of a collective: a peer had gone."""
    frames = hit.trace[-6:]
    return bool(_LOST.match(hit.text)) and any(_IN_COLLECTIVE.search(line) for line in frames)


def _order(hit: Hit, lengths: Mapping[str, int]) -> tuple[bool, float, str, int]:
    gone_on = lengths.get(str(hit.log.path), 0) - hit.number > _GONE_ON
    return gone_on, _NEVER if hit.time is None else hit.time, str(hit.log.path), hit.number


def _of_hit(hit: Hit, ended: Sequence[Exit], nodes: Mapping[int, str]) -> FirstFailure:
    node = hit.groups.get("node") or hit.log.node
    rank = hit.rank
    if rank is None and hit.groups.get("rank", "").isdigit():
        rank = int(hit.groups["rank"])
    if not node and rank is not None:
        node = nodes.get(rank, "")
    codes = [one for one in ended if rank is not None and one.rank == rank]
    kind, meaning, hint, cause = "python-error", "", "the traceback names the line", hit.text
    if hit.entry is not None:
        kind, (meaning, hint) = hit.entry.kind, hit.entry.said({**hit.groups, "node": node})
        cause = hit.text if hit.trace else meaning
    return FirstFailure(
        node=node or (codes[0].node if codes else ""),
        rank=rank,
        exit_code=codes[0].code if codes else None,
        kind=kind,
        cause=cause,
        hint=hint,
        lines=hit.trace[-LINES:] or (hit.text,),
        time=hit.time,
        meaning=meaning,
        entry=hit.entry.name if hit.entry else "",
    )


def _of_exit(one: Exit) -> FirstFailure:
    cause, kind, hint = of_code(one.code)
    return FirstFailure(
        node=one.node,
        rank=one.rank,
        exit_code=one.code,
        kind=kind,
        cause=cause,
        hint=hint,
        lines=(one.text,),
        time=one.time,
    )


def _unknown(shown: Hit | Exit) -> FirstFailure:
    node = shown.log.node if isinstance(shown, Hit) else shown.node
    return FirstFailure(
        node=node,
        rank=shown.rank,
        exit_code=None,
        kind="unknown",
        cause=f"these logs show consequences only: {shown.text}",
        hint="the log of the rank, or of the node, that ended first is not among them",
        lines=(shown.text,),
        time=shown.time,
    )
