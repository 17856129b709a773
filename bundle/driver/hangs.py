"""Why silent ranks do not go on: one verdict from two looks at them. Pure functions.

The order of evidence: a process that is stopped, dead, or held by the kernel; a rank that has not
entered a collective operation which others wait in; ranks in different operations; a rank whose
stack is not that of most. All of it comes from the nodes, and some ranks may have given no answer.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..protocol.counts import format_count
from ..protocol.events import Hang
from ..protocol.messages import CollectiveState, ProcessState, RankState
from .findings import shorten_names

States = Mapping[int, "tuple[str, RankState]"]
"""The node and the state of each rank."""
UNKNOWN_STATE = "?"
"""The state of a rank's process where nothing is known of it; ``""`` is that of one that ended."""
_STOPPED, _HELD, _ENDED = ("T", "t"), "D", ("", "Z", "X")
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python3|(?:^|/)run_wrapper\.py:")
"""Frames that are not the program's own; the last kind is :mod:`bundle.launch.wrapper`."""
_NODE_ROOT = re.compile(r"^.*/stager-\d+/(?=envs/)")
"""What the paths of one file on several nodes may differ in."""
_WAITING = "/torch/distributed/"
_LOADER = "/torch/utils/data/dataloader.py"
_CHILD = "process "  # the beginning of the name of the stack of a rank's child
_SAME_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather_base", "reduce_scatter_base")
"""Operations to which all ranks must give tensors of the same shapes."""
_BUSY = 0.5
"""CPUs that a rank uses which may be at work: one that waits in a lock or a socket uses none."""


def find_hang(states: States, earlier: States, seconds: float) -> Hang | None:
    """Return why the ranks do not go on; None where they do, or there are none.

    ``earlier`` are their states so many seconds before.
    """
    looks = _Looks(states, earlier, seconds)
    if not states or looks.has_progress():
        return None
    return (
        _find_process(looks)
        or _find_rank_behind(looks)
        or _judge_groups(looks)
        or _compare_stacks(looks)
    )


class _Stuck(NamedTuple):
    """A process group in which ranks wait for an operation that does not complete."""

    name: str
    has_all: bool
    """True if all ranks of the job are in it."""
    number: int
    operation: str
    reports: dict[int, CollectiveState]
    waiting: frozenset[int]
    behind: tuple[int, ...]
    """The ranks that have not entered it, or have ended; the one with the lowest number first."""
    late: tuple[int, ...]
    """Where none is behind, the ranks whose device has not begun it though others' have."""
    unknown: tuple[int, ...]
    """Ranks of the group of which it is not known whether they have entered it."""

    def __str__(self) -> str:
        named = f"{self.operation or 'collective operation'} {self.number}"
        return named if self.has_all else f"{named} of group {self.name}"


