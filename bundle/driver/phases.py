"""The phases of a job, in their order: each asks the nodes, then uses their answers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..format.manifest import estimate_room
from ..launch.commands import choose_backend, must_use_cpus
from ..launch.program_variables import USE_CPU, is_moving
from ..node.node_root import MEMORY
from ..protocol import messages
from ..protocol.enumerations import Action, Allocation, PhaseName
from ..protocol.events import AttemptBegins, FailedAttempt
from ..protocol.job import Job
from ..protocol.messages import LaunchAnswer, PreflightAnswer
from ..protocol.problem import NodeError, Problem, ProblemCode
from . import collect, cuda, placement
from .compiled_code import JobCode, list_known_paths
from .findings import format_preflight_line
from .rank_watch import watch_ranks
from .retries import Failure, History, RankProgress, find_failure
from .state import State
from .transports.transport import Event, LaunchStopped


def _start_ranks(state: State, progress: RankProgress, code: JobCode) -> None:
    group = _make_group(state)
    if group.on_cpus:
        _note_cpus(state)
    world_size = state.nproc * len(state.job.nodes)
    state.result = replace(state.result, world_size=world_size, backend=group.backend)
    keeps_numbers = not is_moving(state.job.launch)  # true if ranks stay on their nodes
    has_begun = state.job.min_nodes is None  # true once no node is left out any more

    def request(node: str) -> messages.LaunchRequest:
        return messages.LaunchRequest(
            *state.place(node),
            group=group,
            shared=not state.separate_run_dirs,
            attempt=state.attempt,
            code=code.choose_directory(node),
            removes_code=code.compiles_anew,
        )

    def listen(event: Event) -> None:
        """Create a node's rank logs as it starts; thousands of files would delay the launch."""
        nonlocal has_begun
        watch(event)
        progress.take(event)
        if keeps_numbers and isinstance(event, messages.Started):
            has_begun = True
            state.create_rank_logs(event.node)

    try:
        with watch_ranks(state) as watch, code.keep_early(progress):
            state.ask(PhaseName.LAUNCH, request, listen)
    finally:  # also of a job that is interrupted: something may have failed before
        if keeps_numbers and has_begun:  # the logs of ranks that were never started
            state.create_rank_logs(*state.job.nodes)
        _add_outcome(state)


def _make_group(state: State) -> messages.GroupSettings:
    job, gpus = state.job, state.gpus()
    try:
        backend = choose_backend(job.launch.backend, gpus)
    except ValueError as exc:
        raise NodeError(Problem(ProblemCode.BACKEND_UNUSABLE, "", {"why": str(exc)})) from exc
    head = state.facts[job.nodes[0]]
    if not head.port:  # it has become the head after another one was left out
        raise NodeError(Problem(ProblemCode.HEAD_WITHOUT_ADDRESS, job.nodes[0]))
    return messages.GroupSettings(
        address=head.address,
        port=head.port,
        backend=backend,
        nproc=state.nproc,
        on_cpus=must_use_cpus(backend, gpus),
    )


def _note_cpus(state: State) -> None:
    layers = None if state.bundle is None else state.bundle.manifest.layers
    may_have = layers is None or any(layer.name == "accelerate" for layer in layers)
    if may_have and USE_CPU not in os.environ:
        why = "not every node has a GPU, and without it accelerate's ranks would not meet"
        state.note(f"{USE_CPU}=true: {why}")


def _add_outcome(state: State) -> None:
    answers = state.get_answers(LaunchAnswer)
    chain, every = itertools.chain.from_iterable, answers.values()
    failures = tuple(chain(answer.failures for answer in every))
    state.result = replace(
        state.result,
        exit_codes=_get_exit_codes(answers),
        task_codes=dict(state.task_codes),
        failures=failures,
        tails={node: answer.tail for node, answer in answers.items() if answer.tail},
        stopped=tuple(node for node, answer in answers.items() if answer.stopped),
        lingering=tuple(chain(answer.lingering for answer in every)),
        vanished=tuple(chain(answer.vanished for answer in every)),
        # Without a failure nobody asks who ended first.
        left=tuple(chain(answer.left for answer in every)) if failures else None,
        attempt=None,
    )


