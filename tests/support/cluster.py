"""A Slurm cluster made by scripts/cluster, as tests see it, and the ways to break its nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.needs import lacks, needs
from tests.support.processes import Done, command_lines, run, until

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "cluster"
STATES = Path("/run/stager-cluster")  # a directory for each cluster that stands
_HEALTHY = {"idle", "mixed", "allocated", "completing"}


def script(
    *arguments: str, check: bool = True, env: Mapping[str, str] | None = None, timeout: float = 900
) -> Done:
    """Run scripts/cluster with further variables; the test fails if it does, where it is to."""
    done = run([SCRIPT, *arguments], env={**os.environ, **(env or {})}, seconds=timeout)
    if check and done.returncode:
        pytest.fail(f"scripts/cluster {' '.join(arguments)}: {done.stderr}")
    return done


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts that scripts/cluster has made, in namespaces of this machine."""

    name: str  # as scripts/cluster knows them
    nodes: tuple[str, ...]

    @property
    def state_dir(self) -> Path:
        return STATES / self.name

    def init(self, node: str) -> str:
        return (self.state_dir / node / "init").read_text().strip()

    def root(self, node: str) -> Path:
        return Path("/proc", self.init(node), "root")

    def entering(self, node: str) -> list[str]:
        """The beginning of a command line that runs on the host, beside Slurm and ssh."""
        return ["nsenter", f"--target={self.init(node)}", "-m", "-u", "-i", "-n", "-p", "--"]

    def lose(self, node: str) -> None:
        """Pull the host's plug: every process on it is gone, and its ``/tmp``."""
        script("lose", node, "--name", self.name)


@dataclass(frozen=True, kw_only=True)
class Cluster(Hosts):
    shared: Path  # a directory that all see, unlike ``tmp_path``: every node has a ``/tmp``

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.state_dir / "slurm.conf")}

    def run(self, argv: Sequence[str], *, check: bool = True, timeout: float = 900) -> Done:
        done = run(argv, env={**os.environ, **self.env}, seconds=timeout)
        if check:
            assert done.returncode == 0, (argv, done.stdout, done.stderr)
        return done

    def on(
        self, node: str, argv: Sequence[str], *, check: bool = True, timeout: float = 900
    ) -> Done:
        """Run a command on the node, beside Slurm, in ``/``: a test's way to break things there."""
        return self.run([*self.entering(node), *argv], check=check, timeout=timeout)

    def address(self, node: str) -> str:
        subnet = (self.state_dir / "subnet").read_text().strip()
        return f"{subnet}.{10 + int(node.removeprefix('node'))}"

    def slurmd(self, node: str) -> int | None:
        """The number of the node's slurmd on the login side; None if it is dead."""
        return self._daemon("slurmd", node)

    def state(self, node: str) -> str:
        """As ``sinfo`` has it: ``idle``, ``mixed``, ``down*`` ..."""
        return self._states().get(node, "unknown")

    def wait_state(self, node: str, *states: str, seconds: float = 900) -> None:
        if not until(lambda: self.state(node) in states, seconds, pause=0.3):
            pytest.fail(f"{node} is {self.state(node)} after {seconds} s, not one of {states}")

    def stop_slurmd(self, node: str) -> None:
        """Kill it; the processes of its jobs live on."""
        script("stop", node, "--name", self.name)

    def start_slurmd(self, node: str) -> None:
        script("start", node, "--name", self.name)

    def controller(self) -> int | None:
        return self._daemon("slurmctld")

    def stop_controller(self) -> None:
        """End it as a restart would, with all it knows written down."""
        number = self.controller()
        assert number is not None
        os.kill(number, signal.SIGTERM)
        assert until(lambda: self.controller() is None)

    def start_controller(self) -> None:
        """Start it again as ``scripts/cluster up`` does, which also runs a job of its own."""
        program = shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        with (self.state_dir / "up.log").open("ab") as log:
            argv = ["setsid", str(program), "-f", str(self.state_dir / "slurm.conf")]
            env, none = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}, subprocess.DEVNULL
            subprocess.run(argv, cwd="/", env=env, stdin=none, stdout=log, stderr=log, check=True)

    def jobs(self, *options: str) -> list[str]:
        return self.run(["squeue", "--noheader", "--format=%A", *options]).stdout.split()

    def ended(self, job: str) -> bool:
        """Whether a job has left the queue; that Slurm does not answer is no end."""
        done = self.run(["squeue", "--noheader", f"--job={job}"], check=False)
        if done.returncode:
            return "Invalid job id" in done.stderr
        return not done.stdout.strip()

    def hurry(self, job: str, again: Callable[[], bool], seconds: float = 600) -> bool:
        """Start a job again that is back in the queue; whether ``again`` has come true then.

        Slurm waits two minutes. In the second after its end slurmd would refuse its credential.
        """

        def started() -> bool:
            time.sleep(3)
            self.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
            return until(again, 60)

        return until(started, seconds)

    def settle(self) -> None:
        """End the jobs that are left; bring back what was stopped or lost."""
        if self.run(["squeue", "--noheader"]).stdout.strip():
            self.run(["scancel", "--full", "--signal=KILL", "--user=root"], check=False)
            self.run(["scancel", "--user=root"], check=False)
        states, alive = self._states(), all(self.slurmd(node) for node in self.nodes)
        if not alive or any(states.get(node) not in _HEALTHY for node in self.nodes):
            script("up", "--name", self.name)
        until(lambda: set(self._states().values()) == {"idle"})

    def _states(self) -> dict[str, str]:
        """A node's state in Slurm by its name; empty while the controller does not answer."""
        argv = ["timeout", "10", "sinfo", "--noheader", "--Node", "--format=%N %T"]
        lines = self.run(argv, check=False).stdout.splitlines()
        return dict(line.split() for line in lines)

    def _daemon(self, program: str, *words: str) -> int | None:
        """The number of its first daemon of a kind whose command line has these words."""
        wanted = {os.fsencode(word) for word in (self.state_dir / "slurm.conf", *words)}
        found = [
            number
            for number, line in command_lines()
            if line.split(b"\0")[0].endswith(program.encode()) and wanted <= {*line.split(b"\0")}
        ]
        return min(found, default=None)


def make_cluster(name: str, *options: str) -> Cluster:
    """Start a cluster; the caller ends it with :func:`remove_cluster`, whatever happens."""
    shared = _up("slurm", name, *options)
    return Cluster(name=name, nodes=nodes_of(name), shared=shared)


def make_hosts(name: str, count: int) -> Path:
    """Start hosts with an sshd each; return a folder that none of them sees."""
    return _up("ssh", name, "--ssh", "--nodes", str(count), "--hide", str(_place(name)))


def _place(name: str) -> Path:
    return Path("/var/tmp") / f"stager-{name}"


def _up(kind: str, name: str, *options: str) -> Path:
    needs(kind)
    _place(name).mkdir()
    done = script("up", "--name", name, *options, check=False)
    if "does not let root make namespaces" in done.stderr:
        _place(name).rmdir()
        lacks(kind, done.stderr)
    assert done.returncode == 0, done.stderr
    return _place(name)


def nodes_of(name: str) -> tuple[str, ...]:
    return tuple((STATES / name / "nodes").read_text().split())


def remove_cluster(name: str) -> None:
    script("down", "--name", name)
    shutil.rmtree(_place(name), ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the clusters of test runs that were killed: named ``test-``, the process, ``-...``."""
    for place in STATES.glob("test-*"):
        owner = place.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            remove_cluster(place.name)