class _Looks:
    """Two looks at the ranks, and what follows from both."""

    def __init__(self, states: States, earlier: States, seconds: float) -> None:
        self.states, self._earlier, self._seconds = states, earlier, seconds
        self.stuck = sorted(_list_stuck(states), key=lambda stuck: -len(stuck.waiting))
        places = collections.Counter(rank for stuck in self.stuck for rank in stuck.waiting)
        self.waiting = frozenset(places)
        self.missing = [
            *(rank for stuck in self.stuck for rank in stuck.behind if not places[rank]),
            *(rank for stuck in self.stuck for rank in stuck.late if places[rank] == 1),
        ]
        """Ranks that others wait for, and that wait for none: the roots of all waiting."""

    def has_progress(self) -> bool:
        """Return whether any rank has come further in any group since the earlier look."""
        pairs = [(self.states[rank][1], one) for rank, (_, one) in self._list_known().items()]
        return any(
            _list_numbers(now) != _list_numbers(before)
            for now, before in pairs
            if now.groups and before.groups
        )

    def _list_known(self) -> States:
        return {rank: one for rank, one in self._earlier.items() if rank in self.states}

    def list_processes(self, rank: int) -> list[tuple[ProcessState, ProcessState]]:
        """Return the earlier and the present state of the rank's process, and of its children."""
        if rank not in self._earlier:
            return []
        first, last = self._earlier[rank][1], self.states[rank][1]
        before = {one.pid: one for one in (*first.children, first.process)}
        now = (last.process, *last.children)
        return [(before[one.pid], one) for one in now if one.pid in before]

    def is_busy(self, rank: int) -> bool:
        """Return whether a rank uses the CPU, or has moved to another place."""
        processes = self.list_processes(rank)
        used = sum(last.seconds - first.seconds for first, last in processes)
        moved = bool(processes) and (
            get_main_frames(self.states[rank][1]) != get_main_frames(self._earlier[rank][1])
        )
        return moved or used > _BUSY * self._seconds

    def name(self, ranks: Sequence[int]) -> str:
        """Return ranks with their nodes: ``rank 5 on node07``."""
        nodes = list(dict.fromkeys(self.states[rank][0] for rank in ranks))
        noun = "rank" if len(ranks) == 1 else "ranks"
        return f"{noun} {shorten_names([*map(str, ranks)])} on {shorten_names(nodes)}"

    def make_hang(
        self, kind: str, ranks: Sequence[int], text: str, stuck: _Stuck | None = None
    ) -> Hang:
        """Return the verdict on ranks; the text is followed by where the first of them is."""
        shown = ranks or sorted(stuck.waiting if stuck else self.states)
        node, state = self.states[shown[0]]
        alive = [rank for rank in ranks if self.states[rank][1].process.state not in _ENDED]
        is_busy = kind != "stopped" and any(map(self.is_busy, alive))
        is_known = all(
            rank in self._earlier and self.states[rank][1].process.state != UNKNOWN_STATE
            for rank in alive
        )
        named = "it" if len(shown) == 1 else f"rank {shown[0]}"
        parts = [text, _describe_place(named, state, "has ended" if stuck else "is not running")]
        if is_busy and len(ranks) == 1:
            parts.append("it uses the CPU or moves on, so it may be at work")
        elif is_busy:
            parts.append("some use the CPU or move on, so they may be at work")
        return Hang(
            kind=kind,
            rank=shown[0] if ranks else None,
            node=node if ranks else "",
            ranks=tuple(ranks),
            waiting=len(self.waiting.difference(ranks)),
            group=stuck.name if stuck else "",
            operation=stuck.operation if stuck else "",
            number=stuck.number if stuck else -1,
            place=find_place(state),
            text="; ".join(filter(None, parts)),
            certain=is_known and not is_busy,
        )


# --- Processes -----------------------------------------------------------------------------------


def _find_process(looks: _Looks) -> Hang | None:
    """Find processes that cannot go on; of a rank that waits for others, only its own counts."""
    suspects = frozenset(looks.missing if looks.stuck else looks.states)
    found: list[tuple[int, ProcessState, str]] = []
    for rank, (_, state) in looks.states.items():
        for first, last in looks.list_processes(rank):
            is_own = last is state.process
            how = _describe_fault(first, last) if is_own or rank in suspects else ""
            if how and not (last.state in _ENDED and (is_own or looks.is_busy(rank))):
                found.append((rank, last, how))
    ranks = list(dict.fromkeys(rank for rank, *_ in found))
    if not found or (1 < len(ranks) == len(looks.states) and found[0][1].state in _ENDED):
        return None  # a helper that ends early in every rank is not missed
    rank, process, how = found[0]
    others = ranks[1:]
    more = f", as {_are(others)} {_count(others, 'other rank')}" if others else ""
    text = f"process {process.pid} ({process.name}) of {looks.name([rank])} is {how}{more}"
    return looks.make_hang("stopped", ranks, text)


