"""The first failure as logs alone tell it, whoever's launcher wrote them.

The candidates are made here; :mod:`.verdict` has their order, and the reasons for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from bundle.launch.wrapper import keep_own_frame
from bundle.protocol.enumerations import FailureClass

from ..catalogue.catalogue import LineRole, LineTells
from .aftermath import Aftermath, aftermath
from .attempts import of_last_attempts
from .exit_reports import Exit, exits, nodes_of_ranks, root_cause
from .failure import FirstFailure
from .rank_verdict import LINES, of_code
from .scan import EXCEPTION, Hit, Scanned
from .verdict import Candidate, Role, blamed
from .waiting import absent, hang

_OF_LAUNCHER = re.compile(
    r"torch/distributed/(?:run|launcher/api)\.py|accelerate/commands/|deepspeed/launcher/"
)
"""Frames of a launcher's own traceback, which is no rank's."""
_ENDED_BY_KERNEL = (FailureClass.OUT_OF_MEMORY, FailureClass.KILLED)
"""Classes of failures whose own line tells no rank, but that of the launcher does."""
_NEAR_LINES = 40
"""Lines below a library's own line within which the traceback that follows from it ends."""
_SHOWN = 3
"""Lines that are shown of ranks that waited, or of consequences."""
_ENDED_BY_SIGTERM = (-15, 143)
_IN_COLLECTIVE = re.compile(
    r"torch/distributed/(?!_shard/|checkpoint/|fsdp/|pipelining/|tensor/)|c10d|ProcessGroup"
    r"|multiprocessing/connection"
)
_LOST_PEER = re.compile(
    r"(?:[\w.]*\.)?(?:RuntimeError|\w*(?:Backend|Network|Store|Connection\w*|EOF)Error)\b"
)

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
    weak: tuple[Hit, ...] = ()
    """Where nothing shows an end: errors that programs have printed and survived."""


def log_verdict(seen: Scanned, nodes: dict[int, str], restarts: int = 0) -> LogVerdict:
    """Return the first failure that logs show; its class may be unknown.

    Two questions, in this order: does anything show that something ended badly? Then why?
    """
    logs = _Logs(of_last_attempts(seen.hits, seen.heads, restarts), nodes)
    first = blamed(logs.candidates()) if logs.show_an_end() else None
    if first is None:
        return LogVerdict(first=None, weak=logs.weak())
    return LogVerdict(
        first=first.failure(), shown=first.shown, failed=logs.failed_ranks(), missing=first.missing
    )


