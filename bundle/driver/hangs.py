"""Why silent ranks do not go on: one verdict from two looks at them. Pure functions.

The order of evidence: a process that is stopped, dead, or held by the kernel; a rank that has not
entered an operation which others wait in; different operations; a stack that is not that of most.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from ..launch.wrapper import is_own_file
from ..protocol.counts import format_count
from ..protocol.dataclass import dataclass
from ..protocol.events import Hang
from ..protocol.messages import CollectiveState, ProcessState, RankState
from .findings import shorten_names

States = Mapping[int, "tuple[str, RankState]"]  # the node and the state of each rank
UNKNOWN_STATE = "?"  # of a process of which nothing is known; ``""`` is that of one that ended
HELD = "held"  # the kind of a hang that may be only a large write, unless it comes again
_STOPPED, _HELD, _ENDED = ("T", "t"), "D", ("", "Z", "X")
_NODE_ROOT = re.compile(r"^.*/stager-\d+/(?=envs/)")  # differs between nodes
_WAITING = "/torch/distributed/"
_LOADER = "/torch/utils/data/dataloader.py"
_CHILD = "process "  # the beginning of the name of the stack of a rank's child
_SAME_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather_base", "reduce_scatter_base")
"""Operations to which all ranks must give tensors of the same shapes."""

_ANSWER_CPU_SECONDS = 0.1  # CPU time that the thread which answers a question uses at most
_CHARACTERS = 1000  # of the verdict; a part of it comes from the nodes
_BUSY = 0.1  # CPUs that a rank uses which may be at work, for example copying files


def find_hang(states: States, earlier: States, seconds: float) -> Hang | None:
    """Return why the ranks do not go on; None where they do. ``earlier`` is the look before."""
    unknown = "", RankState(-1, ProcessState(0, state=UNKNOWN_STATE))
    ranks = {
        number: _Rank(number, node, state, earlier.get(number, unknown)[1])
        for number, (node, state) in sorted(states.items())
    }
    if not ranks or any(rank.has_progress() for rank in ranks.values()):
        return None
    looks = _Comparison(ranks, seconds)
    return (
        _find_process(looks)
        or _find_rank_behind(looks)
        or _judge_groups(looks)
        or _compare_stacks(looks)
    )


@dataclass(frozen=True)
class _Rank:
    number: int
    node: str
    state: RankState
    earlier: RankState

    @property
    def has_ended(self) -> bool:
        return self.state.process.state in _ENDED

    @property
    def is_known(self) -> bool:
        return UNKNOWN_STATE not in (self.state.process.state, self.earlier.process.state)

    def has_progress(self) -> bool:
        before, now = self.earlier.groups, self.state.groups
        return bool(before and now) and _list_numbers(before) != _list_numbers(now)

    def list_processes(self) -> list[tuple[ProcessState, ProcessState]]:
        before = {one.pid: one for one in (*self.earlier.children, self.earlier.process)}
        now = (self.state.process, *self.state.children)
        return [(before[one.pid], one) for one in now if one.pid in before]

    def is_busy(self, seconds: float) -> bool:
        """Return whether it uses the CPU, has moved to another place, or starts processes."""
        processes = self.list_processes()
        used = sum(last.seconds - first.seconds for first, last in processes)
        moved = get_main_frames(self.state) != get_main_frames(self.earlier)
        has_more = len(processes) <= len(self.state.children)
        return bool(processes) and (moved or has_more or used > _BUSY * seconds)


def _list_numbers(groups: Sequence[CollectiveState]) -> list[tuple[object, ...]]:
    return [(one.group, one.ranks, one.enqueued, one.started, one.completed) for one in groups]


class _Stuck(NamedTuple):
    name: str
    number: int
    operation: str
    reports: dict[int, CollectiveState]
    waiting: frozenset[int]
    behind: tuple[int, ...]  # or ended; the lowest number first
    late: tuple[int, ...]  # if none is behind: whose device has not begun it, unlike others'
    unknown: tuple[int, ...]  # ranks that may have entered it or not
    has_all: bool = False  # true if all ranks of the job are in it

    def __str__(self) -> str:
        named = f"{self.operation or 'collective operation'} {self.number}"
        return named if self.has_all else f"{named} of group {self.name}"


class _Comparison:
    def __init__(self, ranks: Mapping[int, _Rank], seconds: float) -> None:
        self.ranks, self._seconds = ranks, seconds
        self.stuck = sorted(_list_stuck(ranks), key=lambda stuck: -len(stuck.waiting))
        places = collections.Counter(rank for stuck in self.stuck for rank in stuck.waiting)
        self.waiting = frozenset(places)
        self.missing = [
            *(rank for stuck in self.stuck for rank in stuck.behind if not places[rank]),
            *(rank for stuck in self.stuck for rank in stuck.late if places[rank] == 1),
        ]  # ranks that others wait for, and that wait for none: the roots of all waiting

    def is_busy(self, rank: int) -> bool:
        return self.ranks[rank].is_busy(self._seconds)

    def name(self, ranks: Sequence[int]) -> str:
        nodes = list(dict.fromkeys(self.ranks[rank].node for rank in ranks))
        noun = "rank" if len(ranks) == 1 else "ranks"
        return f"{noun} {shorten_names([*map(str, ranks)])} on {shorten_names(nodes)}"

    def make_hang(
        self, kind: str, ranks: Sequence[int], text: str, stuck: _Stuck | None = None
    ) -> Hang:
        shown = ranks or sorted(stuck.waiting if stuck else self.ranks)
        first = self.ranks[shown[0]]
        alive = [self.ranks[rank] for rank in ranks if not self.ranks[rank].has_ended]
        is_busy = kind not in ("stopped", HELD) and any(
            rank.is_busy(self._seconds) for rank in alive
        )
        where = _describe_place(first.state, "has ended" if stuck else "is not running")
        if where:
            text += f"; {'it' if len(shown) == 1 else f'rank {first.number}'} {where}"
        if is_busy:
            text += "; it uses the CPU or moves on, so it may be at work"
        hang = Hang(
            kind=kind,
            ranks=tuple(ranks),
            waiting=len(self.waiting.difference(ranks)),
            place=find_place(first.state),
            text=text[:_CHARACTERS],
            certain=not is_busy and kind != HELD and all(rank.is_known for rank in alive),
        )
        if ranks:
            hang = replace(hang, rank=first.number, node=first.node)
        if stuck:
            hang = replace(hang, group=stuck.name, operation=stuck.operation, number=stuck.number)
        return hang


def _find_process(looks: _Comparison) -> Hang | None:
    """Find processes that cannot go on; of a rank that waits for others, only its own counts."""
    found = _list_faults(looks)
    if not found:
        return None
    number, *others = found
    process, how = found[number]
    if others and len(found) == len(looks.ranks) and process.state in _ENDED:
        return None  # a helper that ends early in every rank is not missed
    more = f"; {_count(others, 'other rank')} cannot go on either" if others else ""
    text = f"process {process.pid} ({process.name}) of {looks.name([number])} is {how}{more}"
    kind = HELD if process.state == _HELD else "stopped"
    return looks.make_hang(kind, list(found), text)


def _list_faults(looks: _Comparison) -> dict[int, tuple[ProcessState, str]]:
    """Return the first such process of each rank that has one, and what is wrong with it."""
    suspects = frozenset(looks.missing if looks.stuck else looks.ranks)
    found: dict[int, tuple[ProcessState, str]] = {}
    for rank in looks.ranks.values():
        is_missed = rank.number in suspects and not looks.is_busy(rank.number)
        processes = rank.list_processes() if rank.number in suspects else rank.list_processes()[:1]
        for first, last in processes:
            how = _describe_fault(first, last, is_missed and last is not rank.state.process)
            if how:
                found.setdefault(rank.number, (last, how))
    return found


def _describe_fault(first: ProcessState, last: ProcessState, is_missed: bool) -> str:
    if last.state in _STOPPED:
        return "stopped by a signal or a debugger (SIGCONT resumes it)"
    if first.state == last.state == _HELD and last.seconds - first.seconds < _ANSWER_CPU_SECONDS:
        where = f" in {last.waits_in}" if last.waits_in else ""
        return (
            f"held by the kernel{where}, as by a file system or device that is slow or does not "
            "answer"
        )
    is_dead = is_missed and first.state in _ENDED and last.state in _ENDED
    return "dead, and the rank has not noticed" if is_dead else ""


def _list_stuck(ranks: Mapping[int, _Rank]) -> Iterator[_Stuck]:
    alive = {number for number, rank in ranks.items() if not rank.has_ended}
    reporting = {number for number in alive if ranks[number].state.groups}
    groups: dict[tuple[str, tuple[int, ...]], dict[int, CollectiveState]] = {}
    for number, rank in ranks.items():
        for report in rank.state.groups:
            groups.setdefault((report.group, report.ranks), {})[number] = report
    for (name, listed), reports in groups.items():
        # Gloo's records do not say which ranks a group has: all, if none is known to be outside.
        all_known = listed or (ranks if reports.keys() >= reporting else reports)
        members = ranks.keys() & set(all_known)
        stuck = _judge_group(name, members, reports, alive)
        if stuck.waiting:
            yield stuck._replace(has_all=len(members) == len(ranks))


def _judge_group(
    name: str, members: Set[int], reports: dict[int, CollectiveState], alive: Set[int]
) -> _Stuck:
    number = _find_awaited(reports)
    entered = {rank for rank, report in reports.items() if report.enqueued >= number} & alive
    unknown = (members & alive) - reports.keys()
    behind = members - entered - unknown
    last = {rank: report.enqueued for rank, report in reports.items()}
    begun = {rank: reports[rank].started for rank in sorted(entered)}
    late: list[int] = []
    if not behind and max(begun.values(), default=-1) >= number:
        late = [rank for rank, started in begun.items() if 0 <= started < number]
    # A report names the operation that was enqueued last.
    named = (one.operation for one in reports.values() if one.enqueued == number)
    return _Stuck(
        name=name,
        number=number,
        operation=next(filter(None, named), ""),
        reports=reports,
        waiting=frozenset(entered),
        behind=tuple(sorted(behind, key=lambda rank: (last.get(rank, -1), rank))),
        late=tuple(late),
        unknown=tuple(sorted(unknown)),
    )


def _find_awaited(reports: Mapping[int, CollectiveState]) -> int:
    """Return the number of the first operation of a group that no rank has completed.

    A rank may report an earlier one as the last: Gloo's threads may note two in the wrong order.
    """
    completed = max(report.completed for report in reports.values())
    if completed >= 0:
        return completed + 1
    return max(0, *(one.enqueued for one in reports.values()))  # the ranks furthest ahead wait


def _find_rank_behind(looks: _Comparison) -> Hang | None:
    """Name the ranks that others wait for, and that wait for none, whatever the group."""
    if not looks.missing:
        return None
    rank = looks.missing[0]
    stuck = next(one for one in looks.stuck if rank in (*one.behind, *one.late))
    ranks = [one for one in stuck.behind or stuck.late if one in looks.missing]
    done = f"{'has' if len(ranks) == 1 else 'have'} not {'entered' if stuck.behind else 'begun'}"
    waiting = _count_waiting(stuck.waiting.difference(ranks))
    text = f"{looks.name(ranks)} {done} {stuck}, which {waiting} in"
    if len(looks.waiting) > len(stuck.waiting):
        text += f"; {_count_waiting(looks.waiting)} in all"
    return looks.make_hang("behind", list(dict.fromkeys((*ranks, *looks.missing))), text, stuck)


def _judge_groups(looks: _Comparison) -> Hang | None:
    """Judge ranks that all wait: for a group in which none is behind, or in a circle."""
    roots = [stuck for stuck in looks.stuck if not stuck.behind]
    if not roots:
        return _describe_circle(looks) if looks.stuck else None
    for stuck in roots:
        groups = _group_by_operation(stuck)
        if len(groups) > 1:
            return _describe_mismatch(looks, stuck, groups[0], groups[-1])
    stuck = next((stuck for stuck in roots if stuck.unknown), roots[0])
    text = f"{_count_waiting(stuck.waiting)} in {stuck}, and "
    if stuck.unknown:
        text += f"{looks.name(stuck.unknown)} may not have entered it"
        return looks.make_hang("elsewhere", stuck.unknown, text, stuck)
    text += "none is behind: the network between them does not deliver"
    return looks.make_hang("network", (), text, stuck)


def _group_by_operation(stuck: _Stuck) -> list[list[int]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(stuck.waiting):
        report = stuck.reports[rank]
        if report.enqueued == stuck.number and report.operation:
            is_same = report.operation in _SAME_SHAPES
            key = report.operation, report.shapes if is_same else ""
            groups.setdefault(key, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))


def _describe_mismatch(looks: _Comparison, stuck: _Stuck, few: list[int], most: list[int]) -> Hang:
    first, other = stuck.reports[few[0]], stuck.reports[most[0]]
    few_in, most_in = (f"{one.operation} {stuck.number} ({one.shapes})" for one in (first, other))
    text = (
        f"{looks.name(few)} {_are(few)} in {few_in}, and {_count(most)} in {most_in}: "
        "the program does not call the same operations in all ranks"
    )
    return looks.make_hang("mismatch", few, text, stuck)


def _describe_circle(looks: _Comparison) -> Hang:
    stuck = looks.stuck[0]
    ranks = list(dict.fromkeys(rank for one in looks.stuck for rank in one.behind))
    other = next(one for one in looks.stuck if ranks[0] in one.waiting)
    which = f"{stuck}, which {_count_waiting(stuck.waiting)} in"
    text = f"{looks.name(ranks[:1])} waits in {other} and has not entered {which}"
    return looks.make_hang("mismatch", ranks, f"{text}: groups of ranks wait for each other", stuck)


def _count(ranks: Collection[int], noun: str = "rank") -> str:
    return format_count(len(ranks), noun)


def _count_waiting(ranks: Collection[int]) -> str:
    return f"{_count(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _are(ranks: Collection[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def get_main_frames(state: RankState) -> tuple[str, ...]:
    """Return the frames of a rank's main thread, the innermost first; none where unknown."""
    first = next(iter(state.threads), None)
    return () if first is None or first.name.startswith(_CHILD) else first.frames


