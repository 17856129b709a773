"""The first failure by logs alone."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from bundle.launch.wrapper import keep_own_frame
from bundle.protocol.enumerations import FailureClass
from bundle.regex import compile_lazily

from ..catalogue.catalogue import LineRole, LineTells, match_line
from ..logs.lines import read_last_lines
from ..logs.prefixes import ParsedLine, parse_line, show_line
from .failure import FirstFailure, format_ranks
from .hits import (
    EXCEPTION,
    LAUNCHER_FRAME,
    Hit,
    is_of_an_end,
    says_ended_well,
    says_recovered,
    says_restarted,
)
from .process_exits import (
    ENDED_BY_OTHERS,
    LINES,
    Exit,
    describe_exit_code,
    find_signal,
    list_exits,
)
from .verdict import Candidate, Role, pick_first_failure

# Programs print errors that they survive: a download that is tried again, a batch that is skipped,
# an optional import. Only what follows such a line tells it from the one that ended the process.

_BYTES = 1 << 16
_ENOUGH = 200  # ordinary lines after which nothing more is counted
_NEAR = 3  # ordinary lines below a hit that may tell what its program did about it
_LAST_OUTPUT = 5  # lines at the end of a standard output that may say how it ended
_STREAMS = (
    (compile_lazily(r"\.e(?=\d*$)"), ".o"),
    (compile_lazily(r"\.err$"), ".out"),
    (compile_lazily(r"\bstderr\b"), "stdout"),
)
"""The names of a file of standard errors, and of the standard output beside it."""
_RULE = compile_lazily(r"-{60,}")
"""The line above and below each of Open MPI's messages, which have many lines."""
_FIRST = 20  # lines below an end in which another attempt says that it begins
_CHARACTERS = 500
# Ordinary lines from which on the writer of a traceback, or of a line, has survived it; the last
# counts where several processes may have written them.
_OF_TRACE, _OF_LINE, _OF_OTHERS = 10, 5, 100


class Aftermath(NamedTuple):
    """What the writer of a hit printed after it."""

    ordinary: int  # lines that are not about an end; no more than a few hundred are counted
    recovered: bool
    restarted: bool
    ended_well: bool

    def shows_survival(self, hit: Hit, *, shared: bool) -> bool:
        """Return whether the writer survived the hit; ``shared``: others may have written here."""
        if hit.trace and "rank_torch" in dict(hit.marks):  # torch marks what nothing has caught
            return False
        enough = _OF_TRACE if hit.trace else _OF_LINE
        if shared and not hit.marks:
            enough = _OF_OTHERS
        if self.ordinary >= enough or self.recovered or _has_trained(hit.log.path):
            return True
        return self.ended_well and self.ordinary >= _NEAR


def read_aftermath(hit: Hit, until: int | None = None) -> Aftermath:
    """Return what the writer of a hit printed after it, before line ``until`` (None: the end)."""
    first: list[str] = []
    ordinary: list[str] = []
    last: collections.deque[str] = collections.deque(maxlen=_NEAR)
    for text in _list_own_lines(hit, until):
        last.append(text)
        if match_line(text) is not None:
            continue
        first += [text] * (len(first) < _FIRST)
        if not is_of_an_end(text):
            ordinary.append(text)
        if len(ordinary) >= _ENOUGH:
            break
    return Aftermath(
        ordinary=len(ordinary),
        recovered=any(map(says_recovered, ordinary[:_NEAR])),
        restarted=any(map(says_restarted, first)),
        ended_well=any(map(says_ended_well, last)),
    )


def _list_own_lines(hit: Hit, until: int | None) -> Iterator[str]:
    raws: Sequence[bytes] = ()
    with suppress(OSError), hit.log.path.open("rb") as handle:
        handle.seek(hit.below)
        raws = handle.read(_BYTES).split(b"\n")
    is_boxed = hit.entry.source.startswith("Open MPI") and not hit.trace
    for raw in raws if until is None else raws[: max(until - hit.last - 1, 0)]:
        line = parse_line(show_line(raw, _CHARACTERS))
        if not line.logged.strip() or (hit.marks and not _is_same_process(hit, line)):
            continue
        is_rule = _RULE.fullmatch(line.logged) is not None
        is_boxed ^= is_rule
        if not is_boxed and not is_rule:
            yield line.logged


def _has_trained(errors: Path) -> bool:
    for of_errors, of_output in _STREAMS:
        name = of_errors.sub(of_output, errors.name)
        if name != errors.name:
            last = read_last_lines(errors.with_name(name), _LAST_OUTPUT)
            return any(says_ended_well(line, training=True) for line in last)
    return False


