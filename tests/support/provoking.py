"""Jobs on a real cluster to break things under: a small project, gates, and what must not stay."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bundle.environment.listing import STATE
from tests.support import processes
from tests.support.cluster import Cluster
from tests.support.processes import until
from tests.support.wheelhouse import standard_set

STAGER = str(Path(sys.executable).with_name("stager"))
ROOT = f"tmp/stager-{os.geteuid()}"  # the node root, below a node's ``/``

LARGE = 150 << 20  # bytes of the large project's assets

PROGRAM = """\
import atexit, os, pathlib, signal, sys, threading, time
rank, asked = int(os.environ["RANK"]), dict(word.split("=") for word in sys.argv[1:])
where = " ".join(f"{name}={os.environ[name]}" for name in ("WORLD_SIZE", "MASTER_ADDR"))
what = asked.get(str(rank), asked.get("all", ""))
if what.endswith("-once"):
    what = what[:-5] if os.environ["STAGER_ATTEMPT"] == "0" else ""
if what == "deaf":  # to a polite request
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
received = []
if what == "save":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: received.append(number))
print(f"[RANK {rank}] {where}", flush=True)
if "BEGUN" in os.environ:  # so that none fails or ends before all have begun
    begun = pathlib.Path(os.environ["BEGUN"], os.environ["SLURM_JOB_ID"])
    begun.mkdir(parents=True, exist_ok=True)
    (begun / str(rank)).touch()
    while len(os.listdir(begun)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
if what == "sleep":
    time.sleep(3600)
elif what == "save":
    while {*received} != {signal.SIGUSR1, signal.SIGUSR2}:
        time.sleep(0.05)
    time.sleep(1)
    sys.exit(len(received) != 2)  # each came once
elif what == "linger":
    time.sleep(3)
elif what == "raise":
    raise ValueError("this rank is unhappy")
elif what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "term":  # by itself; nobody else wants it
    os.kill(os.getpid(), signal.SIGTERM)
elif what == "hang":
    threading.Thread(target=time.sleep, args=(3600,)).start()
elif what == "atexit":
    atexit.register(time.sleep, 3600)
elif what == "deaf":
    end = time.monotonic() + 3600
    while time.monotonic() < end and "enough" not in os.listdir(os.environ["BEGUN"]):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)  # as who must wait for it does, after a while
