"""The phases of a job, in their order: each asks the nodes, then uses their answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from ..format.manifest import estimate_room
from ..launch.commands import choose_backend, must_use_cpus
from ..launch.program_variables import USE_CPU
from ..node.node_root import MEMORY
from ..protocol.enumerations import Action, Allocation, PhaseName
from ..protocol.events import JobEnds
from ..protocol.job import Job
from ..protocol.messages import (
    CleanRequest,
    Gpu,
    GpuFacts,
    GroupSettings,
    LaunchAnswer,
    LaunchRequest,
    PreflightAnswer,
    PreflightRequest,
    ProbeAnswer,
    ProbeRequest,
    Started,
    UnpackAnswer,
)
from ..protocol.problem import NodeError, Problem, ProblemCode
from . import collect, placement
from .collect import note_unnamed, send_earlier_results
from .cuda import OWN, CudaNeed, driver_problem, find_cuda_need, newest_cuda, parse_version
from .findings import format_preflight_line, shorten_names
from .state import State
from .transports.transport import Event

# --- Remarks of the preflight on NVIDIA drivers and GPUs, once all nodes have answered -----------


def check_drivers(state: State) -> None:
    """Give each node whose driver is too old for the bundle a problem, and note what is unusual."""
    layers = () if state.bundle is None else state.bundle.manifest.layers
    need = find_cuda_need((layer.name, layer.version) for layer in layers if layer.kind == "wheel")
    answers = state.answers_of(PreflightAnswer)
    for node, answer in answers.items():
        problem = driver_problem(node, answer.gpus, need)
        if problem is not None:
            problems = (*answer.problems, problem)
            state.answers[node] = replace(answer, ok=False, problems=problems)
    for note in list_driver_notes({node: answer.gpus for node, answer in answers.items()}, need):
        state.note(note)


def list_driver_notes(nodes: Mapping[str, GpuFacts | None], need: CudaNeed | None) -> list[str]:
    """Return notes on the drivers and GPUs of nodes that can run the bundle."""
    broken = [
        f"{node}: the NVIDIA driver does not work: {facts.fault}"
        for node, facts in nodes.items()
        if facts is not None and facts.fault
    ]
    return [
        *broken,
        *_note_missing_drivers(nodes, need),
        *_note_old_drivers(nodes, need),
        *_note_differing_gpus(nodes),
    ]


def _note_missing_drivers(
    nodes: Mapping[str, GpuFacts | None], need: CudaNeed | None
) -> Iterator[str]:
    without = [node for node, facts in nodes.items() if facts is None]
    if need is not None and without:
        yield (
            f"{shorten_names(without)}: no NVIDIA driver, so what {need.package} is for, CUDA "
            f"{need.text}, cannot be used there"
        )


def _note_old_drivers(nodes: Mapping[str, GpuFacts | None], need: CudaNeed | None) -> Iterator[str]:
    """Yield a line about drivers that run the bundle but are older than its CUDA version's."""
    own = None if need is None else OWN.get(need.version)
    if need is None or own is None:
        return
    runs = [node for node, facts in nodes.items() if driver_problem(node, facts, need) is None]
    older = [node for node in runs if _is_older(nodes[node], own)]
    if older:
        yield (
            f"{shorten_names(older)}: the driver is older than the one of CUDA {need.text} "
            f"({own}): built kernels run, what the driver must compile (PTX) does not"
        )


def format_gpu_line(node: str, facts: GpuFacts) -> str:
    """Return what the preflight's log says of a node: ``hpc07 driver=570.124.06 gpus=4 x ...``."""
    gpus = describe_gpus(facts.gpus) or "none"
    return f"{node} driver={facts.driver or 'unknown'} gpus={gpus}"


