"""The first failure as logs alone tell it, whoever's launcher wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..catalogue.catalogue import CASCADE, END, STUCK, SYMPTOM
from .exit_reports import Exit, exits
from .failure import FirstFailure
from .rank_verdict import LINES, of_code
from .scan import Hit

_SURVIVED_LINES = 500
"""Lines that a file has after a hit from which its writer survived it."""
_IN_COLLECTIVE = re.compile(r"torch/distributed/|c10d|ProcessGroup|multiprocessing/connection")
_LOST_PEER = re.compile(
    r"(?:[\w.]*\.)?(?:RuntimeError|\w*(?:Backend|Network|Store|Connection\w*|EOF)Error)\b"
)
_NEVER = float("inf")
LOG_TELLS = (
    "its log shows what it did last; look for code that only some ranks run, and for different "
    "numbers of batches"
)
"""The hint for a rank that others waited for."""

Report = TypeVar("Report", Hit, Exit)


@dataclass(frozen=True, kw_only=True)
class LogVerdict:
    """The failure that logs show."""

    first: FirstFailure | None
    """The failure that the others follow from; None where nothing failed."""
    shown: tuple[Hit | Exit, ...] = ()
    """The lines that show it."""
    failed: tuple[int, ...] = ()
    """All ranks that failed."""
    missing: tuple[int, ...] = ()
    """For a hang: ranks that did not reach the collective that the others waited in."""


def log_verdict(
    hits: Sequence[Hit], lengths: Mapping[str, int], nodes: Mapping[int, str]
) -> LogVerdict:
    """Return the first failure that logs show; its class may be unknown.

    The earliest line that tells a cause counts, if its writer did not go on for long. Where there
    is none, a process that a signal ended does; then a symptom, such as ranks that cannot meet;
    then ranks that waited in vain. Each counts only if it came before Slurm ended the job, which is
    next; then a bare exit status. Where there are only consequences, the failure is unknown.

    Args:
        hits: the hits of all logs.
        lengths: the number of lines of each log, by its path.
        nodes: the node of each rank, as far as it is known.
    """
    ended = exits(hits)
    case = _Case(hits=hits, lengths=lengths, nodes=nodes, ended=ended)
    verdict = (
        case.cause()
        or case.killed()
        or case.symptom()
        or case.hang()
        or case.end_by_slurm()
        or case.exit_status()
        or case.unknown()
    )
    return verdict or LogVerdict(first=None)


class _Case:
    """The hits of all logs, and a verdict for each kind of failure that they may show."""

    def __init__(
        self,
        *,
        hits: Sequence[Hit],
        lengths: Mapping[str, int],
        nodes: Mapping[int, str],
        ended: Sequence[Exit],
    ) -> None:
        self._hits, self._lengths = hits, lengths
        self._nodes, self._ended = nodes, ended
        ends = self._in_order(_telling(hits, END))
        self._end = ends[0] if ends else None

    def cause(self) -> LogVerdict | None:
        causes = _before(self._end, self._in_order(_causes(self._hits)))
        if not causes:
            return None
        return self._of_hit(_with_rank(causes))

    def killed(self) -> LogVerdict | None:
        killed = _before(self._end, [report for report in self._ended if report.by_itself])
        return self._of_exit(killed[0]) if killed else None

    def symptom(self) -> LogVerdict | None:
        symptoms = _before(self._end, self._in_order(_telling(self._hits, SYMPTOM)))
        return self._of_hit(symptoms[0]) if symptoms else None

    def hang(self) -> LogVerdict | None:
        waiting = _before(self._end, _telling(self._hits, STUCK))
        if not waiting:
            return None
        missing = absent(waiting, self._nodes)
        first = hang(waiting[0], missing, self._nodes)
        return self._verdict(first, waiting[:3], missing)

    def end_by_slurm(self) -> LogVerdict | None:
        return None if self._end is None else self._of_hit(self._end)

    def exit_status(self) -> LogVerdict | None:
        for report in self._ended:
            if report.code not in (-15, 143) and not report.followed:
                return self._of_exit(report)
        return None

    def unknown(self) -> LogVerdict | None:
        consequences = [hit for hit in self._hits if hit.entry is None or hit.entry.role == CASCADE]
        shown = consequences[:3] or self._ended[:1]
        return self._verdict(_unknown(shown[0]), shown) if shown else None

    def _of_hit(self, hit: Hit) -> LogVerdict:
        return self._verdict(_of_hit(hit, self._ended, self._nodes), [hit])

    def _of_exit(self, report: Exit) -> LogVerdict:
        return self._verdict(_of_exit(report), [report])

    def _verdict(
        self, first: FirstFailure, shown: Sequence[Hit | Exit], missing: tuple[int, ...] = ()
    ) -> LogVerdict:
        return LogVerdict(
            first=first, shown=tuple(shown), failed=self._failed_ranks(), missing=missing
        )

    def _failed_ranks(self) -> tuple[int, ...]:
        ranks = {report.rank for report in self._ended}
        for hit in self._hits:
            if hit.trace or (hit.entry is not None and hit.entry.tells == STUCK):
                ranks.add(hit.rank)
        return tuple(sorted(rank for rank in ranks if rank is not None))

    def _in_order(self, hits: Sequence[Hit]) -> list[Hit]:
        """Return the hits that their writer did not survive for long first, and by time."""
        return sorted(hits, key=self._order)

    def _order(self, hit: Hit) -> tuple[bool, float, str, int]:
        path = str(hit.log.path)
        survived = self._lengths.get(path, 0) - hit.number > _SURVIVED_LINES
        return survived, _NEVER if hit.time is None else hit.time, path, hit.number


def _telling(hits: Sequence[Hit], what: str) -> list[Hit]:
    """Return the hits of entries that tell this, see :attr:`Entry.tells`."""
    return [hit for hit in hits if hit.entry is not None and hit.entry.tells == what]


def _with_rank(causes: Sequence[Hit]) -> Hit:
    """Return the first hit, or a rank's hit of the same entry in its file if it has no rank."""
    first = causes[0]
    if first.rank is not None or first.entry is None:
        return first
    for hit in causes:
        if hit.rank is not None and hit.entry == first.entry and hit.log == first.log:
            return hit
    return first


