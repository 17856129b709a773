"""The ranks of a job: how they are started, and what has become of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from ..launch.commands import choose_backend, must_use_cpus
from ..launch.program_variables import USE_CPU
from ..protocol.enumerations import PhaseName
from ..protocol.events import JobEnds
from ..protocol.messages import GroupSettings, LaunchRequest
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..protocol.reports import Departure, LaunchAnswer, Started
from .collect import note_unnamed
from .resume import send_earlier_results
from .state import State
from .transports.transport import Event

_T = TypeVar("_T")


def start(state: State) -> None:
    """Start the ranks on the nodes of the job, and wait until they end.

    Raises:
        NodeError: they cannot be started with these nodes.
    """
    shared = all(facts.proj for facts in state.facts.values())
    state.separate_run_dirs = not shared
    note_unnamed(state)  # before hours of work, and at the end once more
    send_earlier_results(state)
    group = _group(state)
    if group.on_cpus:
        _note_cpus(state)
    world_size = state.nproc * len(state.job.nodes)
    state.result = replace(state.result, world_size=world_size, backend=group.backend)
    logs = _RankLogs(state)
    try:
        state.ask(
            PhaseName.LAUNCH,
            lambda node: LaunchRequest(**state.placed(node), group=group, shared=shared),
            logs.take,
        )
    finally:  # also of a job that is interrupted: something may have failed before
        logs.complete()
        state.result = _with_outcome(state.result, state)


def _group(state: State) -> GroupSettings:
    job, gpus = state.job, state.gpus()
    try:
        backend = choose_backend(job.launch.backend, gpus)
    except ValueError as exc:
        raise NodeError(Problem(ProblemCode.BACKEND_UNUSABLE, "", {"why": str(exc)})) from exc
    head = state.facts[job.nodes[0]]
    if not head.port:  # it has become the head after another one was left out
        raise NodeError(Problem(ProblemCode.HEAD_WITHOUT_ADDRESS, job.nodes[0]))
    return GroupSettings(
        address=head.address,
        port=head.port,
        backend=backend,
        nproc=state.nproc,
        on_cpus=must_use_cpus(backend, gpus),
    )


class _RankLogs:
    """Creates rank logs as nodes start; thousands of files would delay the launch."""

    def __init__(self, state: State) -> None:
        launch = state.job.launch
        self._state = state
        self._keep_numbers = launch.elastic is None and not launch.max_restarts
        """True if ranks stay on their nodes."""
        self._settled = state.job.min_nodes is None
        """True once no node is left out any more, so that ranks get no other numbers."""

    def take(self, event: Event) -> None:
        if self._keep_numbers and isinstance(event, Started):
            self._settled = True
            self._state.begin_logs(event.node)

    def complete(self) -> None:
        """Create the logs of ranks that were never started."""
        if self._keep_numbers and self._settled:
            self._state.begin_logs(*self._state.job.nodes)


def _note_cpus(state: State) -> None:
    if USE_CPU in os.environ or not _may_have_accelerate(state):
        return
    why = "not every node has a GPU, and without it accelerate's ranks would not meet"
    state.note(f"{USE_CPU}=true: {why}")


def _may_have_accelerate(state: State) -> bool:
    if state.bundle is None:
        return True
    return any(layer.name == "accelerate" for layer in state.bundle.manifest.layers)


def _with_outcome(result: JobEnds, state: State) -> JobEnds:
    answers = state.answers_of(LaunchAnswer)
    every = answers.values()
    failures = _joined(answer.failures for answer in every)
    return replace(
        result,
        exit_codes={node: _exit_code(answer) for node, answer in answers.items()},
        task_codes=dict(state.task_codes),
        failures=failures,
        tails={node: answer.tail for node, answer in answers.items() if answer.tail},
        stopped=tuple(node for node, answer in answers.items() if answer.stopped),
        lingering=_joined(answer.lingering for answer in every),
        vanished=_joined(answer.vanished for answer in every),
        left=_departures(every) if failures else None,  # else nobody asks who ended first
    )


def _departures(answers: Iterable[LaunchAnswer]) -> tuple[Departure, ...]:
    return _joined(answer.left for answer in answers)


def _joined(parts: Iterable[tuple[_T, ...]]) -> tuple[_T, ...]:
    return tuple(itertools.chain.from_iterable(parts))


def _exit_code(answer: LaunchAnswer) -> int:
    return 1 if answer.exit_code is None else answer.exit_code


def notes(state: State) -> tuple[str, ...]:
    """Return remarks for the user on a launch that went well otherwise."""
    world_size = state.result.world_size or 0
    answers = state.answers_of(LaunchAnswer).values()
    alone = any(answer.alone for answer in answers)
    joined = any(answer.joined for answer in answers)
    if world_size < 2 or joined or not alone:
        return ()
    return (
        f"no rank joined a process group of torch.distributed: each of the {world_size} ranks ran "
        "by itself; if they were to train together, the program has to call "
        "torch.distributed.init_process_group (Hugging Face's Trainer and Accelerate do so where "
        "they take the run for a distributed one)",
    )
