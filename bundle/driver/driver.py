"""The driver: runs inside the allocation and takes all nodes through the phases of a job.

It prints events (:mod:`bundle.protocol.events`), ``job`` first and ``result`` last.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from ..format.archive import BundleFile
from ..protocol.counts import format_count
from ..protocol.enumerations import EXIT_INTERRUPTED, EXIT_JOB, Allocation
from ..protocol.events import JobBegins, PhaseBegins, PhaseEnds
from ..protocol.job import Job
from ..protocol.messages import LaunchAnswer
from ..protocol.problem import NodeError, Problem, make_ending_problem
from ..system import processes, signals
from . import collect
from .logs import Logs, cluster_name
from .output import describe_losses
from .phases import Phase, phases_of
from .placement import convert_disk_errors
from .state import NodesFailed, State
from .transports import slurm_text
from .transports.local import LocalTransport
from .transports.transport import Transport

READER_SECONDS = 60.0  # for a reader that has stopped, at the end; it keeps an allocation


def drive(job: Job, transport: Callable[[Job], Transport] | None = None) -> int:
    """Take the job through its phases; return the exit status, 0 or 3 (130 when interrupted)."""
    signals.end_on_signals()
    signals.receive_user_signals()
    processes.raise_open_files()
    spares = job.spares
    if job.allocation is Allocation.SLURM:
        job = slurm_text.bind_allocation(job, os.environ)
    state = State(job, Logs(job))
    state.missing_spares = spares - job.spares
    try:
        _run_phases(state, transport or _choose_transport(job))
        signals.ignore_signals()  # before this block ends: a signal in between would have no result
    except signals.Stopped:
        problems = {
            node: answer.problems
            for node, answer in state.answers.items()  # what they had reported before
            if answer.problems and not (isinstance(answer, LaunchAnswer) and answer.stopped)
        }
        state.result = replace(state.result, problems=problems, interrupted=True)
    try:
        return _conclude(state)
    finally:
        if state.has_transport:
            state.transport.close()
        state.display.drain(READER_SECONDS)


def _run_phases(state: State, transport: Callable[[Job], Transport]) -> None:
    try:
        with contextlib.ExitStack() as kept_open:
            _go_through_phases(state, transport, kept_open)
    except NodesFailed as exc:
        problems = {node: answer.problems for node, answer in exc.answers.items()}
        state.result = replace(state.result, problems=problems)
    except NodeError as exc:
        problem = exc.problem
        problems = dict.fromkeys(_find_problem_places(problem, state.job), (problem,))
        of_driver = problem.where not in state.job.nodes
        state.result = replace(state.result, problems=problems, of_driver=of_driver)


def _find_problem_places(problem: Problem, job: Job) -> tuple[str, ...]:
    """Return the node of a driver's problem, else this host: no node, or all of them (local)."""
    if problem.where in job.nodes:
        return (problem.where,)
    if job.allocation is Allocation.LOCAL:
        return job.nodes
    return (os.environ.get("SLURMD_NODENAME") or os.uname().nodename,)


def _choose_transport(job: Job) -> Callable[[Job], Transport]:
    if job.allocation is Allocation.LOCAL:
        return LocalTransport
    if job.allocation is Allocation.SSH:
        from .transports.ssh import SshTransport

        return SshTransport
    from .transports.slurm import SlurmTransport

    return SlurmTransport


def _go_through_phases(
    state: State, transport: Callable[[Job], Transport], kept_open: contextlib.ExitStack
) -> None:
    job = state.job
    try:  # the bundle is in use until the job ends
        state.bundle = kept_open.enter_context(BundleFile(job.bundle, job.bundle_id))
    except NodeError:  # only nodes may see it
        if job.allocation is not Allocation.SLURM or os.path.exists(job.bundle):
            raise
    finally:
        state.emit(JobBegins(job.nodes, job.log_dir, cluster_name(job), job.bundle_id))
        if state.missing_spares:
            count = format_count(job.spares, "spare node")
            state.note(f"the allocation has room for {count} only", warning=True)
        if state.logs.older:
            state.note(f"files of another job {job.id} have been moved to {state.logs.older}")
    state.transport = transport(job)
    for phase in phases_of(job):
        _do(phase, state)
        if state.plan is not None and job.dry_run:
            break


def _do(phase: Phase, state: State) -> None:
    started = time.monotonic()
    state.emit(PhaseBegins(phase.name))
    try:
        with convert_disk_errors():
            phase.ask(state)
            phase.use(state)
    finally:
        seconds = state.seconds[phase.name] = round(time.monotonic() - started, 3)
        state.emit(PhaseEnds(phase.name, seconds))


def _conclude(state: State) -> int:
    problems, interrupted = dict(state.result.problems), state.result.interrupted
    ended_by = _find_ending(state)
    collect.collect_outputs(state, standing=not ended_by)
    if not (interrupted or ended_by):
        state.keep_compiled_code()
    if ended_by:  # its first problem; and it was no interruption by the user
        interrupted = False
        node = state.lost_node or state.job.nodes[0]
        problems[node] = (make_ending_problem(ended_by, state.job.id), *problems.get(node, ()))
    losses = state.output.losses()
    if not (problems or interrupted):
        problems = describe_losses(losses, state.left_out) if losses else {}
    has_failed = bool(problems or interrupted)
    result = replace(
        state.result,
        ok=not has_failed,
        hang=state.result.hang if has_failed else None,
        interrupted=interrupted,
        ended_by=ended_by,
        problems=problems,
        left_out=tuple(sorted(state.left_out)),
        logs_lost=tuple(losses),
        logs_fault=state.logs.fault,
        bytes_broadcast=state.bytes_sent,
        seconds=state.seconds,
    )
    state.emit(result)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_JOB if problems else 0


def _find_ending(state: State) -> str:
    interrupted = state.result.interrupted
    if not (state.result.problems or interrupted):
        return ""
    if state.has_transport:
        if interrupted:
            state.transport.hurry()
        return state.transport.find_ending()
    if interrupted and state.job.allocation is Allocation.SLURM:  # by scancel, right at the start
        from .transports.slurm import find_job_ending

        return find_job_ending(state.job)
    return ""