def _before(end: Hit | None, reports: Sequence[Report]) -> list[Report]:
    """Return the reports from before Slurm ended the job, as far as that is known."""
    if end is None:
        return list(reports)
    return [report for report in reports if not _is_after(report, end)]


def _is_after(report: Hit | Exit, end: Hit) -> bool:
    if report.log.path == end.log.path:
        return report.number > end.number
    return report.time is not None and end.time is not None and report.time > end.time


def absent(waiting: Sequence[Hit], nodes: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that others waited for: those they name, else those without a hit."""
    named: set[int] = set()
    for hit in waiting:
        named.update(map(int, re.findall(r"\d+", hit.groups.get("ranks", ""))))
    if named:
        return tuple(sorted(named))
    behind = _behind(waiting)
    if behind:
        return behind
    waited = {hit.rank for hit in waiting if hit.rank is not None}
    return tuple(sorted(set(nodes) - waited)) if waited else ()


def hang(waited: Hit, missing: Sequence[int], nodes: Mapping[int, str]) -> FirstFailure:
    """Return the failure of the ranks that others waited for."""
    ranks = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
    meaning, name = "", ""
    if waited.entry is not None:
        meaning, _ = waited.entry.explain(waited.groups)
        name = waited.entry.name
    return FirstFailure(
        node=nodes.get(missing[0], "") if missing else "",
        rank=missing[0] if len(missing) == 1 else None,
        exit_code=None,
        kind="hang",
        cause=f"{ranks} did not come to a collective that the others waited at",
        hint=LOG_TELLS,
        lines=waited.trace[-LINES:] or (waited.text,),
        time=waited.time,
        meaning=meaning,
        entry=name,
    )


def _behind(waiting: Sequence[Hit]) -> tuple[int, ...]:
    """Return the ranks whose watchdogs name an earlier collective than those of other ranks.

    Collectives are counted for each group of ranks. A rank with several numbers has several groups,
    and where groups are not named nothing can be said of them.
    """
    for numbers in _collectives(waiting).values():
        lowest = min(numbers.values())
        if lowest < max(numbers.values()):
            return tuple(sorted(rank for rank, number in numbers.items() if number == lowest))
    return ()


def _collectives(waiting: Sequence[Hit]) -> dict[str, dict[int, int]]:
    """Return the number of the collective that each rank waits in, by group of ranks."""
    by_group: dict[str, dict[int, int]] = {}
    ambiguous = False
    for hit in waiting:
        rank = hit.rank if hit.rank is not None else int(hit.groups.get("at") or -1)
        if not hit.groups.get("seq") or rank < 0:
            continue
        group, number = hit.groups.get("group", ""), int(hit.groups["seq"])
        known = by_group.setdefault(group, {}).setdefault(rank, number)
        if known != number and not group:
            ambiguous = True
    if ambiguous:
        del by_group[""]
    return by_group


def _causes(hits: Sequence[Hit]) -> list[Hit]:
    """Return the hits that tell a cause; of one rank's tracebacks the last: it survived others."""
    last = {}
    for hit in hits:
        if hit.trace and hit.rank is not None:
            last[hit.log.path, hit.rank] = hit.number
    causes = []
    for hit in hits:
        if not hit.primary or (hit.entry is None and _has_lost_peer(hit)):
            continue
        survived = hit.trace and hit.rank is not None and last[hit.log.path, hit.rank] != hit.number
        if not survived:
            causes.append(hit)
    return causes


def _has_lost_peer(hit: Hit) -> bool:
    """Return whether an unknown exception came out of a collective: a peer had gone."""
    if not _LOST_PEER.match(hit.text):
        return False
    return any(_IN_COLLECTIVE.search(line) for line in hit.trace[-6:])


def _of_hit(hit: Hit, ended: Sequence[Exit], nodes: Mapping[int, str]) -> FirstFailure:
    """Return the failure that a hit tells, with the exit status of its rank if that is known."""
    rank = _rank_of(hit)
    node = hit.groups.get("node") or hit.log.node
    if not node and rank is not None:
        node = nodes.get(rank, "")
    kind, meaning, hint, name = "python-error", "", "the traceback names the line", ""
    if hit.entry is not None:
        kind, name = hit.entry.kind, hit.entry.name
        meaning, hint = hit.entry.explain({**hit.groups, "node": node})
    report = _exit_of(rank, ended)
    return FirstFailure(
        node=node or (report.node if report else ""),
        rank=rank,
        exit_code=report.code if report else None,
        kind=kind,
        cause=hit.text if hit.trace or hit.entry is None else meaning,
        hint=hint,
        lines=hit.trace[-LINES:] or (hit.text,),
        time=hit.time,
        meaning=meaning,
        entry=name,
    )


def _exit_of(rank: int | None, ended: Sequence[Exit]) -> Exit | None:
    for report in ended:
        if rank is not None and report.rank == rank:
            return report
    return None


def _rank_of(hit: Hit) -> int | None:
    if hit.rank is not None:
        return hit.rank
    named = hit.groups.get("rank", "")
    return int(named) if named.isdigit() else None


def _of_exit(report: Exit) -> FirstFailure:
    cause = of_code(report.code)
    return FirstFailure(
        node=report.node,
        rank=report.rank,
        exit_code=report.code,
        kind=cause.kind,
        cause=cause.text,
        hint=cause.hint,
        lines=(report.text,),
        time=report.time,
    )


def _unknown(shown: Hit | Exit) -> FirstFailure:
    return FirstFailure(
        node=shown.log.node if isinstance(shown, Hit) else shown.node,
        rank=shown.rank,
        exit_code=None,
        kind="unknown",
        cause=f"these logs show consequences only: {shown.text}",
        hint="the log of the rank, or of the node, that ended first is not among them",
        lines=(shown.text,),
        time=shown.time,
    )