"""
"""``train.py``: each rank does as it is told, by ``0=raise 1=sleep`` or ``all=sleep``."""


@dataclass(frozen=True, kw_only=True)
class Said:
    code: int
    report: dict[str, Any]
    talk: str

    @property
    def error(self) -> dict[str, str]:
        return dict(self.report["error"])

    @property
    def failure(self) -> dict[str, Any]:
        return dict(self.report["first_failure"])

    def problems(self, node: str) -> str:
        (found,) = [one for one in self.report["nodes"] if one["node"] == node]
        return "\n".join(found["problems"])


@dataclass(kw_only=True)
class Bench:
    cluster: Cluster
    root: Path
    logs: Path
    env: dict[str, str]
    gates: list[Gate] = field(default_factory=list)

    def start(self, action: str, *arguments: str) -> subprocess.Popen[str]:
        """Start ``stager`` as a shell does, in a process group of its own."""
        argv = [STAGER, action, "--json", "--log-dir", self.logs, *arguments]
        return processes.start(argv, cwd=self.root, env={**os.environ, **self.env})

    def finish(self, started: subprocess.Popen[str], seconds: float = 900) -> Said:
        try:
            out, err = started.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            pytest.fail(f"it has not ended after {seconds} s: {started.communicate()}")
        assert "Traceback" not in err.replace("  | Traceback", ""), err
        return Said(code=started.returncode, report=json.loads(out) if out else {}, talk=err)

    def stager(self, action: str, *arguments: str, seconds: float = 900) -> Said:
        return self.finish(self.start(action, *arguments), seconds)

    def gate(self, command: str, pattern: str = "") -> Gate:
        """Hold the first such command of the driver's back; see :class:`Gate`."""
        made = Gate(self.logs.parent / f"gate{len(self.gates)}-{self.logs.name}", command, pattern)
        self.gates.append(made)
        self.env["PATH"] = f"{made.folder}:{self.env.get('PATH', os.environ['PATH'])}"
        return made

    def events(self, kind: str) -> list[dict[str, Any]]:
        paths = self.logs.glob("events.*.jsonl")
        lines = [line for path in paths for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["event"] == kind]

    def job_id(self) -> str:
        return str(self.events("job")[0]["job_id"])

    def lines(self) -> list[str]:
        found = sorted(self.logs.glob("*.node*.out"))
        return [line for path in found for line in path.read_text().splitlines()]

    def at_work(self, started: subprocess.Popen[str], ranks: int) -> None:
        if not until(lambda: sum("[RANK" in line for line in self.lines()) >= ranks):
            os.killpg(started.pid, signal.SIGINT)
            pytest.fail(f"the ranks did not begin: {started.communicate(timeout=900)}")

    def place(self, node: str) -> Path:
        return self.cluster.root(node) / ROOT

    def processes(self, node: str) -> dict[int, str]:
        """What runs on a node besides its own services: command lines by number here."""
        init = self.cluster.init(node)
        own = ("slurmd", "sleep infinity", "unshare")
        found: dict[int, str] = {}
        try:
            space = os.readlink(f"/proc/{init}/ns/pid")
        except FileNotFoundError:  # the node was lost
            return found
        for number, raw in processes.command_lines():
            with contextlib.suppress(OSError):  # it ended meanwhile
                line = raw.replace(b"\0", b" ").decode()
                theirs = os.readlink(f"/proc/{number}/ns/pid") == space
                if theirs and line and not line.startswith(own) and "node-init" not in line:
                    found[number] = line
        return found

    def program(self, node: str, word: str) -> int:
        """The process on a node whose command line has a word, and not a child that it forked."""
        found = [number for number, line in self.processes(node).items() if word in line]
        parents = {number: (processes.stat_fields(number) or ["", "0"])[1] for number in found}
        (first,) = [number for number in found if int(parents[number]) not in found]
        return first

    def queued(self) -> str:
        return self.cluster.run(["squeue", "--noheader"]).stdout

    def left(self, *, killed: bool = False) -> list[str]:
        """What must not stay; ``killed`` agents leave private directories, for `stager clean`."""
        found = self.queued().splitlines()
        for node in self.cluster.nodes:
            found += [f"{node} {line}" for line in self.processes(node).values()]
            place = self.place(node)
            with contextlib.suppress(FileNotFoundError):
                half = [path for path in place.glob("envs/*") if not _whole(path)]
                jobs = [] if killed else place.glob("jobs/*")
                found += [f"{node} {path}" for path in (*place.glob("incoming/*"), *jobs, *half)]
        return found

    def assert_clean(self, seconds: float = 900, *, killed: bool = False) -> None:
        """Nothing stays, after a while at the latest; see :meth:`left`."""
        if not until(lambda: not self.left(killed=killed), seconds, pause=0.3):
            pytest.fail(f"this is left after {seconds} s: {self.left(killed=killed)}")


@dataclass(frozen=True)
class Gate:
    """Holds one of Slurm's commands back where the driver starts it, then lets the real one run."""

    folder: Path
    command: str
    pattern: str

    def __post_init__(self) -> None:
        self.folder.mkdir()
        script = self.folder / self.command
        script.write_text(f"""\
#!/bin/sh
case "$*" in *"{self.pattern}"*)
    if mkdir "{self.folder}/once" 2>/dev/null; then
        echo "$SLURM_JOB_ID" >"{self.folder}/note" && mv "{self.folder}/note" "{self.folder}/there"
        while [ ! -e "{self.folder}/open" ]; do sleep 0.05; done
    fi ;;
esac
exec {shutil.which(self.command)} "$@"
""")
        script.chmod(0o755)

    def reached(self, started: subprocess.Popen[str], seconds: float = 900) -> str:
        """Wait until the command is held back; returns the job's number."""
        there = self.folder / "there"
        if not until(lambda: there.exists() or started.poll() is not None, seconds):
            os.killpg(started.pid, signal.SIGINT)
        if not there.exists():
            pytest.fail(f"{self.command} was not started: {started.communicate(timeout=900)}")
        return there.read_text().strip()

    def open(self) -> None:
        (self.folder / "open").touch()