def describe_gpus(gpus: Collection[Gpu]) -> str:
    """Return GPUs in words: ``4 x NVIDIA A100-SXM4-80GB (80 GiB)``."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[_describe_gpu(gpu)] = counts.get(_describe_gpu(gpu), 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def _is_older(facts: GpuFacts | None, own: str) -> bool:
    return facts is not None and bool(facts.driver) and newest_cuda(facts) < parse_version(own)


def _note_differing_gpus(nodes: Mapping[str, GpuFacts | None]) -> list[str]:
    groups: dict[str, list[str]] = {}
    kinds = set()
    for node, facts in nodes.items():
        gpus = () if facts is None else facts.gpus
        groups.setdefault(describe_gpus(gpus) or "no NVIDIA GPU", []).append(node)
        kinds.add(frozenset(map(_describe_gpu, gpus)))
    if len(kinds) < 2:
        return []
    parts = [f"{shorten_names(named)}: {kind}" for kind, named in groups.items()]
    return [f"the nodes' GPUs differ, and the slowest sets the pace: {'; '.join(parts)}"]


def _describe_gpu(gpu: Gpu) -> str:
    """Return a GPU without its number: its name, its memory, its MIG instances."""
    size = f" ({round(gpu.memory / (1 << 30))} GiB)" if gpu.memory else ""
    mig = f" as MIG {'+'.join(gpu.mig)}" if gpu.mig else ""
    return gpu.name + size + mig


# --- The ranks of a job: how they are started, and what has become of them -----------------------

_T = TypeVar("_T")


def start_ranks(state: State) -> None:
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
        state.result = _add_outcome(state.result, state)


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
            self._state.create_rank_logs(event.node)

    def complete(self) -> None:
        """Create the logs of ranks that were never started."""
        if self._keep_numbers and self._settled:
            self._state.create_rank_logs(*self._state.job.nodes)


def _note_cpus(state: State) -> None:
    layers = None if state.bundle is None else state.bundle.manifest.layers
    may_have = layers is None or any(layer.name == "accelerate" for layer in layers)
    if may_have and USE_CPU not in os.environ:
        why = "not every node has a GPU, and without it accelerate's ranks would not meet"
        state.note(f"{USE_CPU}=true: {why}")


def _add_outcome(result: JobEnds, state: State) -> JobEnds:
    answers = state.answers_of(LaunchAnswer)
    every = answers.values()
    failures = _join_tuples(answer.failures for answer in every)
    return replace(
        result,
        exit_codes={
            node: 1 if answer.exit_code is None else answer.exit_code
            for node, answer in answers.items()
        },
        task_codes=dict(state.task_codes),
        failures=failures,
        tails={node: answer.tail for node, answer in answers.items() if answer.tail},
        stopped=tuple(node for node, answer in answers.items() if answer.stopped),
        lingering=_join_tuples(answer.lingering for answer in every),
        vanished=_join_tuples(answer.vanished for answer in every),
        # Without a failure nobody asks who ended first.
        left=_join_tuples(answer.left for answer in every) if failures else None,
    )


def _join_tuples(parts: Iterable[tuple[_T, ...]]) -> tuple[_T, ...]:
    return tuple(itertools.chain.from_iterable(parts))


def list_rank_notes(state: State) -> tuple[str, ...]:
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


# --- The phases of a job, in their order: each asks the nodes, then uses their answers -----------


class Phase:
    """One step of a job, on all of its nodes at once."""

    name: PhaseName
    """Its name in the events ``begin`` and ``end``, and in the result's ``seconds``."""

    def ask(self, state: State) -> None:
        """Ask the nodes; ``state.answers`` then has the answer of each."""

    def use(self, state: State) -> None:
        """Learn from the answers; leave out the nodes that have a problem, or fail."""


def phases_of(job: Job) -> tuple[Phase, ...]:
    """Return the phases of a job."""
    if job.action is Action.CLEAN:
        return (CleanPhase(),)
    check = (PreflightPhase(), PlacePhase(), UnpackPhase(), ProbePhase())
    if _checks_deeply(job):
        return (*check, DeepCheckPhase(), AllReducePhase())
    return (*check, LaunchPhase()) if job.action is Action.RUN else check