def _describe_fault(first: ProcessState, last: ProcessState) -> str:
    if last.state in _STOPPED:
        return "stopped by a signal or a debugger (SIGCONT resumes it)"
    if first.state == last.state == _HELD and first.seconds == last.seconds:
        where = f" in {last.waits_in}" if last.waits_in else ""
        return f"held by the kernel{where}, as by a file system or device that does not answer"
    is_dead = first.state in _ENDED and last.state in _ENDED
    return "dead, and the rank has not noticed" if is_dead else ""


# --- Collective operations -----------------------------------------------------------------------


def _list_numbers(state: RankState) -> list[tuple[object, ...]]:
    return [
        (one.group, one.ranks, one.enqueued, one.started, one.completed) for one in state.groups
    ]


def _list_stuck(states: States) -> Iterator[_Stuck]:
    groups: dict[tuple[str, tuple[int, ...]], dict[int, CollectiveState]] = {}
    for rank, (_, state) in states.items():
        for report in state.groups:
            groups.setdefault((report.group, report.ranks), {})[rank] = report
    alive = {rank for rank, (_, one) in states.items() if one.process.state not in _ENDED}
    reporting = {rank for rank in alive if states[rank][1].groups}
    for (name, ranks), reports in groups.items():
        # Gloo's records do not say which ranks a group has: all, if none is known to be outside.
        all_known = ranks or (states if reports.keys() >= reporting else reports)
        members = [rank for rank in dict.fromkeys(all_known) if rank in states]
        number = _find_awaited(reports)
        waiting = {rank for rank in alive & reports.keys() if reports[rank].enqueued >= number}
        if not waiting:
            continue
        last = {rank: reports[rank].enqueued if rank in reports else -1 for rank in members}
        behind = {
            rank
            for rank in members
            if rank not in alive or (rank in reports and last[rank] < number)
        }
        begun = any(reports[rank].started >= number for rank in waiting)
        late = {rank for rank in waiting if 0 <= reports[rank].started < number}
        # A report names the operation that was enqueued last.
        named = (one.operation for one in reports.values() if one.enqueued == number)
        yield _Stuck(
            name=name,
            has_all=len(members) == len(states),
            number=number,
            operation=next(filter(None, named), ""),
            reports=reports,
            waiting=frozenset(waiting),
            behind=tuple(sorted(behind, key=lambda rank: (last[rank], rank))),
            late=tuple(sorted(late)) if begun and not behind else (),
            unknown=tuple(rank for rank in members if rank in alive and rank not in reports),
        )


def _find_awaited(reports: Mapping[int, CollectiveState]) -> int:
    """Return the number of the first operation of a group that no rank has completed.

    A rank may report an earlier one as the last completed, also when it waits for none: Gloo's
    threads may note two in the wrong order.
    """
    completed = max(report.completed for report in reports.values())
    if completed >= 0:
        return completed + 1
    return max(0, *(report.enqueued for report in reports.values()))  # the foremost wait


def _find_rank_behind(looks: _Looks) -> Hang | None:
    """Name the ranks that others wait for, and that wait for none, whatever the group."""
    if not looks.missing:
        return None
    rank = looks.missing[0]
    stuck = next(one for one in looks.stuck if rank in one.behind or rank in one.late)
    ranks = [one for one in stuck.behind or stuck.late if one in looks.missing]
    done = f"{'has' if len(ranks) == 1 else 'have'} not {'entered' if stuck.behind else 'begun'}"
    waiting = _count_waiting(stuck.waiting.difference(ranks))
    text = f"{looks.name(ranks)} {done} {stuck}, which {waiting} in"
    if len(looks.waiting) > len(stuck.waiting):
        text += f"; {_count_waiting(looks.waiting)} in all"
    return looks.make_hang("behind", list(dict.fromkeys((*ranks, *looks.missing))), text, stuck)