def build(
    place: Path,
    zstandard_wheel: Path,
    *,
    more: Mapping[str, bytes] = {},
    environment: str = "",
    options: Sequence[str] = ("--no-prove",),
) -> Path:
    """Build a project whose ranks Slurm starts, by the real command; returns its folder."""
    root, offline, home = place / "project", place / "offline", place / "home"
    for folder in (root, offline / "wheels", home, place / "wheelhouse"):
        folder.mkdir(parents=True)
    standard_set(place / "wheelhouse")
    shutil.copy2(zstandard_wheel, offline / "wheels")
    (root / "train.py").write_text(PROGRAM)
    for name, data in more.items():
        (root / name).write_bytes(data)
    assets = f"[assets]\npaths = {json.dumps(sorted(more))}\n" if more else ""
    (root / "stager.toml").write_text(
        f'[environment]\nrequirements = ["alpha"]\n{environment}{assets}'
        '[launch]\nlauncher = "srun"\nbackend = "gloo"\n'
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"HOME": str(home), "OFFLINE_ROOT": str(offline), "PIP_CONFIG_FILE": os.devnull}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(place / "wheelhouse")}
    done = processes.run([STAGER, "build", *options], cwd=root, env=env)
    assert done.returncode == 0, done.stderr
    return root


def empty_nodes(cluster: Cluster) -> None:
    """Take the node roots away: a test starts from nothing."""
    for node in cluster.nodes:
        shutil.rmtree(cluster.root(node) / ROOT, ignore_errors=True)


@contextlib.contextmanager
def instead(cluster: Cluster, node: str, changed: Mapping[str, Path]) -> Iterator[None]:
    put: list[str] = []
    try:
        for path, other in changed.items():
            cluster.on(node, ["mount", "--bind", str(other), path])
            put.append(path)
        yield
    finally:
        for path in reversed(put):
            cluster.on(node, ["umount", "--lazy", path], check=False)


def _whole(environment: Path) -> bool:
    last = (environment / "pyvenv.cfg", environment / STATE / "manifest.json")
    return all(path.exists() for path in last)


@pytest.fixture(scope="session")
def small_project(cluster: Cluster, zstandard_wheel: Path) -> Path:
    return build(cluster.shared / "small", zstandard_wheel)


@pytest.fixture(scope="session")
def large_project(cluster: Cluster, zstandard_wheel: Path) -> Path:
    """The same with assets that take a while to send and to unpack."""
    return build(cluster.shared / "large", zstandard_wheel, more={"noise": os.urandom(LARGE)})


@pytest.fixture
def bench(cluster: Cluster, small_project: Path, shared: Path) -> Bench:
    return bench_for(cluster, small_project, shared)


@pytest.fixture
def large_bench(cluster: Cluster, large_project: Path, shared: Path) -> Bench:
    return bench_for(cluster, large_project, shared)


def bench_for(cluster: Cluster, root: Path, shared: Path) -> Bench:
    empty_nodes(cluster)
    logs = shared / "logs"
    logs.mkdir()
    # The fixture for all tests names a place that only the login side has.
    os.environ.pop("STAGER_NODE_ROOT", None)
    env = {"OFFLINE_ROOT": str(root.parent / "offline"), "BEGUN": str(shared / "begun")}
    return Bench(cluster=cluster, root=root, logs=logs, env=env)
