"""What is done to a cluster of the area ``slurm`` while a job runs on it, and undone after."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support.cluster import Cluster, script
from tests.support.processes import until

Undo = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a fault hits."""

    cluster: Cluster
    """The cluster."""
    node: str
    """A node of it."""
    process: subprocess.Popen[bytes]
    """``stager``, which follows the job."""
    rng: Random
    """The round's choices."""

    def pause(self, least: float, most: float) -> None:
        """Let the job go on for a while."""
        end = time.monotonic() + self.rng.uniform(least, most)
        while time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.02)


def nothing() -> None:
    """Undo nothing."""


def stop_slurmd(target: Target) -> Undo:
    """Let the daemon of a node die."""
    target.cluster.stop_slurmd(target.node)
    return lambda: target.cluster.start_slurmd(target.node)


def _lose(target: Target) -> Undo:
    target.cluster.lose(target.node)
    return lambda: script("up", "--name", target.cluster.name)


def find_link(target: Target) -> str:
    """Return the network interface of a node."""
    links = json.loads(target.cluster.on(target.node, ["ip", "-j", "link"]).stdout)
    return str(next(one["ifname"] for one in links if one["ifname"] != "lo"))


def cut_link(target: Target) -> Undo:
    """Take a node off the network."""
    cluster, node, link = target.cluster, target.node, find_link(target)
    routes = cluster.on(node, ["ip", "route", "show", "default"], check=False).stdout.split("\n")
    cluster.on(node, ["ip", "link", "set", link, "down"])

    def undo() -> None:
        cluster.on(node, ["ip", "link", "set", link, "up"])
        for route in filter(None, routes):
            cluster.on(node, ["ip", "route", "replace", *route.split()], check=False)

    return undo


def _cut_link(target: Target) -> Undo:
    undo = cut_link(target)
    if target.rng.random() < 0.5:  # for a moment only
        target.pause(0.1, 3)
        undo()
        return nothing
    return undo


def _drain(target: Target) -> Undo:
    update = ["scontrol", "update", f"nodename={target.node}"]
    target.cluster.run([*update, "state=drain", "reason=torture"])
    return lambda: target.cluster.run([*update, "state=resume"], check=False)


def _scancel(target: Target) -> Undo:
    target.cluster.run(["scancel", "--user=root"], check=False)
    return nothing


def _kill_stager(target: Target) -> Undo:
    with contextlib.suppress(ProcessLookupError):
        number = target.rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        os.kill(target.process.pid, number)
    return nothing


def _kill_agents(target: Target) -> Undo:
    """Kill what runs on a node for the job, Slurm's own step managers or ours."""
    what = target.rng.choice(("node.pyz", "slurmstepd"))
    code = (
        "import os, signal, sys\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: line = open(f'/proc/{pid}/cmdline').read()\n"
        "    except OSError: continue\n"
        f"    if {what!r} in line and int(pid) != os.getpid(): os.kill(int(pid), signal.SIGKILL)\n"
    )
    target.cluster.on(target.node, ["python3", "-c", code], check=False)
    return nothing


def _stop_controller(target: Target) -> Undo:
    """Stop slurmctld for a while; what was asked of it waits."""
    pid = int((target.cluster.state_dir / "slurmctld.pid").read_text())
    with _stopped(pid):
        target.pause(1, 12)
    return nothing


def _stop_munge(target: Target) -> Undo:
    """Stop munged for a while; whoever wants a credential waits, and gives up after some tries."""
    pid, _ = _munged(target.cluster)
    with _stopped(pid):
        target.pause(1, 12)
    return nothing


def _restart_munge(target: Target) -> Undo:
    """End munged, and start another one after a while; no credential can be had between."""
    pid, argv = _munged(target.cluster)
    os.kill(pid, target.rng.choice((signal.SIGTERM, signal.SIGKILL)))
    until(lambda: not Path("/proc", str(pid)).exists())
    try:
        target.pause(0.1, 12)
    finally:
        subprocess.run([*_AS_MUNGE, *argv], check=True, capture_output=True, timeout=120)
    return nothing


def _wrong_key(target: Target) -> Undo:
    """Give a node the munged of another key: what it says nobody believes, nor it what they say."""
    cluster, node = target.cluster, target.node
    place, socket = cluster.state_dir / "munge-other", cluster.state_dir / "munge" / "socket"
    place.mkdir(mode=0o755)
    (place / "key").write_bytes(target.rng.randbytes(128))
    (place / "key").chmod(0o600)
    for path in (place, place / "key"):
        shutil.chown(path, "munge", "munge")
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
    names["seed-file"] = "seed"
    files = [f"--{option}={place / name}" for option, name in names.items()]
    # A process of the node, which ends with it, also where this suite is killed.
    cluster.on(node, [*_AS_MUNGE, "munged", "--force", *files])
    cluster.on(node, ["mount", "--bind", str(place / "socket"), str(socket)])

    def undo() -> None:
        cluster.on(node, ["umount", "--lazy", str(socket)], check=False)
        cluster.on(node, ["pkill", "-F", str(place / "pid")], check=False)
        shutil.rmtree(place, ignore_errors=True)

    return undo


_AS_MUNGE = ("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups")


def _munged(cluster: Cluster) -> tuple[int, list[str]]:
    """Return the number and the command line of the cluster's munged."""
    pid = int((cluster.state_dir / "munge" / "pid").read_text())
    return pid, Path("/proc", str(pid), "cmdline").read_text().rstrip("\0").split("\0")


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _time_limit(target: Target) -> Undo:
    """Move the job's end so near that Slurm ends it as at its time limit, within half a minute."""

    def jobs() -> list[str]:
        asked = ["squeue", "--noheader", "--states=RUNNING", "--format=%A"]
        return target.cluster.run(asked).stdout.split()

    until(lambda: bool(jobs()) or target.process.poll() is not None)
    end = f"EndTime=now+{target.rng.randint(1, 5)}"
    for job in jobs():
        target.cluster.run(["scontrol", "update", f"JobId={job}", end], check=False)
    return nothing


def _lose_root(target: Target) -> Undo:
    """Remove the node root, as a cleaner of /tmp does."""
    target.cluster.on(target.node, ["sh", "-c", "rm -rf /tmp/stager-[0-9]*"], check=False)
    return nothing


FAULTS: dict[str, Callable[[Target], Undo]] = {
    "slurmd dies": stop_slurmd,
    "a node is lost": _lose,
    "a link is cut": _cut_link,
    "a node is drained": _drain,
    "scancel": _scancel,
    "stager killed": _kill_stager,
    "agents killed": _kill_agents,
    "slurmctld stops for a while": _stop_controller,
    "munged stops for a while": _stop_munge,
    "munged is restarted": _restart_munge,
    "another munge key on a node": _wrong_key,
    "the time limit": _time_limit,
    "the node root is removed": _lose_root,
}
"""Each returns what makes the cluster sound again."""