def _checks_deeply(job: Job) -> bool:
    return job.deep and job.action is Action.VERIFY


class PreflightPhase(Phase):
    """Look before anything is sent: every problem of every node at once."""

    name = PhaseName.PREFLIGHT

    def ask(self, state: State) -> None:
        """Ask for the facts of each node."""
        with collect.run_dir_marker(state.job) as marker:
            state.ask(self.name, lambda node: _preflight_request(state, node, marker))

    def use(self, state: State) -> None:
        """Keep the facts, log them, and decide how many ranks each node gets."""
        check_drivers(state)
        state.facts = state.answers_of(PreflightAnswer)
        lines: list[str] = []
        for node, facts in state.facts.items():
            lines += _preflight_lines(state, node, facts)
        seconds = [facts.check_seconds for facts in state.facts.values()]
        state.result = replace(state.result, check_seconds=max(seconds, default=0.0))
        state.logs.preflight(lines)
        _refuse_interface_of_none(state)
        _note_addresses(state)
        _note_unchecked(state)
        _warn_of_memory(state)
        _add_same_host_problems(state)
        state.leave_out_or_fail()
        state.choose_nproc()


class PlacePhase(Phase):
    """Plan what must travel; the sending is part of the unpacking."""

    name = PhaseName.PLACE

    def use(self, state: State) -> None:
        """Make the plan from the facts of the nodes."""
        placement.make_and_emit_plan(state)


class UnpackPhase(Phase):
    """Make the environment on every node."""

    name = PhaseName.UNPACK

    def ask(self, state: State) -> None:
        """Carry out the plan."""
        placement.execute_plan(state)

    def use(self, state: State) -> None:
        """Log where each environment is, and report those that were repaired."""
        answers = state.answers_of(UnpackAnswer)
        times = (answer.unpack_seconds for answer in answers.values())
        own = [seconds for seconds in times if seconds is not None]
        state.result = replace(
            state.result, send_seconds=state.send_seconds, unpack_seconds=max(own, default=None)
        )
        for node, answer in answers.items():
            if answer.ok:
                action = "reused" if answer.reused else "staged"
                state.log_line(node, f"{node} {action} -> {answer.path}")
            if answer.mended is not None:
                repaired = {**(state.result.repaired or {}), node: answer.mended}
                state.result = replace(state.result, repaired=repaired)
                if state.facts[node].damage is None:
                    _warn_of_damage(state, node, answer.mended)
        state.leave_out_or_fail()


class ProbePhase(Phase):
    """Check on every node that the environment is what was built, and runs."""

    name = PhaseName.PROBE

    def ask(self, state: State) -> None:
        """Let each node's environment describe itself."""
        head = state.facts[state.job.nodes[0]].address
        state.ask(self.name, lambda node: ProbeRequest(**state.placed(node), head=head))

    def use(self, state: State) -> None:
        """Log the answers, and each warning once with the nodes that have it."""
        answers = state.answers_of(ProbeAnswer)
        for node, answer in answers.items():
            if answer.line:
                state.log_line(node, answer.line)
        warned = [(node, str(one)) for node, answer in answers.items() for one in answer.warnings]
        state.note_nodes(warned, warning=True)
        if not _checks_deeply(state.job):  # else problems are reported with their causes
            state.leave_out_or_fail()


class DeepCheckPhase(Phase):
    """Look closely at every node, also where the probe has found something."""

    name = PhaseName.DEEP

    def ask(self, state: State) -> None:
        """Compare every file, and the nodes with each other."""
        from . import deep_check

        deep_check.check_nodes(state)


class AllReducePhase(Phase):
    """Let ranks communicate on the nodes that are well, then report all problems of all nodes."""

    name = PhaseName.ALL_REDUCE

    def ask(self, state: State) -> None:
        """Start the ranks of an all-reduce."""
        from . import deep_check

        deep_check.all_reduce(state)

    def use(self, state: State) -> None:
        """Leave out the nodes that have a problem, or fail."""
        state.leave_out_or_fail()