class _Logs:
    def __init__(self, hits: Sequence[Hit], nodes: dict[int, str]) -> None:
        self._hits = hits
        self._ended = exits(hits)
        self._nodes = nodes_of_ranks(self._ended) | nodes
        self._root = root_cause(self._ended)
        self._explained = _explained_entries(hits)
        self._after: dict[int, Aftermath] = {}
        ends = _in_place(_telling(hits, LineTells.END))
        self._ends = [self._hit(Role.SLURM_END, hit) for hit in ends]

    def show_an_end(self) -> bool:
        """Return whether it ended badly: a status, a signal, Slurm's end, or a last error."""
        return bool(self._ended or self._ends) or any(map(self._is_end, self._hits))

    def _is_end(self, hit: Hit) -> bool:
        return not hit.is_weak and not self._is_survived(hit, shared=False)

    def weak(self) -> tuple[Hit, ...]:
        """Return the first errors that programs have survived."""
        return tuple(_in_place(self._hits)[:_SHOWN])

    def _is_survived(self, hit: Hit, *, shared: bool) -> bool:
        if id(hit) not in self._after:
            self._after[id(hit)] = aftermath(hit)
        return self._after[id(hit)].shows_survival(hit, shared=shared)

    def candidates(self) -> Iterator[Candidate]:
        """Yield all that may have failed first; skip what came after Slurm ended the job."""
        for hit in self._before_the_end(_in_place(self._causes())):
            candidate = self._hit(Role.CAUSE, hit)
            if not candidate.survived:
                yield candidate
            elif self._ended and not hit.is_weak:
                yield replace(candidate, role=Role.SURVIVED)
        for report in self._before_the_end(self._ended):
            if report.by_itself:
                yield _exit(Role.KILLED, report)
        for hit in self._before_the_end(_in_place(_telling(self._hits, LineTells.SYMPTOM))):
            if not self._is_explained(hit):
                yield self._hit(Role.SYMPTOM, hit)
        yield from self._absent()
        yield from self._ends
        for report in self._ended:
            if report.code not in _ENDED_BY_SIGTERM and not report.followed:
                yield _exit(Role.BARE_STATUS, report)
        yield from self._consequences()

    def _causes(self) -> list[Hit]:
        return [hit for hit in _causes(self._hits) if not self._is_explained(hit)]

    def _is_explained(self, hit: Hit) -> bool:
        return hit.entry.name in self._explained.get(hit.log.path, ())

    def failed_ranks(self) -> tuple[int, ...]:
        ranks = {report.rank for report in self._ended}
        for hit in self._hits:
            if hit.trace or hit.entry.tells == LineTells.STUCK:
                ranks.add(hit.rank)
        return tuple(sorted(rank for rank in ranks if rank is not None))

    def _hit(self, role: Role, hit: Hit) -> Candidate:
        """Return a hit; a cause without a rank yields to a rank's hit of its entry and file."""
        silent = role is Role.CAUSE and hit.rank is None and hit.entry is not EXCEPTION
        # Of a log without marks of ranks, other ranks may have written what follows.
        shared = hit.log.rank is None and bool(self._ended)
        return Candidate(
            role=role,
            failure=partial(_of_hit, self._placed(hit), self._ended, self._nodes),
            time=hit.time,
            survived=self._is_survived(hit, shared=shared),
            silent=silent,
            same=(hit.log, hit.entry),
            passed_over=self._root is not None and hit.rank not in (None, self._root.rank),
            shown=(self._placed(hit),),
        )

    def _placed(self, hit: Hit) -> Hit:
        if hit.trace and hit.rank is None and hit.entry.role == LineRole.PRIMARY:
            return self._with_root_cause(hit)
        return self._with_task(hit if _names_writer(hit) else self._with_rank_below(hit))

    def _with_root_cause(self, hit: Hit) -> Hit:
        """Give an unmarked traceback the rank of the root cause in the first table below it."""
        below = [
            report
            for report in self._ended
            if report.log == hit.log and report.number > hit.number and report.raised
        ]
        root = min(below, key=lambda report: (report.followed, report.number), default=None)
        if root is None or any(map(_OF_LAUNCHER.search, hit.trace)):
            return hit
        return replace(hit, rank=root.rank)

    def _with_rank_below(self, hit: Hit) -> Hit:
        """Give a line the rank of the traceback near below it, if there is only one rank."""
        below = (other for other in self._hits if other.log == hit.log and other.trace)
        near = (other for other in below if 0 < other.last - hit.number <= _NEAR_LINES)
        ranks = {other.rank for other in near}
        return replace(hit, rank=ranks.pop()) if len(ranks) == 1 else hit

    def _with_task(self, hit: Hit) -> Hit:
        """Add the rank that a launcher prints below a line about memory or a crash."""
        if hit.entry.kind not in _ENDED_BY_KERNEL or _names_writer(hit):
            return hit
        for other in self._hits:
            same = other.entry.kind == hit.entry.kind and other.log == hit.log
            if same and other.number > hit.number and {"tasks", "rank"} & other.groups.keys():
                groups = {**hit.groups, **other.groups}
                return replace(hit, known=replace(hit.known, groups=groups))
        return hit

    def _before_the_end(self, reports: Sequence[Report]) -> Iterator[Report]:
        end = blamed(self._ends)
        for report in reports:
            if end is None or not _is_after(report, end.shown[0]):
                yield report

    def _absent(self) -> Iterator[Candidate]:
        waiting = tuple(self._before_the_end(_telling(self._hits, LineTells.STUCK)))
        if not waiting:
            return
        missing = absent(waiting, self._nodes)
        yield Candidate(
            role=Role.ABSENT,
            failure=partial(hang, waiting[0], missing, self._nodes),
            shown=waiting[:_SHOWN],
            missing=missing,
        )

    def _consequences(self) -> Iterator[Candidate]:
        shown = tuple(filter(_may_follow, self._hits))[:_SHOWN]
        for hit in shown[:1]:
            failure = partial(_unknown, hit, hit.prefix_node or hit.log.node)
            yield Candidate(role=Role.LOST_PEER, failure=failure, shown=shown)
        for report in self._ended[:1]:
            failure = partial(_unknown, report, report.node)
            yield Candidate(role=Role.ENDED_BY_OTHERS, failure=failure, shown=(report,))