def _get_exit_codes(answers: Mapping[str, LaunchAnswer]) -> dict[str, int]:
    codes = {node: answer.exit_code for node, answer in answers.items()}
    return {node: 1 if code is None else code for node, code in codes.items()}


class Phase(NamedTuple):
    """One step of a job, on all of its nodes at once."""

    name: PhaseName
    ask: Callable[[State], None]  # asks the nodes; ``state.answers`` then has the answer of each
    use: Callable[[State], None]  # also leaves out nodes with a problem, or fails


def phases_of(job: Job) -> tuple[Phase, ...]:
    """Return the phases of a job."""
    if job.action is Action.CLEAN:
        return (CLEAN,)
    check = (PREFLIGHT, PLACE, UNPACK, PROBE)
    if job.action is Action.RUN:
        return (*check, LAUNCH)
    if not job.deep:
        return check
    from . import deep_check

    deep = Phase(PhaseName.DEEP, deep_check.check_nodes, _do_nothing)
    all_reduce = Phase(PhaseName.ALL_REDUCE, deep_check.all_reduce, State.leave_out_or_fail)
    return (*check, deep, all_reduce)


def _do_nothing(state: State) -> None:
    pass


def _ask_preflight(state: State) -> None:
    known = list_known_paths(state.job)
    with collect.run_dir_marker(state.job) as marker:
        state.ask(
            PhaseName.PREFLIGHT, lambda node: _make_preflight_request(state, node, marker, known)
        )


def _use_preflight(state: State) -> None:
    _check_drivers(state)
    state.facts = state.get_answers(PreflightAnswer)
    lines: list[str] = []
    for node, facts in state.facts.items():
        lines.append(format_preflight_line(facts))
        if facts.gpus is not None:
            lines.append(cuda.format_gpu_line(node, facts.gpus))
        if facts.damage is not None:
            state.note(f"{node}: {facts.damage}", warning=True)
            lines.append(f"{node} damage: {facts.damage}")
        lines += [f"{node} problem: {problem}" for problem in facts.problems]
    seconds = [facts.check_seconds for facts in state.facts.values()]
    state.result = replace(state.result, check_seconds=max(seconds, default=0.0))
    state.logs.preflight(lines)
    _refuse_interface_of_none(state)
    _note_addresses(state)
    _warn_of_unchecked_and_memory(state)
    _add_same_host_problems(state)
    state.leave_out_or_fail()
    state.choose_nproc()


_DONE = {False: "staged", True: "reused"}


def _use_unpack(state: State) -> None:
    answers = state.get_answers(messages.UnpackAnswer)
    seconds = [one.unpack_seconds for one in answers.values() if one.unpack_seconds is not None]
    repaired = {node: one.mended for node, one in answers.items() if one.mended is not None}
    state.result = replace(
        state.result,
        send_seconds=state.send_seconds,
        unpack_seconds=max(seconds, default=None),
        repaired=repaired or None,
    )
    for node, answer in answers.items():
        if answer.ok:
            state.log_line(node, f"{node} {_DONE[answer.reused]} -> {answer.path}")
    for node, damage in repaired.items():
        if state.facts[node].damage is None:
            state.note(f"{node}: {damage}", warning=True)
    state.leave_out_or_fail()


def _ask_probe(state: State) -> None:
    head = state.facts[state.job.nodes[0]].address
    state.ask(PhaseName.PROBE, lambda node: messages.ProbeRequest(*state.place(node), head=head))