class LaunchPhase(Phase):
    """Start the ranks, and wait for all of them."""

    name = PhaseName.LAUNCH

    def ask(self, state: State) -> None:
        """Start the ranks, again without the nodes that kept all of them from beginning."""
        start_ranks(state)
        while state.leave_out_unreachable():
            start_ranks(state)

    def use(self, state: State) -> None:
        """Fail where ranks have failed, unless an elastic group has gone on without them."""
        state.result = replace(state.result, notes=list_rank_notes(state))
        if state.job.launch.elastic is not None:
            state.leave_out_or_fail()
        state.fail_if_any()


class CleanPhase(Phase):
    """Remove environments that nobody uses."""

    name = PhaseName.CLEAN

    def ask(self, state: State) -> None:
        """Let each node remove its own."""
        state.ask(self.name, lambda node: CleanRequest(**state.common(node)))

    def use(self, state: State) -> None:
        """Fail where something could not be removed."""
        state.fail_if_any()


def _preflight_request(state: State, node: str, marker: str) -> PreflightRequest:
    request = PreflightRequest(**state.common(node), marker=marker)
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


def _preflight_lines(state: State, node: str, facts: PreflightAnswer) -> list[str]:
    lines = [format_preflight_line(facts)]
    if facts.gpus is not None:
        lines.append(format_gpu_line(node, facts.gpus))
    if facts.damage is not None:
        _warn_of_damage(state, node, facts.damage)
        lines.append(f"{node} damage: {facts.damage}")
    lines += [f"{node} problem: {problem}" for problem in facts.problems]
    return lines


def _refuse_interface_of_none(state: State) -> None:
    """Refuse a setting that names an interface of no node; no node is at fault."""
    lacking = [
        problem
        for facts in state.facts.values()
        for problem in (*facts.problems, facts.no_head)
        if problem is not None and problem.code is ProblemCode.NO_INTERFACE
    ]
    if len(lacking) > 1 and len(lacking) == len(state.job.nodes):
        names = ", ".join(sorted({problem.where for problem in lacking}))
        values = {**lacking[0].values, "names": names}
        raise NodeError(Problem(ProblemCode.INTERFACE_OF_NO_NODE, "[launch] interface", values))


def _add_same_host_problems(state: State) -> None:
    """Add a problem for each host that the user has named twice, by different names."""
    if state.job.allocation is not Allocation.SSH:
        return
    first: dict[str, str] = {}
    for node, facts in state.facts.items():
        named = first.setdefault(facts.address, node) if facts.address else node
        if named != node:
            values = {"first": named, "address": facts.address}
            problem = Problem(ProblemCode.SSH_SAME_HOST, node, values)
            state.answers[node] = replace(facts, ok=False, problems=(*facts.problems, problem))


def _note_addresses(state: State) -> None:
    """Report nodes that have an unexpected address, once for each reason."""
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


def _note_unchecked(state: State) -> None:
    """Report nodes that could not check the signature, once for each reason."""
    unchecked = (
        "the bundle's signature was not checked there, only its id, whose signature was good where "
        "the job was prepared"
    )
    texts = [
        (node, f"{unchecked} ({facts.unchecked})")
        for node, facts in state.facts.items()
        if facts.unchecked
    ]
    state.note_nodes(texts, warning=True)


def _warn_of_memory(state: State) -> None:
    """Warn of environments in a memory file system."""
    text = "the environment is in /dev/shm, where it takes memory until `stager clean` removes it"
    nodes = [node for node, facts in state.facts.items() if facts.root.startswith(MEMORY)]
    state.note_nodes(((node, text) for node in nodes), warning=True)


def _warn_of_damage(state: State, node: str, damage: Problem) -> None:
    state.note(f"{node}: {damage}", warning=True)