def _is_same_process(hit: Hit, line: ParsedLine) -> bool:
    mine, other = dict(hit.marks), dict(line.marks)
    common = mine.keys() & other.keys()
    return bool(common) and all(mine[name] == other[name] for name in common)


# --- Several attempts in one log: a job that was requeued, ranks that were started again ---------

# The last one begins below the last line that tells the end of an earlier one.

_ENDS = ("child-failed", "cancelled", "requeued", "task-failure", "step-ended", "task-terminated")
"""Entries that tell the end of an attempt, besides exit statuses and Slurm's end of a job."""
_REQUEUED = ("requeued", "preempted", "node-failure", "node-lost")
"""Entries that tell an end after which Slurm may start the job again."""
_ORDINARY = 20  # ordinary lines below such an end that only another attempt can have written
_AFTER_REPORT = 5  # the same below torchrun's report of a failed rank


def select_last_attempts(
    hits: Sequence[Hit], heads: Mapping[Path, Sequence[int]], restarts: int
) -> list[Hit]:
    """Return the hits of each log's last attempt."""
    kept: list[Hit] = []
    for path, group in groupby(hits, key=lambda hit: hit.log.path):
        of_log = sorted(group, key=lambda hit: hit.number)
        start = _find_last_start(of_log, heads.get(path, ()), restarts)
        kept += [hit for hit in of_log if hit.number > start]
    return kept


def _find_last_start(hits: Sequence[Hit], heads: Sequence[int], restarts: int) -> int:
    endings = (LineTells.EXIT, LineTells.END)
    ends = [hit for hit in hits if hit.entry.tells in endings or hit.entry.name in _ENDS]
    start = _find_last_restart(hits, restarts)
    untils = [*(hit.number for hit in ends[1:]), None]
    for end, until in zip(ends, untils, strict=False):
        has_room = until is None or until - end.last > 1
        if has_room and _is_followed_by_another(end, until, heads):
            start = max(start, end.last)
    return start


def _find_last_restart(hits: Sequence[Hit], restarts: int) -> int:
    """Return torchrun's last restart: one report for each attempt, a table only after the last."""
    reports = [hit.number for hit in hits if hit.entry.name == "torchrun-report"]
    tables = sum(hit.entry.name == "child-failed" and bool(hit.trace) for hit in hits)
    if not tables and 0 < len(reports) <= restarts:
        return reports[-1]
    return reports[-2] if tables == 1 and len(reports) > 1 else 0


def _is_followed_by_another(end: Hit, until: int | None, heads: Sequence[int]) -> bool:
    if any(end.last < head and (until is None or head < until) for head in heads):
        return True
    after = read_aftermath(end, until)
    if after.restarted:
        return True
    if end.entry.name in _REQUEUED:
        return after.ordinary >= _ORDINARY
    return end.entry.name == "torchrun-report" and after.ordinary >= _AFTER_REPORT


# --- Ranks that waited for others in vain, and the ranks that did not come -----------------------

LOG_TELLS = (
    "its log shows what it did last; look for code that only some ranks run, and for different "
    "numbers of batches"
)


