"""Measurements that the model is fitted to and compared with; real ones, on ``scripts/cluster``.

As root, where Slurm and ``tc`` are installed, on a quiet machine. Each measurement is written to
the file as soon as it is there, with the load of the machine before it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bundle.driver.transports.relay_source import find_candidates
from bundle.transfer.relay import listen
from bundle.transfer.relay_chunks import ChunkFile, choose_chunk_size
from bundle.transfer.relay_peers import RelayPlace
from bundle.transfer.relay_process import RelayProcess

from ..cluster import Cluster, running
from ..errors import BenchError
from ..output import prepare, say
from ..process import Command, run
from ..report import machine
from ..tools import REPO

MEASURED = Path(__file__).parent / "measured.json"
TICKS = os.sysconf("SC_CLK_TCK")
_LOOPBACK = (8 << 20, 16 << 20, 64 << 20, 256 << 20)
"""Sizes of files whose chunks have 64 KiB (the first two), 256 KiB and 1 MiB."""


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """A job that is measured."""

    nodes: int
    megabytes: int
    """Of noise in the project; 0 for a bundle of next to nothing."""
    mbits: int = 0
    """Limit of each link in Mbit/s, in each direction; 0 for none."""
    transfer: str = "relay"


@dataclass(frozen=True, kw_only=True)
class JobMeasured:
    """The measured seconds of a job."""

    shape: JobShape
    load: float
    """Of the machine, over the minute before."""
    wall: float
    """The command, from its start to its end."""
    phases: Mapping[str, float]
    """The driver's phases."""
    sent: float = 0.0
    """Until the last node had the file, as the driver saw it."""
    sent_bytes: int = 0
    driver_cpu: float = 0.0
    """CPU seconds of the command, the driver, ``srun`` and ``salloc``."""
    node_cpu: float = 0.0
    """CPU seconds of all nodes together."""
    others_cpu: float = 0.0
    """CPU seconds that went to everything else on the machine meanwhile."""

    @property
    def others(self) -> float:
        """CPUs that everything else on the machine took, on the average."""
        return self.others_cpu / self.wall


@dataclass(frozen=True, kw_only=True)
class RelayMeasured:
    """The measured costs of a relay's processes for a file, over the loopback interface."""

    bytes: int
    chunks: int
    source_cpu: float
    """CPU seconds of the process that had the file."""
    node_cpu: float
    """CPU seconds of the process that took it."""
    seconds: float


