"""Running the ranks of one node: through ``torchrun``, or one rank that Slurm has started."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..channel.agent_channel import AgentChannel
from ..checks import probe
from ..environment import unpack, virtual_environment
from ..node import host, locks, removal
from ..protocol.counts import counted
from ..protocol.job import Job
from ..protocol.problem import NodeError, Problem
from ..redaction.masking import masked
from ..system import network, open_files
from . import commands
from . import rank_results as ranks
from .directories import place_of, work_dir
from .early_torchrun import EarlyLauncher
from .output_reader import RANKS_ENDED, Outputs, attend
from .rank_monitor import Rank, RankMonitor

_SHOWN = 30


@dataclass(frozen=True)
class _Start:
    """How the ranks of this task are started."""

    argv: list[str]
    variables: dict[str, str]
    cwd: str
    ranks: list[range]
    """For each local rank of a launcher the ranks that it may be."""


def run_ranks(
    job: Job, hearing: AgentChannel, early: EarlyLauncher | None = None
) -> dict[str, Any]:
    """Start this task's ranks and pass on what they write until they end.

    Args:
        job: the job.
        hearing: what is asked.
        early: a launcher that waits already, on this node.
    """
    request = hearing.request
    place = place_of(job, request)
    group, link = _group(job, request)
    native = job.launch.launcher == "srun"
    with unpack.using(place.root, job.bundle_id), _job_dir(place.job_dir):
        begin = _start(job, place, group, request)
        hearing.emit({"event": "started", "argv": masked(begin.argv), "interface": link.interface})
        try:
            folder = os.path.join(place.job_dir, "output")
            outputs = Outputs(folder, begin.ranks, job.launch.grace_seconds)
        except OSError as exc:
            raise NodeError(_no_pipes(place, exc, len(begin.ranks))) from exc
        begin.variables.update(outputs.variables)

        def pass_on(rank: int | None, data: bytes) -> None:
            hearing.output(int(begin.variables["RANK"]) if native else rank, data)

        monitor = outputs.monitor
        monitor.on_lingering = lambda rank: hearing.emit({"event": "lingering", **_lingering(rank)})
        outputs.on_finished = lambda: hearing.emit({"event": RANKS_ENDED})
        with contextlib.closing(outputs), _limit(request.get("limit")):
            ready = early.go(begin.argv, begin.variables, begin.cwd) if early else None
            killed_before = host.oom_kills()
            code, heard = attend(begin.argv, begin.variables, begin.cwd, outputs, pass_on, ready)
        ended = time.time()
        if not request["shared"]:
            os.utime(begin.cwd)  # in use a while longer: what is in it is still to go home
        failed = []
        if code and native:
            failed = [_of_native(place, group.node, begin.variables, code, list(heard.tail))]
            failed[0]["told_to_end"] = monitor.stopped
        elif code:
            own = {rank: list(lines) for rank, lines in heard.own.items()}
            failed = ranks.failures(place.job_dir, group.node, heard.tail, ended, own)
            known = {record["rank"]: record for record in failed}
            silent = monitor.unreported(known)
            failed += [ranks.unreported(rank, group.node, own) for rank in silent]
            failed = ranks.settled(failed, monitor, list(heard.launcher))
        for record, line in ranks.out_of_memory(failed, killed_before, host.oom_kills()):
            record["lines"].append(line)
            hearing.output(record["rank"], f"{line}\n".encode())
    tail = list(heard.tail)[-_SHOWN:] if code else []
    watched = _watched(monitor, group.node, failed, told=bool(ranks.told_by(heard.launcher)))
    sent = {"" if rank is None else str(rank): count for rank, count in hearing.sent.items()}
    return {"exit_code": code, "failures": failed, "tail": tail, "sent": sent, **watched}


def _watched(
    monitor: RankMonitor, node: str, failed: list[dict[str, Any]], *, told: bool
) -> dict[str, Any]:
    """What else is known of the ranks: who ended well first, who went on, and who met nobody.

    Args:
        monitor: what is known of them.
        node: this node.
        failed: the records of those that failed.
        told: whether the launcher had told some to end.
    """
    known = monitor.ranks.values()
    by_rank = {record["rank"]: record for record in failed}
    left = monitor.left(by_rank)[:1]  # who ended later tells nothing more
    vanished = monitor.vanished(by_rank) if told else []
    return {
        "stopped": monitor.stopped,
        "left": [
            {"node": node, "rank": one.rank, "time": since, "goes_on": not one.ended_well}
            for since, one in left
        ],
        "vanished": [{"node": node, "rank": one.rank, "time": one.ended} for one in vanished],
        "lingering": [{"node": node, **_lingering(rank)} for rank in monitor.lingering()],
        "joined": [rank.rank for rank in known if rank.joined],
        "alone": [rank.rank for rank in known if rank.joined is False],
    }


def _lingering(rank: Rank) -> dict[str, Any]:
    """What there is to say of a rank whose process goes on for too long."""
    return {
        "rank": rank.rank,
        "finished": rank.finished,
        "left": rank.left,
        "waits_for": list(rank.lingers or ()),
    }


def _of_native(
    place: commands.Place, node: str, variables: Mapping[str, str], code: int, lines: list[str]
) -> dict[str, Any]:
    """The failure of a rank that Slurm has started."""
    rank: dict[str, Any] = {
        "rank": int(variables["RANK"]),
        "local_rank": int(variables["LOCAL_RANK"]),
        "node": node,
        "time": time.time(),
        "exit_code": code if code <= 128 else 128 - code,
    }
    return ranks.single(place.job_dir, rank, lines)


def _group(job: Job, request: Mapping[str, Any]) -> tuple[commands.Group, network.Link]:
    shared, node = request["group"], str(request["node"])
    nproc = int(shared["nproc"])
    link = network.choose_link(job.launch.interface, node, str(shared["address"]))
    if job.launch.launcher == "srun":
        cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        threads = commands.choose_threads(job.launch.omp_num_threads, cpus, 1)
    else:
        cpus = int(str(probe.host_facts()["cpus"])) // int(request["nodes_here"])
        threads = commands.choose_threads(job.launch.omp_num_threads, cpus, nproc)
    group = commands.Group(
        node=node,
        node_rank=int(request["node_rank"]),
        nnodes=len(job.nodes),
        nproc=nproc,
        address=str(shared["address"]),
        port=int(shared["port"]),
        interface=link.interface,
        backend=str(shared["backend"]),
        threads=threads,
        max_restarts=job.launch.max_restarts,
        elastic=job.launch.elastic,
        grace_seconds=job.launch.grace_seconds,
        own_address=link.address,
        on_cpus=bool(shared.get("on_cpus")),
    )
    return group, link


def _start(
    job: Job, place: commands.Place, group: commands.Group, request: Mapping[str, Any]
) -> _Start:
    program = commands.wrapper(place, job.launch.command)
    variables = commands.rank_variables(place, group, os.environ, job.launch.pass_env)
    cwd = job.run_dir
    if request.get("own"):  # a program of ours: the user's may have a module of the same name
        variables["STAGER_PROJECT"] = variables["STAGER_TRAINER"]
        cwd = place.job_dir
    elif not request["shared"]:
        cwd = work_dir(job, place.root)
        os.makedirs(cwd, mode=0o700, exist_ok=True)
    if job.launch.launcher == "srun":
        variables |= commands.native_variables(group, os.environ)
        return _Start(commands.native(place, program), variables, cwd, [])
    argv = commands.torchrun(place, group, f"{job.id}.{job.attempt}", program)
    return _Start(argv, variables, cwd, commands.possible_ranks(group))


@contextlib.contextmanager
def _job_dir(path: str) -> Iterator[None]:
    """This job's private directory, with what each rank runs first; it goes when the job ends.

    It is locked as long: one that a killed agent has left is known by that, and swept later.
    """
    removal.sweep(path)  # of the same job, before it was put back in the queue
    held = locks.make_held(path)
    try:
        for name, source in (
            ("run_wrapper.py", "launch.wrapper"),
            ("_stager_watch.py", "launch.watch"),
        ):
            with open(os.path.join(path, name), "wb") as handle:
                handle.write(virtual_environment.source_of(source))
        yield
    finally:
        removal.sweep(path)
        os.close(held)


@contextlib.contextmanager
def _limit(seconds: float | None) -> Iterator[None]:
    """End the ranks, as if we were told to, if the block runs for longer."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _no_pipes(place: commands.Place, exc: OSError, ranks: int) -> Problem:
    why, fix = str(exc.strerror or exc), "see the space and the inodes there"
    if exc.errno == errno.EMFILE:
        most = counted(open_files.open_files(), "open file")
        why = f"{why}: a pipe is needed for {counted(ranks, 'rank')}, and the limit is {most}"
        fix = "raise the hard limit of open files (ulimit -Hn) on the nodes, or start fewer ranks"
    return Problem("the ranks' pipes cannot be made", place.job_dir, why, fix)