def find_absent_ranks(waiting: Sequence[Hit], nodes: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that others waited for: those they name, else those without a hit."""
    texts = (hit.groups.get("ranks", "") for hit in waiting)
    named = {int(rank) for text in texts for rank in re.findall(r"\d+", text)}
    if named:
        return tuple(sorted(named))
    # Ranks that report no wait, unless no waiting rank is known.
    waited = {hit.rank for hit in waiting if hit.rank is not None}
    silent = tuple(sorted(nodes.keys() - waited)) if waited else ()
    return _find_late_ranks(waiting) or silent


def describe_hang(waited: Hit, missing: Sequence[int], nodes: Mapping[int, str]) -> FirstFailure:
    """Return the failure of the ranks that others waited for."""
    ranks = format_ranks(missing) or "some rank"
    meaning, _ = waited.entry.explain(waited.groups)
    return FirstFailure(
        node=nodes.get(missing[0], "") if missing else "",
        rank=missing[0] if len(missing) == 1 else None,
        kind=FailureClass.HANG,
        cause=f"{ranks} did not reach a collective that the other ranks were waiting in",
        hint=LOG_TELLS,
        lines=waited.trace[-LINES:] or (waited.text,),
        time=waited.time,
        meaning=meaning,
        entry=waited.entry.name,
    )


def _find_late_ranks(waiting: Sequence[Hit]) -> tuple[int, ...]:
    for numbers in _group_collectives(waiting).values():
        lowest = min(numbers.values())
        if lowest < max(numbers.values()):
            return tuple(sorted(rank for rank, number in numbers.items() if number == lowest))
    return ()


def _group_collectives(waiting: Sequence[Hit]) -> dict[str, dict[int, int]]:
    by_group: dict[str, dict[int, int]] = {}
    is_ambiguous = False  # a rank with several numbers has several groups, which are not named
    for hit in waiting:
        at, number = hit.groups.get("at"), hit.groups.get("seq")
        rank = int(at) if hit.rank is None and at else hit.rank
        if rank is not None and number:
            group = hit.groups.get("group", "")
            known = by_group.setdefault(group, {}).setdefault(rank, int(number))
            is_ambiguous |= not group and known != int(number)
    if is_ambiguous:
        del by_group[""]
    return by_group


# --- The first failure as logs alone tell it, whoever's launcher wrote them ----------------------

# The candidates are made here; :mod:`.verdict` has their order, and the reasons for it.

_OF_LAUNCHER = compile_lazily(rf"{LAUNCHER_FRAME.pattern}|accelerate/commands/|deepspeed/launcher/")
"""Frames of a launcher's own traceback, which is no rank's."""
_ENDED_BY_KERNEL = (FailureClass.OUT_OF_MEMORY, FailureClass.KILLED)
"""Classes of failures whose own line tells no rank, but that of the launcher does."""
_NEAR_LINES = 40  # below a library's own line, in which the traceback that follows from it ends
_SHOWN = 3  # lines that are shown of ranks that waited, or of consequences
_ENDED_BY_SIGTERM = (-15, 143)
_IN_COLLECTIVE = compile_lazily(
    r"torch/distributed/(?!_shard/|checkpoint/|fsdp/|pipelining/|tensor/)|c10d|ProcessGroup"
    r"|multiprocessing/connection"
)
_LOST_PEER = compile_lazily(
    r"(?:[\w.]*\.)?(?:RuntimeError|\w*(?:Backend|Network|Store|Connection\w*|EOF)Error)\b"
)


class LogVerdict(NamedTuple):
    """The failure that logs show."""

    first: FirstFailure | None
    shown: tuple[Hit | Exit, ...] = ()
    failed: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    """For a hang: ranks that did not reach the collective that the others waited in."""
    weak: tuple[Hit, ...] = ()
    """Where nothing shows an end: errors that programs have printed and survived."""


def judge_logs(hits: Sequence[Hit], nodes: dict[int, str]) -> LogVerdict:
    """Return the first failure that logs show: did something end badly, and then, why?"""
    logs = _Logs(hits, nodes)
    first = pick_first_failure(logs.list_candidates()) if logs.has_bad_end() else None
    if first is None:
        return LogVerdict(first=None, weak=tuple(_sort_by_place(hits)[:_SHOWN]))
    return LogVerdict(
        first=first.failure(),
        shown=first.shown,
        failed=logs.list_failed_ranks(),
        missing=first.missing,
    )


class _Logs:
    def __init__(self, hits: Sequence[Hit], nodes: dict[int, str]) -> None:
        self._hits = hits
        self._ended = list_exits(hits)
        self._nodes = {end.rank: end.node for end in self._ended if end.rank is not None} | nodes
        # The first failed rank, if it raised.
        root = next((end for end in self._ended if not end.followed), None)
        self._root = root if root is not None and root.has_raised else None
        self._explained: dict[Path, set[str]] = {}
        for hit in hits:
            self._explained.setdefault(hit.log.path, set()).update(hit.entry.explains)
        self._after: dict[int, Aftermath] = {}
        ends = self._list(LineTells.END)
        self._ends = [self._make_candidate(Role.SLURM_END, hit) for hit in ends]
        self._end = pick_first_failure(self._ends)

    def has_bad_end(self) -> bool:
        """Return whether it ended badly: a status, a signal, Slurm's end, or a last error."""
        return bool(self._ended or self._ends) or any(
            not hit.is_weak and not self._is_survived(hit, shared=False) for hit in self._hits
        )

    def _list(self, tells: LineTells) -> list[Hit]:
        return _sort_by_place([hit for hit in self._hits if hit.entry.tells == tells])

    def _is_survived(self, hit: Hit, *, shared: bool) -> bool:
        if id(hit) not in self._after:
            self._after[id(hit)] = read_aftermath(hit)
        return self._after[id(hit)].shows_survival(hit, shared=shared)

    def list_candidates(self) -> Iterator[Candidate]:
        """Yield all that may have failed first; skip what came after Slurm ended the job."""
        yield from self._list_causes()
        for report in filter(self._is_before_end, self._ended):
            # By a signal that no other process can have sent.
            by_others = report.followed or report.code in ENDED_BY_OTHERS
            if not by_others and find_signal(report.code):
                yield _make_exit_candidate(Role.KILLED, report)
        for hit in filter(self._is_before_end, self._list(LineTells.SYMPTOM)):
            if not self._is_explained(hit):
                yield self._make_candidate(Role.SYMPTOM, hit)
        yield from self._list_absent()
        yield from self._ends
        for report in self._ended:
            if report.code not in _ENDED_BY_SIGTERM and not report.followed:
                yield _make_exit_candidate(Role.BARE_STATUS, report)
        yield from self._list_consequences()

    def _list_causes(self) -> Iterator[Candidate]:
        """Yield the causes; only the last traceback of a rank, which survived the others."""
        last = {_find_writer(hit): hit.number for hit in self._hits}
        for hit in _sort_by_place(self._hits):
            is_cause = _is_own_failure(hit) and last[_find_writer(hit)] == hit.number
            if not is_cause or not self._is_before_end(hit) or self._is_explained(hit):
                continue
            candidate = self._make_candidate(Role.CAUSE, hit)
            if not candidate.survived:
                yield candidate
            elif self._ended and not hit.is_weak:
                yield replace(candidate, role=Role.SURVIVED)

    def _is_explained(self, hit: Hit) -> bool:
        return hit.entry.name in self._explained[hit.log.path]

    def _is_before_end(self, report: Hit | Exit) -> bool:
        if self._end is None:
            return True
        end = self._end.shown[0]
        if report.log.path == end.log.path:
            return report.number <= end.number
        return report.time is None or end.time is None or report.time <= end.time

    def list_failed_ranks(self) -> tuple[int, ...]:
        failed = (hit for hit in self._hits if hit.trace or hit.entry.tells == LineTells.STUCK)
        ranks = {end.rank for end in self._ended} | {hit.rank for hit in failed}
        return tuple(sorted(rank for rank in ranks if rank is not None))

    def _make_candidate(self, role: Role, hit: Hit) -> Candidate:
        """Return a hit; a cause without a rank yields to a rank's hit of its entry and file."""
        # Of a log without marks of ranks, other ranks may have written what follows.
        shared = hit.log.rank is None and bool(self._ended)
        if hit.trace and hit.rank is None and hit.entry.role == LineRole.PRIMARY:
            placed = self._add_root_cause(hit)
        else:
            placed = self._add_task(hit if _has_writer(hit) else self._add_near_rank(hit))
        return Candidate(
            role=role,
            failure=partial(_convert_hit, placed, self._ended, self._nodes),
            time=hit.time,
            survived=self._is_survived(hit, shared=shared),
            silent=role is Role.CAUSE and hit.rank is None and hit.entry is not EXCEPTION,
            same=(hit.log, hit.entry),
            passed_over=self._root is not None and hit.rank not in (None, self._root.rank),
            shown=(placed,),
        )

    def _add_root_cause(self, hit: Hit) -> Hit:
        of_log = [report for report in self._ended if report.log == hit.log and report.has_raised]
        below = [report for report in of_log if report.number > hit.number]
        if not below or any(map(_OF_LAUNCHER.search, hit.trace)):
            return hit
        root = min(below, key=lambda report: (report.followed, report.number))
        return replace(hit, rank=root.rank)

    def _add_near_rank(self, hit: Hit) -> Hit:
        below = (other for other in self._hits if other.log == hit.log and other.trace)
        ranks = {other.rank for other in below if 0 < other.last - hit.number <= _NEAR_LINES}
        return replace(hit, rank=ranks.pop()) if len(ranks) == 1 else hit

    def _add_task(self, hit: Hit) -> Hit:
        if hit.entry.kind not in _ENDED_BY_KERNEL or _has_writer(hit):
            return hit
        for other in self._hits:
            is_below = other.log == hit.log and other.number > hit.number
            has_rank = not other.groups.keys().isdisjoint(("tasks", "rank"))
            if is_below and has_rank and other.entry.kind == hit.entry.kind:
                return replace(hit, groups={**hit.groups, **other.groups})
        return hit

    def _list_absent(self) -> Iterator[Candidate]:
        stuck = (hit for hit in self._hits if hit.entry.tells == LineTells.STUCK)
        waiting = tuple(filter(self._is_before_end, stuck))
        if waiting:
            missing = find_absent_ranks(waiting, self._nodes)
            yield Candidate(
                role=Role.ABSENT,
                failure=partial(describe_hang, waiting[0], missing, self._nodes),
                shown=waiting[:_SHOWN],
                missing=missing,
            )

    def _list_consequences(self) -> Iterator[Candidate]:
        following = [
            hit
            for hit in self._hits
            if hit.entry is EXCEPTION or hit.entry.role == LineRole.CASCADE
        ]
        for hit in following[:1]:
            failure = partial(_describe_unknown, hit, hit.prefix_node or hit.log.node)
            yield Candidate(role=Role.LOST_PEER, failure=failure, shown=tuple(following[:_SHOWN]))
        for report in self._ended[:1]:
            failure = partial(_describe_unknown, report, report.node)
            yield Candidate(role=Role.ENDED_BY_OTHERS, failure=failure, shown=(report,))


def _make_exit_candidate(role: Role, report: Exit) -> Candidate:
    return Candidate(
        role=role, failure=partial(_convert_exit, report), time=report.time, shown=(report,)
    )


def _has_writer(hit: Hit) -> bool:
    return hit.rank is not None or bool(hit.node)


def _sort_by_place(hits: Sequence[Hit]) -> list[Hit]:
    """Sort hits by file and line: their order decides between hits of the same time."""
    return sorted(hits, key=lambda hit: (str(hit.log.path), hit.number))


def _find_writer(hit: Hit) -> tuple[Path, int | None, int]:
    """Return a key: one for all tracebacks of a rank in a file, a separate one for other hits."""
    by_rank = hit.trace and hit.rank is not None
    return hit.log.path, hit.rank, 0 if by_rank else hit.number


def _is_own_failure(hit: Hit) -> bool:
    if hit.entry is not EXCEPTION:
        return hit.entry.role == LineRole.PRIMARY and not hit.entry.tells
    # An exception from a collective tells that a peer had left.
    in_collective = any(_IN_COLLECTIVE.search(line) for line in hit.trace[-6:])
    return not (in_collective and _LOST_PEER.match(hit.text))


def _convert_hit(hit: Hit, ended: Sequence[Exit], nodes: Mapping[int, str]) -> FirstFailure:
    rank = _find_failed_rank(hit)
    own = [end for end in ended if end.rank == rank is not None][:1]
    node = hit.node or ("" if rank is None else nodes.get(rank, ""))
    meaning, hint = hit.entry.explain({**hit.groups, "node": node})
    return FirstFailure(
        node=node or _find_node(hit, own, ended),
        rank=rank,
        exit_code=own[0].code if own else None,
        kind=hit.entry.kind,
        cause=hit.text if hit.trace else meaning,
        hint=hint,
        lines=tuple(keep_own_frame(hit.trace, LINES)) or (hit.text,),
        time=hit.time,
        meaning=meaning,
        entry=hit.entry.name,
    )


def _find_node(hit: Hit, own: Sequence[Exit], ended: Sequence[Exit]) -> str:
    # A hit without a rank is of the one node of all failed processes in its log.
    near = own or [end for end in ended if end.log == hit.log and hit.rank is None]
    nodes = {end.node for end in near}
    return nodes.pop() if len(nodes) == 1 else ""


def _find_failed_rank(hit: Hit) -> int | None:
    named = hit.groups.get("rank", "")
    return int(named) if hit.rank is None and named.isdigit() else hit.rank


def _convert_exit(report: Exit) -> FirstFailure:
    cause, kind, hint = describe_exit_code(report.code)
    return FirstFailure(
        node=report.node,
        rank=report.rank,
        exit_code=report.code,
        kind=kind,
        cause=cause,
        hint=hint,
        lines=(report.text,),
        time=report.time,
    )


def _describe_unknown(shown: Hit | Exit, node: str) -> FirstFailure:
    return FirstFailure(
        node=node,
        rank=None,  # another one's failure made this one end
        kind=FailureClass.UNKNOWN,
        cause=f"these logs show consequences only: {shown.text}",
        hint="the log of the rank, or of the node, that ended first is not among them",
        lines=(shown.text,),
        time=shown.time,
    )