def _use_probe(state: State) -> None:
    answers = state.get_answers(messages.ProbeAnswer)
    for node, answer in answers.items():
        if answer.line:
            state.log_line(node, answer.line)
    warned = [(node, str(one)) for node, answer in answers.items() for one in answer.warnings]
    state.note_nodes(warned, warning=True)
    if not state.job.deep:  # else problems are reported with their causes
        state.leave_out_or_fail()


def _ask_launch(state: State) -> None:
    """Start the ranks; again without the nodes that kept them from beginning, or by retries."""
    history, code = History(state.job.launch.retries), JobCode(state)
    _prepare_run_dirs(state)
    code.send()
    state.set_spares_aside()
    if state.spares:
        state.emit(AttemptBegins(0, state.job.nodes, state.spares))
    while True:
        stopped: LaunchStopped | None = None
        progress, started = RankProgress(), time.monotonic()
        try:
            _start_ranks(state, progress, code)
        except LaunchStopped as exc:
            stopped = exc
        if state.leave_out_unreachable():
            continue
        if stopped is None and not state.has_launch_failed():
            code.prepare_return(progress.first_step_seconds, failed=False)
            return
        ended = time.monotonic()
        failure = find_failure(state.get_answers(LaunchAnswer), state.result.hang)
        attempt = history.judge(failure, progress, ended - started)
        state.result = replace(state.result, attempt=attempt)
        code.look_for_crashes()
        if not history.may_go_on() or state.transport.find_ending():
            code.prepare_return(progress.first_step_seconds, failed=True)
            if stopped is not None:
                raise stopped
            return
        _prepare_restart(state, failure, attempt, ended)
        code.send()


def _prepare_run_dirs(state: State) -> None:
    state.separate_run_dirs = not all(facts.proj for facts in state.facts.values())
    collect.note_unnamed(state)  # before hours of work, and at the end once more
    collect.send_earlier_results(state)


def _prepare_restart(state: State, failure: Failure, failed: FailedAttempt, ended: float) -> None:
    before = state.job.nodes
    state.attempt = failed.number + 1
    state.transport.close()
    state.drop_nodes(failure)
    _ask_preflight(state)
    state.facts = {**state.facts, **state.get_answers(PreflightAnswer)}
    state.leave_out_or_fail()
    if not all(state.facts[node].ready for node in state.job.nodes):
        placement.make_and_emit_plan(state)
        placement.execute_plan(state)
        _use_unpack(state)
    state.set_spares_aside()
    state.forget_launch()
    nodes, seconds = state.job.nodes, round(time.monotonic() - ended, 3)
    left_out = tuple(node for node in before if node not in nodes)
    state.emit(AttemptBegins(state.attempt, nodes, state.spares, failed, left_out, seconds))
    state.mark_attempt()


def _use_launch(state: State) -> None:
    """Fail where ranks have failed, unless an elastic group has gone on without them."""
    world_size, answers = state.result.world_size or 0, state.get_answers(LaunchAnswer).values()
    joined = any(answer.joined for answer in answers)
    notes: tuple[str, ...] = ()
    if world_size > 1 and not joined and any(answer.alone for answer in answers):
        notes = (
            f"no rank joined a process group of torch.distributed: each of the {world_size} ranks "
            "ran by itself; if they were to train together, the program has to call "
            "torch.distributed.init_process_group (Hugging Face's Trainer and Accelerate do so "
            "where they take the run for a distributed one)",
        )
    state.result = replace(state.result, notes=notes)
    if state.job.launch.elastic is not None:
        state.leave_out_or_fail(fills_places=False)
    state.fail_if_any()


PREFLIGHT = Phase(PhaseName.PREFLIGHT, _ask_preflight, _use_preflight)
PLACE = Phase(PhaseName.PLACE, _do_nothing, placement.make_and_emit_plan)
UNPACK = Phase(PhaseName.UNPACK, placement.execute_plan, _use_unpack)
PROBE = Phase(PhaseName.PROBE, _ask_probe, _use_probe)
LAUNCH = Phase(PhaseName.LAUNCH, _ask_launch, _use_launch)
CLEAN = Phase(
    PhaseName.CLEAN,
    lambda state: state.ask(
        PhaseName.CLEAN, lambda node: messages.CleanRequest(*state.common(node))
    ),
    State.fail_if_any,
)


