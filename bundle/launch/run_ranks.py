"""Running the ranks of one node: through ``torchrun``, or one rank that Slurm has started."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..channel.agent_channel import AgentChannel
from ..environment import unpack
from ..node import machine, node_root, removal
from ..protocol import messages
from ..protocol.counts import format_count
from ..protocol.enumerations import Allocation, Launcher
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..redaction.secrets import mask_arguments
from ..system import files, network, processes, signals
from ..system.own_program import read_source
from . import commands, program_variables, rank_results
from .commands import EarlyLauncher, choose_threads
from .compiled_code import measure_code, remove_incomplete_code
from .inspection import WATCH, start_inspector
from .output_reader import OnOutput, Outputs, RecentOutput, run_launcher
from .program_variables import JobDirectories, drop_schedulers, make_rank_variables
from .rank_monitor import Rank, RankMonitor
from .staged_files import make_work_dir

_SHOWN = 30


class _Start(NamedTuple):
    argv: list[str]
    variables: dict[str, str]
    cwd: str
    ranks: list[range]  # that each local rank may be; none if Slurm starts the rank


def run_ranks(
    request: messages.LaunchRequest, channel: AgentChannel, early: EarlyLauncher | None = None
) -> messages.LaunchAnswer:
    """Start this task's ranks and pass on their output until they end."""
    job, directories = request.job, program_variables.locate_directories(request)
    link = network.choose_link(job.launch.interface, request.node, request.group.address)
    native = job.launch.launcher is Launcher.SRUN
    private = _make_job_dir(directories.job_dir, job.launch.launcher)
    begun = time.time()
    with unpack.hold_during(directories.root, job.bundle_id), private:
        start = _prepare_start(directories, link, request)
        own_rank = int(start.variables["RANK"]) if native else None
        argv = tuple(mask_arguments(start.argv))
        channel.emit(messages.Started(argv=argv, interface=link.interface))
        outputs = _open_outputs(directories.job_dir, start.ranks, job.launch.grace_seconds)
        start.variables.update(outputs.variables)
        monitor = outputs.monitor

        def send_output(rank: int | None, data: bytes) -> None:
            channel.output(own_rank if native else rank, data)

        _report_events(outputs, channel, request.node, send_output)
        if job.allocation is Allocation.SLURM and not machine.has_step_cgroup():
            signals.drop_user_signals()  # ranks get Slurm's own: a second one may end them
        signals.take_user_signals()  # those from before the start are for no rank
        answering = _answer_looks(directories.job_dir, outputs, channel)
        watch = answering if job.launch.watch else contextlib.nullcontext()
        limit = threading.Timer(request.limit or 0.0, os.kill, (os.getpid(), signal.SIGTERM))
        limit.daemon = True
        if request.limit is not None:
            limit.start()
        with contextlib.closing(outputs), watch, contextlib.ExitStack() as stack:
            stack.callback(limit.cancel)
            program = (start.argv, start.variables, start.cwd)
            running = early.launch(*program) if early else None
            killed_before = machine.oom_kills()
            code, recent = run_launcher(*program, outputs, send_output, running)
            signals.ignore_signals()  # the ranks have ended: what is left is to say how
        found = _find_failures(directories.job_dir, request.node, start, code, recent, monitor)
        if not request.shared:
            os.utime(start.cwd)  # keep it from being swept: its outputs are collected later
        failed = rank_results.explain_oom_kills(found, killed_before, machine.oom_kills())
        for record in failed:
            if record not in found:
                channel.output(record.rank, f"{record.lines[-1]}\n".encode())
    sent = {"" if rank is None else str(rank): size for rank, size in channel.sent.items()}
    answer = messages.LaunchAnswer(exit_code=code, failures=tuple(failed), sent=sent)
    if request.code:
        answer = replace(answer, code=_look_at_code(request, directories, begun, failed))
    return _add_observations(answer, request.node, monitor, recent)


def _look_at_code(
    request: messages.LaunchRequest,
    directories: JobDirectories,
    begun: float,
    failed: Sequence[messages.FailureRecord],
) -> messages.CodeAmount:
    """Return what was compiled; remove what may be incomplete, and a directory of the job's own."""
    path = node_root.code_path(directories.root, request.code)
    if failed:
        remove_incomplete_code(path, begun)
    amount = measure_code(path, begun)
    if request.removes_code:
        removal.delete_as_far_as_possible(path)
    return amount


def _report_events(
    outputs: Outputs, channel: AgentChannel, node: str, send_output: OnOutput
) -> None:
    def note_signal(number: int, ranks: list[int]) -> None:
        name = signal.Signals(number).name
        for rank in ranks:
            send_output(rank, f"stager: {name} was passed on to rank {rank}\n".encode())

    outputs.on_signal = note_signal
    outputs.on_finished = lambda: channel.emit(messages.RanksEnded())
    outputs.monitor.on_lingering = lambda rank: channel.emit(_describe_lingering(node, rank))


@contextlib.contextmanager
def _answer_looks(job_dir: str, outputs: Outputs, channel: AgentChannel) -> Iterator[None]:
    """Report what the ranks do when the driver asks, and those that do not end when told to."""
    folder, list_pids = os.path.join(job_dir, WATCH), outputs.monitor.list_pids
    with start_inspector(folder, list_pids, channel.emit) as ask, channel.answer_looks(ask):
        outputs.on_half_grace = ask
        yield