@dataclass
class Measurements:
    """All of them."""

    machine: dict[str, Any] = field(default_factory=dict)
    loopback: list[RelayMeasured] = field(default_factory=list)
    jobs: list[JobMeasured] = field(default_factory=list)

    @property
    def least_disturbed(self) -> list[JobMeasured]:
        """Of each shape the job beside which the least went on."""
        best: dict[JobShape, JobMeasured] = {}
        for job in self.jobs:
            if job.shape not in best or job.others < best[job.shape].others:
                best[job.shape] = job
        return list(best.values())

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps({"schema": 1, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Measurements:
        """Read what was written; nothing if there is no file."""
        if not path.exists():
            return cls()
        raw = json.loads(path.read_text())
        jobs = [{**job, "shape": JobShape(**job["shape"])} for job in raw["jobs"]]
        return cls(
            machine=raw["machine"],
            loopback=[RelayMeasured(**one) for one in raw["loopback"]],
            jobs=[JobMeasured(**job) for job in jobs],
        )


def shapes(most: int) -> list[JobShape]:
    """Return the jobs of a whole run, up to so many nodes, the smaller ones first."""
    counts = [nodes for nodes in (2, 4, 8, 16, 32, 64) if nodes <= most]
    jobs = [JobShape(nodes=nodes, megabytes=0) for nodes in counts]
    # The slower the link, the fewer bytes take as long: many nodes share one machine's memory.
    kinds = {32: (20, 100), 64: (4, 50)}
    for nodes in counts:
        megabytes, mbits = kinds.get(nodes, (40, 200))
        jobs.append(JobShape(nodes=nodes, megabytes=megabytes, mbits=mbits))
    jobs += [JobShape(nodes=nodes, megabytes=40) for nodes in counts if nodes <= 16]
    few = [nodes for nodes in counts if nodes <= 8]
    jobs += [JobShape(nodes=nodes, megabytes=40, mbits=200, transfer="sbcast") for nodes in few]
    return jobs


# --- jobs on a cluster ---------------------------------------------------------------------------


class JobBench:
    """Runs jobs on one cluster, and takes their time."""

    def __init__(self, cluster: Cluster, work: Path, stager: str) -> None:
        """Begin with links that nothing limits, and no bundle."""
        self._cluster, self._work, self._stager = cluster, work, stager
        self._projects: dict[int, Path] = {}
        self._mbits = 0

    def measure(self, shape: JobShape) -> JobMeasured:
        """Run one job on nodes that have nothing.

        Raises:
            BenchError: it fails.
        """
        project = self._project(shape.megabytes)
        self._limit_links(shape.mbits)
        self._empty(shape.nodes)
        logs = Path(tempfile.mkdtemp(prefix="logs-", dir=self._work))
        options = ("--nodes", str(shape.nodes), "--transfer", shape.transfer)
        argv = (self._stager, "verify", "-q", *options, "--log-dir", str(logs))
        load, before, busy = os.getloadavg()[0], self._node_cpu(), _busy_cpu()
        ran = run(Command(argv=argv, cwd=project, env=self._env(project)))
        busy, node_cpu = _busy_cpu() - busy, self._node_cpu() - before
        (events,) = logs.glob("events.*.jsonl")
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        shutil.rmtree(logs)
        result = lines[-1]
        sent = [line for line in lines if line["event"] == "sent"]
        return JobMeasured(
            shape=shape,
            load=round(load, 1),
            wall=round(ran.seconds, 3),
            phases=result["seconds"],
            sent=sum(line["seconds"] for line in sent),
            sent_bytes=sum(line["bytes"] for line in sent),
            driver_cpu=round(ran.cpu, 3),
            node_cpu=round(node_cpu, 3),
            others_cpu=round(max(0.0, busy - ran.cpu - node_cpu), 3),
        )

    def _env(self, project: Path) -> dict[str, str]:
        return {**os.environ, **self._cluster.env, "OFFLINE_ROOT": str(project.parent / "offline")}

    def _project(self, megabytes: int) -> Path:
        """Build a bundle with so much noise, once."""
        if megabytes not in self._projects:
            folder = self._work / f"mb{megabytes}"
            folder.mkdir()
            env = {**os.environ, "OFFLINE_ROOT": str(folder / "offline")}
            project = prepare(folder, env, self._stager)
            if megabytes:
                (project / "noise.bin").write_bytes(os.urandom(megabytes * 10**6))
                again = (self._stager, "build", "--no-prove", "-q")
                run(Command(argv=again, cwd=project, env=env))
            self._projects[megabytes] = project
        return self._projects[megabytes]

    def _empty(self, nodes: int) -> None:
        argv = ("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "sh", "-c", "rm -rf /tmp/stager-*")
        env = {**os.environ, **self._cluster.env}
        run(Command(argv=argv, cwd=self._work, env=env))
        time.sleep(1.0)  # the steps of Slurm end after srun

    def _limit_links(self, mbits: int) -> None:
        """Let each node's link, and the driver's, carry so much in each direction."""
        if mbits == self._mbits:
            return
        if not mbits:
            raise BenchError("jobs without a limit must come first", fix="order the jobs")
        limit = ("root", "tbf", "rate", f"{mbits}mbit", "burst", "128kb", "latency", "50ms")
        bridge = _bridge(self._cluster)
        ours = [bridge, *(f"{bridge}n{number:02d}" for number in range(1, self._cluster.nodes + 1))]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda device: self._tc(device, limit), ours))
            numbers = range(1, self._cluster.nodes + 1)
            list(threads.map(lambda number: self._tc_inside(number, limit), numbers))
        self._mbits = mbits

    def _tc(self, device: str, limit: tuple[str, ...]) -> None:
        argv = ("tc", "qdisc", "replace", "dev", device, *limit)
        run(Command(argv=argv, cwd=self._work, env=_with_sbin()))

    def _tc_inside(self, number: int, limit: tuple[str, ...]) -> None:
        script, node = str(REPO / "scripts" / "cluster"), f"node{number:02d}"
        tc = ("tc", "qdisc", "replace", "dev", "eth0", *limit)
        argv = (script, "on", "--name", self._cluster.name, node, *tc)
        run(Command(argv=argv, cwd=self._work, env=_with_sbin()))

    def _node_cpu(self) -> float:
        """Return the CPU seconds that the processes of all nodes have used so far."""
        namespaces = {_namespace(pid) for pid in _inits(self._cluster)} - {""}
        own = [pid for pid in _pids() if _namespace(pid) in namespaces]
        return sum(map(_cpu_with_children, own))


def _with_sbin() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def _bridge(cluster: Cluster) -> str:
    """Return the name of a cluster's bridge, which its nodes' interfaces begin with."""
    argv = ("sh", "-c", 'printf %s "$1" | cksum', "sh", cluster.name)  # as scripts/cluster does
    shown = run(Command(argv=argv, cwd=REPO, env=os.environ))
    return f"sc{int(shown.out.split()[0]):08x}"


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _inits(cluster: Cluster) -> list[int]:
    """Return the first process of each node."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"node-init" in words and any(
                word.endswith(f"/{cluster.name}".encode()) for word in words
            ):
                found.append(pid)
    return [pid for pid in found if _namespace(pid) != _namespace(os.getpid())]


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _busy_cpu() -> float:
    """Return the CPU seconds in which the machine was not idle, so far."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, first)
    return (user + nice + system + irq + softirq + steal) / TICKS


def _cpu_with_children(pid: int) -> float:
    """Return the CPU seconds of a process and of all that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


# --- a relay over the loopback interface ---------------------------------------------------------


def relay_on_loopback(size: int, folder: Path) -> RelayMeasured:
    """Pass a file from one process to another as a relay does; return what each of them took."""
    token = os.urandom(32)
    with _noise(size, folder / "source") as source, _noise(0, folder / "target") as target:
        listeners = [listen("127.0.0.1"), listen("127.0.0.1")]
        places = [
            RelayPlace(position, "", "127.0.0.1", int(one.getsockname()[1]))
            for position, one in enumerate(listeners)
        ]
        first = RelayProcess(ChunkFile(source, size, complete=True), token, listeners[0])
        second = RelayProcess(ChunkFile(target, size), token, listeners[1])
        first.begin(None)
        began = time.monotonic()
        second.begin(find_candidates(1, places))
        outcome = second.outcome()
        seconds = time.monotonic() - began
        used = [_children_cpu()]
        for process in (second, first):
            process.close()
            used.append(_children_cpu())
    if outcome.failure:
        raise BenchError("a relay over the loopback interface failed", why=outcome.failure)
    node, origin = used[1] - used[0], used[2] - used[1]
    return RelayMeasured(
        bytes=size,
        chunks=-(-size // choose_chunk_size(size)),
        source_cpu=round(origin, 4),
        node_cpu=round(node, 4),
        seconds=round(seconds, 3),
    )


@contextlib.contextmanager
def _noise(size: int, path: Path) -> Iterator[int]:
    """Make a file of noise, open while the block runs."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(size >> 20):
            os.write(handle, os.urandom(1 << 20))
        yield handle
    finally:
        os.close(handle)
        path.unlink()


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- all of it -----------------------------------------------------------------------------------


def ordered(jobs: list[JobShape]) -> list[JobShape]:
    """Return the jobs with those first whose links nothing limits."""
    return sorted(jobs, key=lambda job: job.mbits)


def measure_all(asked: argparse.Namespace, tell: Callable[[str], None] = say) -> None:
    """Measure, and write each measurement to the file; what is there already stays."""
    done = Measurements.load(asked.file)
    done.machine = machine(os.cpu_count() or 1)
    work = Path(tempfile.mkdtemp(prefix="stager-model-", dir=asked.work))
    try:
        if not done.loopback:
            for size in _LOOPBACK * asked.rounds:
                done.loopback.append(relay_on_loopback(size, work))
            done.save(asked.file)
        jobs = [job for job in ordered(shapes(asked.nodes)) if job.nodes >= asked.least]
        with running(max(job.nodes for job in jobs), tell) as cluster:
            bench = JobBench(cluster, work, asked.stager)
            for job in [job for job in jobs for _ in range(asked.rounds)]:
                measured = bench.measure(job)
                tell(json.dumps(asdict(measured)))
                done.jobs.append(measured)
                done.save(asked.file)
    finally:
        shutil.rmtree(work, ignore_errors=True)