def _check_drivers(state: State) -> None:
    layers = () if state.bundle is None else state.bundle.manifest.layers
    wheels = [(layer.name, layer.version) for layer in layers if layer.kind == "wheel"]
    need = cuda.find_cuda_need(wheels)
    answers = state.get_answers(PreflightAnswer)
    gpus = {node: answer.gpus for node, answer in answers.items()}
    for node, answer in answers.items():
        if (problem := cuda.find_driver_problem(node, gpus[node], need)) is not None:
            _add_problem(state, answer, problem)
    for note in cuda.list_driver_notes(gpus, need):
        state.note(note)


def _add_problem(state: State, answer: PreflightAnswer, problem: Problem) -> None:
    problems = (*answer.problems, problem)
    state.answers[answer.node] = replace(answer, ok=False, problems=problems)


def _make_preflight_request(
    state: State, node: str, marker: str, known: dict[str, tuple[str, ...]] | None
) -> messages.PreflightRequest:
    request = messages.PreflightRequest(
        *state.common(node), marker=marker, attempt=state.attempt, code=known
    )
    if state.bundle is None:
        return request
    manifest = state.bundle.manifest
    wheel = manifest.decompressor
    return replace(
        request,
        heads=tuple(layer.head for layer in manifest.layers),
        room=tuple(estimate_room([layer]) for layer in manifest.layers),
        own_room=estimate_room([], manifest),
        size=manifest.size,
        wheel=None if wheel is None else (wheel.name, wheel.size),
    )


def _refuse_interface_of_none(state: State) -> None:
    missing = [
        problem
        for facts in state.facts.values()
        for problem in (*facts.problems, facts.no_head)
        if problem is not None and problem.code is ProblemCode.NO_INTERFACE
    ]
    if len(missing) > 1 and len(missing) == len(state.job.nodes):
        names = ", ".join(sorted({problem.where for problem in missing}))
        values = {**missing[0].values, "names": names}
        raise NodeError(Problem(ProblemCode.INTERFACE_OF_NO_NODE, "[launch] interface", values))


def _add_same_host_problems(state: State) -> None:
    if state.job.allocation is not Allocation.SSH:
        return
    first: dict[str, str] = {}
    for node, facts in state.facts.items():
        named = first.setdefault(facts.address, node) if facts.address else node
        if named != node:
            values = {"first": named, "address": facts.address}
            _add_problem(state, facts, Problem(ProblemCode.SSH_SAME_HOST, node, values))


def _note_addresses(state: State) -> None:
    of_way = "in the transfer, the address of the way to the driver's host is used"
    state.note_nodes(
        (node, f"{facts.no_head.what}; {of_way}")
        for node, facts in state.facts.items()
        if facts.no_head is not None and facts.address
    )
    for node, facts in state.facts.items():
        if facts.loopback and facts.address and len(state.job.nodes) > 1:
            state.note(
                f"{node}: ssh reaches it at {facts.loopback}, so it is this machine (or the jump "
                f"host before it); the others are to reach it at {facts.address}"
            )


def _warn_of_unchecked_and_memory(state: State) -> None:
    unchecked = (
        "the bundle's signature was not checked there, only its id, whose signature was good where "
        "the job was prepared"
    )
    memory = "the environment is in /dev/shm, where it takes memory until `stager clean` removes it"
    every = state.facts.items()
    texts = [(node, f"{unchecked} ({one.unchecked})") for node, one in every if one.unchecked]
    texts += [(node, memory) for node, one in every if one.root.startswith(MEMORY)]
    state.note_nodes(texts, warning=True)