def find_place(state: RankState) -> str:
    """Return the innermost frame of the program's own, else of any: ``loader.py:88 read_shard``.

    Of a rank that waits for workers of its DataLoader, it is that of a worker.
    """
    frames = get_main_frames(state)
    if any(_LOADER in frame for frame in frames):
        workers = [one.frames for one in state.threads if one.name.startswith(_CHILD)]
        frames = (*(one for stack in workers for one in stack if one not in frames), *frames)
    own = (frame for frame in frames if is_own_file(frame.rpartition(":")[0]))
    return next(own, next(iter(frames), "")).rpartition("/")[2]


def _describe_place(state: RankState, ended: str) -> str:
    if state.process.state in _ENDED:
        return ended
    if place := find_place(state):
        return f"is in {place}"
    return f"gave no stack: {state.no_answer}" if state.no_answer else ""


def _compare_stacks(looks: _Comparison) -> Hang:
    places = _group_by_stack(looks.ranks)
    silent = places.pop((), [])
    if not places:
        return looks.make_hang("unknown", silent, "no rank shows where it is")
    waiting = [ranks for frames, ranks in places.items() if _WAITING in "\n".join(frames)]
    most = max(waiting or places.values(), key=len)
    ranks = _list_others(list(places.values()), waiting, most) or (silent if waiting else [])
    if ranks:
        where = f"{find_place(looks.ranks[most[0]].state)}, where {_count(most)} {_are(most)}"
        text = f"{looks.name(ranks)} {_are(ranks)} not in {where}"
        return looks.make_hang("elsewhere", ranks, text)
    ranks = sorted(itertools.chain.from_iterable(places.values()))
    several = f", in {len(places)} places" if len(places) > 1 else ""
    text = f"{looks.name(ranks)} {'prints' if len(ranks) == 1 else 'print'} nothing{several}"
    return looks.make_hang("unknown", ranks, text)


def _group_by_stack(ranks: Mapping[int, _Rank]) -> dict[tuple[str, ...], list[int]]:
    """Return the numbers of ranks that have not ended, by their frames; () for unknown ones."""
    places: dict[tuple[str, ...], list[int]] = {}
    for number, rank in ranks.items():
        if not rank.has_ended:
            frames = tuple(_NODE_ROOT.sub("", frame) for frame in get_main_frames(rank.state))
            places.setdefault(frames, []).append(number)
    return places


def _list_others(
    groups: list[list[int]], waiting: Collection[list[int]], most: list[int]
) -> list[int]:
    """Return the ranks that are not where those that wait, or the majority, are; fewest first."""
    if not waiting and 2 * len(most) <= sum(map(len, groups)):
        return []
    others = [ranks for ranks in groups if ranks is not most and ranks not in waiting]
    return [rank for ranks in sorted(others, key=len) for rank in ranks]
