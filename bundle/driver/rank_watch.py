"""Detects ranks that are silent, collects what they do, and records a verdict on them.

Nothing here waits: the transport calls :meth:`RankWatch.tick` in the thread in which events come.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field, replace

from ..channel.agent_channel import LOOK
from ..launch.program_variables import is_moving
from ..protocol.dataclass import dataclass
from ..protocol.events import Hang, JobStacks, RankOutput, RanksSilent
from ..protocol.messages import UNASKED, LaunchAnswer, ProcessState, RankState, RankStates, Started
from ..protocol.problem import Problem, ProblemCode
from .hangs import HELD, UNKNOWN_STATE, find_hang
from .state import State
from .transports.liveness import Heartbeats
from .transports.transport import Event, LaunchStopped, do_nothing

SILENCE = "STAGER_SILENCE_SECONDS"  # the variable with another time than the following one
_SILENCE_SECONDS = 240.0  # saving a checkpoint or compiling a model may take as long
_LONGEST_PAUSE_FACTOR = 3.0  # the longest pause so far counts so many times
_PAUSE_SECONDS = 2.5  # time between two looks, whose difference shows what moves
_ANSWER_SECONDS = 20.0  # time that a node gets to answer; that of many ranks takes long
_TICK_SECONDS = 0.25
_REQUEST_SECONDS = 1.0  # time between two looks for a request
_HANG_VALID_SECONDS = 120.0
"""Time that a hang counts after output: PyTorch prints before its own timeout ends ranks."""
_CHARACTERS = 300  # of the last line
_MOST_CHARACTERS, _NCCL_CHARACTERS = 1 << 20, 1 << 16  # any node may be hostile


@contextmanager
def watch_ranks(state: State) -> Iterator[Callable[[Event], None]]:
    """Watch a launch while the block runs, if the job wants it; yield what takes its events."""
    if not state.job.launch.watch:
        yield lambda event: None
        return
    watch = RankWatch(state)
    state.transport.tick = watch.tick
    try:
        yield watch.take
    finally:
        state.transport.tick = do_nothing
        state.result = replace(state.result, hang=watch.end())


@dataclass
class _Snapshot:
    number: int
    asked: float  # the time of it
    awaited: Counter[str]  # tasks of each node that are to answer
    answers: dict[str, list[RankStates]] = field(default_factory=dict)

    def drop_task(self, node: str, task: int | None) -> None:
        self.awaited[node] -= 1
        answers = self.answers.get(node, [])
        answers[:] = [one for one in answers if all(state.rank != task for state in one.ranks)]

    def list_missing(self) -> list[str]:
        return [
            node for node, count in self.awaited.items() if len(self.answers.get(node, ())) < count
        ]


class RankWatch:
    """The output of the ranks of one launch in time, and what was found out about a silence."""

    def __init__(self, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._launch = state, state.job.launch
        self._now = Heartbeats(clock).now  # time in which this process was stopped is no silence
        self._is_moving = is_moving(self._launch)  # else ranks stay on their nodes
        self._floor = _SILENCE_SECONDS
        with suppress(ValueError):
            seconds = float(os.environ.get(SILENCE, ""))
            self._floor = seconds if 0 < seconds < math.inf else _SILENCE_SECONDS
        self._running = Counter[str]()  # tasks that have begun, by node
        self._last = self._now()
        self._last_output: RankOutput | None = None
        self._longest: float | None = None
        self._silence_reports = 0
        self._numbers = itertools.count(UNASKED + 1)
        self._look: _Snapshot | None = None
        self._first: _Snapshot | None = None  # the earlier look, once complete
        self._unasked: dict[str, list[RankStates]] = {}
        self._hang: Hang | None = None
        self._recovered = math.inf  # the time of the first output since that hang
        self._next_request = self._next_tick = 0.0

    def take(self, event: Event) -> None:
        """Learn from an event of the launch."""
        if isinstance(event, RankOutput):
            self._note_output(event)
        elif isinstance(event, Started):
            if not self._running:
                self._last = self._now()
            self._running[event.node] += 1
        elif isinstance(event, LaunchAnswer):
            self._running[event.node] -= 1
            if self._look is not None:
                self._look.drop_task(event.node, event.task)
        elif isinstance(event, RankStates) and event.node in self._running:
            self._note_states(event)

    def tick(self) -> None:
        """Mention a silence, ask the ranks, judge the answers; LaunchStopped if it is too long."""
        now = self._now()
        silent = now - self._last
        if now < self._next_tick:  # it may be called after each piece of output
            return
        self._next_tick = now + _TICK_SECONDS
        if not any(count > 0 for count in self._running.values()):
            return
        if now - self._recovered > _HANG_VALID_SECONDS:
            self._hang, self._recovered = None, math.inf
        if self._look is not None:
            self._continue_look(now)
        elif self._is_silent_for_long(silent):
            self._silence_reports += 1
            self._report_silence(silent)
            self._ask(now)
        elif self._must_end(silent):
            self._ask(now)
        elif now >= self._next_request:
            self._next_request = now + _REQUEST_SECONDS
            if self._state.logs.is_stacks_requested():
                self._ask(now)

    def end(self) -> Hang | None:
        """Return the hang that stands as the launch ends; keep the stacks that came late."""
        if self._state.logs.is_stacks_requested():
            complete = self._first or self._look
            if complete is not None:
                self._write_stacks(complete, self._collect_states(complete), None)
            self._state.logs.drop_stacks_request()
        hang = None if self._now() - self._recovered > _HANG_VALID_SECONDS else self._hang
        if hang is None and self._unasked:
            look = _Snapshot(UNASKED, self._now(), Counter(), self._unasked)
            self._write_stacks(look, self._collect_states(look), None, ending=True)
        return hang

    def _note_output(self, event: RankOutput) -> None:
        if not event.of_ranks or not event.data:
            return
        now = self._now()
        if self._last_output is not None:
            self._longest = max(self._longest or 0.0, now - self._last)
        self._last, self._last_output, self._silence_reports = now, event, 0
        if self._hang is not None:
            self._recovered = min(self._recovered, now)

    def _note_states(self, event: RankStates) -> None:
        look = self._look
        if event.number == UNASKED:
            answers = self._unasked.setdefault(event.node, [])
        elif look is not None and event.number == look.number:
            answers = look.answers.setdefault(event.node, [])
        else:
            return
        most = min(self._running[event.node], self._state.nproc)
        if len(answers) < max(1, most):
            # Those that can be the node's, and of limited size: any node may be hostile.
            world = self._state.nproc * len(self._state.job.nodes)
            own = range(world) if self._is_moving else self._state.list_tasks(event.node)
            ranks = {one.rank: _check_size(one) for one in event.ranks if one.rank in own}
            answers.append(replace(event, ranks=tuple(ranks.values())))

    def _is_silent_for_long(self, silent: float) -> bool:
        usual = _LONGEST_PAUSE_FACTOR * (self._longest or 0.0)
        return bool(silent > max(self._floor, usual) * 2**self._silence_reports)

    def _must_end(self, silent: float) -> bool:
        return 0 < self._launch.hang_timeout < silent

    def _report_silence(self, silent: float) -> None:
        last = self._last_output
        lines = b"" if last is None else last.data.rstrip()
        line = lines[lines.rfind(b"\n") + 1 :].decode(errors="replace")
        self._state.emit(
            RanksSilent(
                seconds=round(silent, 1),
                usual=None if self._longest is None else round(self._longest, 1),
                rank=None if last is None else last.rank,
                line=line[:_CHARACTERS],
            )
        )

    def _ask(self, now: float) -> None:
        self._look = _Snapshot(next(self._numbers), now, +self._running)
        self._state.transport.send_to_ranks(f"{LOOK}{self._look.number}")

    def _continue_look(self, now: float) -> None:
        look, first = self._look, self._first
        if look is None or (look.list_missing() and now < look.asked + _ANSWER_SECONDS):
            return
        if first is not None:
            self._look = self._first = None
            self._judge(first, look, now)
        elif now >= look.asked + _PAUSE_SECONDS:
            self._first = look
            self._ask(now)

    def _judge(self, first: _Snapshot, second: _Snapshot, now: float) -> None:
        states, hang = self._collect_states(second), None
        is_silent = self._last < first.asked
        if is_silent:
            earlier = _index_ranks(self._collect_states(first))
            hang = find_hang(_index_ranks(states), earlier, second.asked - first.asked)
        must_end = is_silent and self._must_end(now - self._last)
        if must_end:
            unknown = Hang(text="none of them shows why", certain=False)
            hang = replace(hang or unknown, ended=True)
        self._write_stacks(second, states, hang)
        self._state.logs.drop_stacks_request()
        if is_silent and (self._silence_reports or must_end):
            self._note_hang(hang)
        if must_end and hang is not None:
            where = hang.node or self._state.job.nodes[0]
            values = {"seconds": f"{now - self._last:.0f}", "why": hang.text}
            raise LaunchStopped(Problem(ProblemCode.RANKS_HANG, where, values))

    def _note_hang(self, hang: Hang | None) -> None:
        before = self._hang
        if hang is not None and before is not None and hang.kind == HELD:
            hang = replace(hang, certain=(hang.text == before.text))
        if hang is not None and hang != before:
            self._state.emit(hang)
        self._hang, self._recovered = hang, math.inf

    def _collect_states(self, look: _Snapshot) -> dict[str, tuple[RankState, ...]]:
        missing, is_asked = look.list_missing(), look.number != UNASKED
        states = {}
        for node in self._state.job.nodes:
            has_answered = node in self._running and node not in missing
            why = "it is not running" if has_answered else "its node has not answered"
            none = ProcessState(0, state="" if has_answered else UNKNOWN_STATE)
            ranks = self._state.list_tasks(node) if is_asked and not self._is_moving else ()
            known = {rank: RankState(rank, none, no_answer=why) for rank in ranks}
            for part in look.answers.get(node, ()):
                known |= {one.rank: one for one in part.ranks}
            states[node] = tuple(known[rank] for rank in sorted(known))
        return states

    def _write_stacks(
        self,
        look: _Snapshot,
        nodes: dict[str, tuple[RankState, ...]],
        hang: Hang | None,
        *,
        ending: bool = False,
    ) -> None:
        texts = (one.nccl for answers in look.answers.values() for one in answers if one.nccl)
        nccl = next(texts, "")[:_NCCL_CHARACTERS]
        silent = round(self._now() - self._last, 1)
        job_id = self._state.job.id
        self._state.keep_stacks(JobStacks(job_id, time.time(), silent, nodes, hang, ending, nccl))


def _index_ranks(nodes: Mapping[str, tuple[RankState, ...]]) -> dict[int, tuple[str, RankState]]:
    return {one.rank: (node, one) for node, states in nodes.items() for one in states}


def _check_size(state: RankState) -> RankState:
    if len(repr(state)) <= _MOST_CHARACTERS:
        return state
    process = ProcessState(0, state=UNKNOWN_STATE)
    return RankState(state.rank, process, no_answer="its node has sent too much of it")