def _judge_groups(looks: _Looks) -> Hang | None:
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
    """Return the waiting ranks by what they wait in, the fewest first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(stuck.waiting):
        report = stuck.reports[rank]
        if report.enqueued == stuck.number and report.operation:
            is_same = report.operation in _SAME_SHAPES
            key = report.operation, report.shapes if is_same else ""
            groups.setdefault(key, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))


def _describe_mismatch(looks: _Looks, stuck: _Stuck, few: list[int], most: list[int]) -> Hang:
    few_in, most_in = (
        f"{stuck.reports[ranks[0]].operation} {stuck.number} ({stuck.reports[ranks[0]].shapes})"
        for ranks in (few, most)
    )
    text = (
        f"{looks.name(few)} {_are(few)} in {few_in}, and {_count(most)} in {most_in}: "
        "the program does not call the same operations in all ranks"
    )
    return looks.make_hang("mismatch", few, text, stuck)


def _describe_circle(looks: _Looks) -> Hang:
    stuck = looks.stuck[0]
    rank = stuck.behind[0]
    other = next(one for one in looks.stuck if rank in one.waiting)
    text = (
        f"{looks.name([rank])} waits in {other} and has not entered {stuck}, which "
        f"{_count_waiting(stuck.waiting)} in: groups of ranks wait for each other"
    )
    ranks = dict.fromkeys(rank for one in looks.stuck for rank in one.behind)
    return looks.make_hang("mismatch", list(ranks), text, stuck)


def _count(ranks: Collection[int], noun: str = "rank") -> str:
    return format_count(len(ranks), noun)


def _count_waiting(ranks: Collection[int]) -> str:
    return f"{_count(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _are(ranks: Collection[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


# --- Stacks --------------------------------------------------------------------------------------


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
    own = next((frame for frame in frames if not _LIBRARY.search(frame)), next(iter(frames), ""))
    return own.rpartition("/")[2]


def _describe_place(named: str, state: RankState, ended: str) -> str:
    place = find_place(state)
    if state.process.state in _ENDED:
        return f"{named} {ended}"
    if place:
        return f"{named} is in {place}"
    return f"{named} gave no stack: {state.no_answer}" if state.no_answer else ""


def _compare_stacks(looks: _Looks) -> Hang:
    places: dict[tuple[str, ...], list[int]] = {}
    for rank, (_, state) in sorted(looks.states.items()):
        if state.process.state not in _ENDED:
            frames = tuple(_NODE_ROOT.sub("", frame) for frame in get_main_frames(state))
            places.setdefault(frames, []).append(rank)
    silent = places.pop((), [])
    if not places:
        return looks.make_hang("unknown", silent, "no rank shows where it is")
    # Ranks in torch.distributed wait; else what most ranks do is taken for sound.
    stacks = sorted(places, key=lambda frames: (_waits_in_torch(frames), len(places[frames])))
    most, others = stacks[-1], stacks[:-1]
    if _waits_in_torch(most):
        others = [frames for frames in others if not _waits_in_torch(frames)]
    elif 2 * len(places[most]) <= sum(map(len, places.values())):
        others = []
    ranks = [rank for frames in others for rank in places[frames]]
    ranks = ranks or (silent if _waits_in_torch(most) else [])
    if ranks:
        where = f"{find_place(looks.states[places[most][0]][1])}, where {_count(places[most])}"
        text = f"{looks.name(ranks)} {_are(ranks)} not in {where} {_are(places[most])}"
        return looks.make_hang("elsewhere", ranks, text)
    ranks = sorted(rank for ranks in places.values() for rank in ranks)
    several = f", in {len(places)} places" if len(places) > 1 else ""
    text = f"{looks.name(ranks)} {'prints' if len(ranks) == 1 else 'print'} nothing{several}"
    return looks.make_hang("unknown", ranks, text)


def _waits_in_torch(frames: tuple[str, ...]) -> bool:
    return any(_WAITING in frame for frame in frames)
