"""Running the ranks of one node: through ``torchrun``, or one rank that Slurm has started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import launch, net, probe, unpack
from ..job import Job
from ..node import host
from ..problem import NodeError, Problem
from ..talking.hearing import Hearing
from ..unpacking import venv
from . import ranks
from .early import EarlyLauncher
from .following import RANKS_ENDED, Outputs, attend

_SHOWN = 30


@dataclass(frozen=True)
class _Start:
    """How the ranks of this task are started."""

    argv: list[str]
    variables: dict[str, str]
    cwd: str
    ranks: int
    """Ranks of this task."""


def run_ranks(job: Job, hearing: Hearing, early: EarlyLauncher | None = None) -> dict[str, Any]:
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
        hearing.emit({"event": "started", "argv": begin.argv, "interface": link.interface})
        try:
            folder = os.path.join(place.job_dir, "output")
            outputs = Outputs(folder, begin.ranks, job.launch.grace_seconds)
        except OSError as exc:
            raise NodeError(_no_pipes(place, exc)) from exc

        def pass_on(rank: int | None, lines: list[str]) -> None:
            rank = int(begin.variables["RANK"]) if native else rank
            hearing.emit({"event": "output", "rank": rank, "lines": lines})

        outputs.on_over = lambda: hearing.emit({"event": RANKS_ENDED})
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
        elif code:
            own = {rank: list(lines) for rank, lines in heard.own.items()}
            failed = ranks.failures(place.job_dir, group.node, heard.tail, ended, own)
        for record, line in ranks.out_of_memory(failed, killed_before, host.oom_kills()):
            record["lines"].append(line)
            hearing.emit({"event": "output", "rank": record["rank"], "lines": [line]})
    tail = list(heard.tail)[-_SHOWN:] if code else []
    return {"exit_code": code, "failures": failed, "tail": tail}


def _of_native(
    place: launch.Place, node: str, variables: Mapping[str, str], code: int, lines: list[str]
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


def place_of(job: Job, request: Mapping[str, Any]) -> launch.Place:
    """Where things lie on this node."""
    root = str(request["root"])
    task = os.environ.get("SLURM_LOCALID", "0") if job.launch.launcher == "srun" else "0"
    return launch.Place(
        root=root,
        environment=unpack.env_path(root, job.bundle_id),
        job_dir=os.path.join(root, "jobs", f"{job.id}.{request['node_rank']}.{task}"),
    )


def work_dir(job: Job, root: str) -> str:
    """Where ranks run on a node that does not share the run directory."""
    return os.path.join(root, "jobs", f"{job.id}.work")


def _group(job: Job, request: Mapping[str, Any]) -> tuple[launch.Group, net.Link]:
    shared, node = request["group"], str(request["node"])
    nproc = int(shared["nproc"])
    link = net.choose_link(job.launch.interface, node, str(shared["address"]))
    if job.launch.launcher == "srun":
        cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        threads = launch.choose_threads(job.launch.omp_num_threads, cpus, 1)
    else:
        cpus = int(str(probe.host_facts()["cpus"])) // int(request["nodes_here"])
        threads = launch.choose_threads(job.launch.omp_num_threads, cpus, nproc)
    group = launch.Group(
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
    )
    return group, link


def _start(
    job: Job, place: launch.Place, group: launch.Group, request: Mapping[str, Any]
) -> _Start:
    program = launch.wrapper(place, job.launch.command)
    variables = launch.rank_variables(place, group, os.environ)
    cwd = job.run_dir
    if request.get("own"):  # a program of ours: the user's may have a module of the same name
        variables["STAGER_PROJECT"] = variables["STAGER_TRAINER"]
        cwd = place.job_dir
    elif not request["shared"]:
        cwd = work_dir(job, place.root)
        os.makedirs(cwd, mode=0o700, exist_ok=True)
    if job.launch.launcher == "srun":
        variables |= launch.native_variables(group, os.environ)
        return _Start(launch.native(place, program), variables, cwd, 0)
    variables["STAGER_OUTPUT"] = os.path.join(place.job_dir, "output")
    argv = launch.torchrun(place, group, f"{job.id}.{job.attempt}", program)
    return _Start(argv, variables, cwd, group.nproc)


@contextlib.contextmanager
def _job_dir(path: str) -> Iterator[None]:
    """This job's private directory, with the wrapper in it; it goes when the job ends."""
    shutil.rmtree(path, ignore_errors=True)  # of the same job, before it was put back in the queue
    os.makedirs(path, mode=0o700)
    try:
        with open(os.path.join(path, "run_wrapper.py"), "wb") as handle:
            handle.write(venv.source_of("wrapper"))
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


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


def _no_pipes(place: launch.Place, exc: OSError) -> Problem:
    fix = "see the space and the inodes there"
    return Problem("the ranks' pipes cannot be made", place.job_dir, str(exc.strerror or exc), fix)