def _find_failures(
    job_dir: str, node: str, start: _Start, code: int, recent: RecentOutput, monitor: RankMonitor
) -> list[messages.FailureRecord]:
    if not code:
        return []
    if not start.ranks:
        who = (node, int(start.variables["RANK"]), int(start.variables["LOCAL_RANK"]))
        status = code if code <= 128 else 128 - code
        seen = rank_results.make_record(*who, status, recent.tail, time.time())
        own = rank_results.find_own_record(job_dir, seen)
        return [replace(own, told_to_end=monitor.stopped)]
    by_rank = {rank: list(lines) for rank, lines in recent.by_rank.items() if rank is not None}
    failed = rank_results.find_failures(job_dir, node, recent.tail, time.time(), by_rank)
    for rank in monitor.list_unreported({record.rank for record in failed}):
        numbers = (rank.rank, rank.local_rank, rank.code or 0)
        lines = by_rank.get(rank.rank, ())
        failed.append(rank_results.make_record(node, *numbers, lines, rank.ended or 0.0))
    return rank_results.complete_records(failed, monitor, list(recent.by_rank.get(None, ())))


def _add_observations(
    answer: messages.LaunchAnswer, node: str, monitor: RankMonitor, recent: RecentOutput
) -> messages.LaunchAnswer:
    failed = {record.rank for record in answer.failures}
    told_some = bool(rank_results.find_signalled(recent.by_rank.get(None, ())))
    vanished = monitor.list_vanished(failed) if told_some else []
    left = [
        messages.Departure(node, rank.rank, since, goes_on=rank.has_left_and_gone_on)
        for since, rank in monitor.list_departed(failed)[:1]  # later ones only follow from it
    ]
    return replace(
        answer,
        tail=tuple(recent.tail)[-_SHOWN:] if answer.exit_code else (),
        stopped=monitor.stopped,
        first_rank=monitor.ranks[0].began if 0 in monitor.ranks else None,
        left=tuple(left),
        vanished=tuple(messages.Vanished(node, rank.rank, rank.ended) for rank in vanished),
        lingering=tuple(_describe_lingering(node, rank) for rank in monitor.list_lingering()),
        joined=monitor.list_joined(joined=True),
        alone=monitor.list_joined(joined=False),
    )


def _describe_lingering(node: str, rank: Rank) -> messages.Lingering:
    return messages.Lingering(node, rank.rank, rank.finished, rank.left, rank.lingers or ())


def _prepare_start(
    directories: JobDirectories, link: network.Route, request: messages.LaunchRequest
) -> _Start:
    job, group, launcher = request.job, request.group, request.job.launch.launcher
    program = [os.path.join(directories.job_dir, commands.WRAPPER), *job.launch.command]
    base = os.environ if job.allocation is Allocation.SLURM else drop_schedulers(os.environ)
    if launcher is Launcher.SRUN:
        cpus, nproc = int(os.environ.get("SLURM_CPUS_PER_TASK", "1")), 1
    else:
        cpus, nproc = machine.host_facts().cpus // request.nodes_here, group.nproc
    threads = choose_threads(job.launch.omp_num_threads, cpus, nproc)
    variables = make_rank_variables(directories, request, link.interface, threads, base)
    program_variables.prepare_hub_cache(directories, os.environ)
    cwd = job.run_dir
    if request.own:  # a program of ours: the user's may have a module of the same name
        variables["STAGER_PROJECT"] = variables["STAGER_TRAINER"]
        cwd = directories.job_dir
    elif not request.shared:
        cwd = make_work_dir(directories, job)
    if launcher is Launcher.SRUN:
        place = (os.environ["SLURM_NTASKS"], group.nproc, group.address, group.port)
        variables |= program_variables.make_task_variables(os.environ, *place)
        return _Start([commands.locate_python(directories), *program], variables, cwd, [])
    if launcher is Launcher.PROCESSES:
        node = (nproc, request.node_rank, group.address, group.port)
        variables |= program_variables.make_group_variables(len(job.nodes) * nproc, *node)
        argv = commands.make_processes_argv(directories, request, program)
    else:
        argv = commands.make_torchrun_argv(directories, request, link.address, program)
    return _Start(argv, variables, cwd, commands.list_possible_ranks(request))


@contextlib.contextmanager
def _make_job_dir(path: str, launcher: Launcher) -> Iterator[None]:
    """Make and remove the job's directory; it is locked, so that a killed agent's is swept."""
    removal.delete_as_far_as_possible(path)  # of the same job, before it was requeued
    held = node_root.make_locked_directory(path)
    programs = {commands.WRAPPER: "launch.wrapper"}
    if launcher is Launcher.PROCESSES:
        programs[commands.PROCESSES] = "launch.rank_processes"
    try:
        os.mkdir(os.path.join(path, WATCH), 0o700)
        for name, source in programs.items():
            with open(os.path.join(path, name), "wb") as handle:
                handle.write(read_source(source))
        yield
    finally:
        removal.delete_as_far_as_possible(path)
        os.close(held)


def _open_outputs(job_dir: str, ranks: list[range], grace: float) -> Outputs:
    try:
        return Outputs(os.path.join(job_dir, "output"), ranks, grace)
    except OSError as exc:
        full, other = ProblemCode.PIPES_DISK_FULL, ProblemCode.PIPES_NOT_MADE
        problem = files.disk_problem(exc, job_dir, full, other)
        if exc.errno == errno.EMFILE:
            limit = format_count(processes.get_open_file_limit(), "open file")
            ranks_here, why = format_count(len(ranks), "rank"), files.error_text(exc)
            values = {"why": why, "ranks": ranks_here, "limit": limit}
            problem = Problem(ProblemCode.PIPES_OVER_LIMIT, job_dir, values)
        raise NodeError(problem) from exc