def _exit(role: Role, report: Exit) -> Candidate:
    return Candidate(
        role=role, failure=partial(_of_exit, report), time=report.time, shown=(report,)
    )


def _names_writer(hit: Hit) -> bool:
    return hit.rank is not None or bool(hit.node)


def _explained_entries(hits: Iterable[Hit]) -> dict[Path, set[str]]:
    explained: dict[Path, set[str]] = {}
    for hit in hits:
        explained.setdefault(hit.log.path, set()).update(hit.entry.explains)
    return explained


def _in_place(hits: Sequence[Hit]) -> list[Hit]:
    """Sort hits by file and line: their order decides between hits of the same time."""
    return sorted(hits, key=lambda hit: (str(hit.log.path), hit.number))


def _telling(hits: Sequence[Hit], what: LineTells) -> list[Hit]:
    return [hit for hit in hits if hit.entry.tells == what]


def _is_after(report: Hit | Exit, end: Hit | Exit) -> bool:
    if report.log.path == end.log.path:
        return report.number > end.number
    return report.time is not None and end.time is not None and report.time > end.time


def _causes(hits: Sequence[Hit]) -> list[Hit]:
    """Return the causes; only the last traceback of a rank, which survived the others."""
    last = {_writer(hit): hit.number for hit in hits}
    own = filter(_failed_by_itself, hits)
    return [hit for hit in own if last[_writer(hit)] == hit.number]


def _writer(hit: Hit) -> tuple[Path, int | None, int]:
    """Return a key: one for all tracebacks of a rank in a file, a separate one for other hits."""
    by_rank = hit.trace and hit.rank is not None
    return hit.log.path, hit.rank, 0 if by_rank else hit.number


def _may_follow(hit: Hit) -> bool:
    return hit.entry is EXCEPTION or hit.entry.role == LineRole.CASCADE


def _failed_by_itself(hit: Hit) -> bool:
    if not hit.primary:
        return False
    return hit.entry is not EXCEPTION or not _has_lost_peer(hit)


def _has_lost_peer(hit: Hit) -> bool:
    """Return whether an exception comes from a collective: a peer had left."""
    if not _LOST_PEER.match(hit.text):
        return False
    return any(_IN_COLLECTIVE.search(line) for line in hit.trace[-6:])


def _of_hit(hit: Hit, ended: Sequence[Exit], nodes: Mapping[int, str]) -> FirstFailure:
    rank = _rank_of(hit)
    node = _node_of(hit, rank, nodes)
    meaning, hint = hit.entry.explain({**hit.groups, "node": node})
    failure = FirstFailure(
        node=node,
        rank=rank,
        kind=hit.entry.kind,
        cause=hit.text if hit.trace else meaning,
        hint=hint,
        lines=tuple(keep_own_frame(hit.trace, LINES)) or (hit.text,),
        time=hit.time,
        meaning=meaning,
        entry=hit.entry.name,
    )
    report = _exit_of(rank, ended)
    if report is None:
        return replace(failure, node=node or _only_node(hit, ended))
    return replace(failure, node=node or report.node, exit_code=report.code)


def _node_of(hit: Hit, rank: int | None, nodes: Mapping[int, str]) -> str:
    return hit.node or ("" if rank is None else nodes.get(rank, ""))


def _only_node(hit: Hit, ended: Sequence[Exit]) -> str:
    """Return the one node of all failed processes in an unranked hit's log; else empty."""
    nodes = {report.node for report in ended if report.log == hit.log}
    return nodes.pop() if len(nodes) == 1 and hit.rank is None else ""


def _exit_of(rank: int | None, ended: Sequence[Exit]) -> Exit | None:
    if rank is None:
        return None
    return next((report for report in ended if report.rank == rank), None)


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


def _unknown(shown: Hit | Exit, node: str) -> FirstFailure:
    return FirstFailure(
        node=node,
        rank=None,  # another one's failure made this one end
        kind=FailureClass.UNKNOWN,
        cause=f"these logs show consequences only: {shown.text}",
        hint="the log of the rank, or of the node, that ended first is not among them",
        lines=(shown.text,),
        time=shown.time,
    )
