"""What is done to a real cluster while a job runs or its bundle travels, and undone after."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from tests.support.cluster import Cluster, script
from tests.support.processes import until

from .product import Running
from .rounds import Round


@dataclass(frozen=True, kw_only=True)
class Target:
    cluster: Cluster
    node: str
    process: Running  # ``stager``, which follows the job
    rng: Random
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # makes it sound again

    def pause(self, least: float, most: float) -> None:
        end = time.monotonic() + self.rng.uniform(least, most)
        while time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.02)

    def on(self, *argv: str, check: bool = False) -> str:
        return self.cluster.on(self.node, argv, check=check).stdout

    def link(self) -> str:
        links = json.loads(self.on("ip", "-j", "link", check=True))
        return str(next(one["ifname"] for one in links if one["ifname"] != "lo"))


Faults = Mapping[str, Callable[[Target], object]]


def take_turns(round_: Round, kinds: Mapping[str, object]) -> str:
    """Choose a fault: in as many rounds as there are kinds, each has its turn."""
    turn, place = divmod(round_.number, len(kinds))
    return random.Random(f"{round_.seed}:{turn}").sample(sorted(kinds), len(kinds))[place]


# --- the cluster ---------------------------------------------------------------------------------


def _stop_slurmd(target: Target) -> None:
    target.cluster.stop_slurmd(target.node)
    target.undo.callback(target.cluster.start_slurmd, target.node)


def _lose(target: Target) -> None:
    target.cluster.lose(target.node)
    target.undo.callback(script, "up", "--name", target.cluster.name)


def _cut_link(target: Target) -> None:
    link = target.link()
    routes = target.on("ip", "route", "show", "default").splitlines()
    target.on("ip", "link", "set", link, "down", check=True)
    for route in reversed(routes):
        target.undo.callback(target.on, "ip", "route", "replace", *route.split())
    target.undo.callback(target.on, "ip", "link", "set", link, "up", check=True)


def _cut_link_for_a_while(target: Target) -> None:
    _cut_link(target)
    target.pause(0.1, 3)
    target.undo.close()


def _drain(target: Target) -> None:
    update = ["scontrol", "update", f"nodename={target.node}"]
    target.cluster.run([*update, "state=drain", "reason=torture"])
    target.undo.callback(target.cluster.run, [*update, "state=resume"], check=False)


def _kill_stager(target: Target) -> None:
    with contextlib.suppress(ProcessLookupError):
        number = target.rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        os.kill(target.process.pid, number)


def _kill_agents(target: Target) -> None:
    """Kill what runs on a node for the job, Slurm's own step managers or ours."""
    target.on("pkill", "-KILL", "-f", target.rng.choice(("node.pyz", "slurmstepd")))


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _stop_controller(target: Target) -> None:
    """Stop slurmctld for a while; what was asked of it waits."""
    with _stopped(int((target.cluster.state_dir / "slurmctld.pid").read_text())):
        target.pause(1, 12)


_AS_MUNGE = ("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups")


def _munged(target: Target) -> int:
    return int((target.cluster.state_dir / "munge" / "pid").read_text())


def _stop_munge(target: Target) -> None:
    with _stopped(_munged(target)):
        target.pause(1, 12)


def _restart_munge(target: Target) -> None:
    """End munged, and start another one after a while; no credential can be had between."""
    pid = _munged(target)
    argv = Path("/proc", str(pid), "cmdline").read_text().rstrip("\0").split("\0")
    os.kill(pid, target.rng.choice((signal.SIGTERM, signal.SIGKILL)))
    until(lambda: not Path("/proc", str(pid)).exists())
    try:
        target.pause(0.1, 12)
    finally:
        subprocess.run([*_AS_MUNGE, *argv], check=True, capture_output=True, timeout=120)


def _wrong_key(target: Target) -> None:
    """Give a node the munged of another key: what it says nobody believes, nor it what they say."""
    state = target.cluster.state_dir
    place, socket = state / "munge-other", str(state / "munge" / "socket")
    place.mkdir(mode=0o755)
    target.undo.callback(shutil.rmtree, place, ignore_errors=True)
    (place / "key").write_bytes(target.rng.randbytes(128))
    (place / "key").chmod(0o600)
    for path in (place, place / "key"):
        shutil.chown(path, "munge", "munge")
    files = [f"--{name}-file={place / name}" for name in ("key", "pid", "log", "seed")]
    # A process of the node, which ends with it, also where this suite is killed.
    munged = ("munged", "--force", f"--socket={place / 'socket'}", *files)
    target.on(*_AS_MUNGE, *munged, check=True)
    target.undo.callback(target.on, "pkill", "-F", str(place / "pid"))
    target.on("mount", "--bind", str(place / "socket"), socket, check=True)
    target.undo.callback(target.on, "umount", "--lazy", socket)


def _time_limit(target: Target) -> None:
    """Move the job's end so near that Slurm ends it as at its time limit, within half a minute."""
    running = partial(target.cluster.jobs, "--states=RUNNING")
    until(lambda: bool(running()) or target.process.poll() is not None)
    end = f"EndTime=now+{target.rng.randint(1, 5)}"
    for job in running():
        target.cluster.run(["scontrol", "update", f"JobId={job}", end], check=False)


FAULTS: Faults = {
    "slurmd dies": _stop_slurmd,
    "a node is lost": _lose,
    "a link is cut": _cut_link,
    "a link is cut for a while": _cut_link_for_a_while,
    "a node is drained": _drain,
    "scancel": lambda target: target.cluster.run(["scancel", "--user=root"], check=False),
    "stager killed": _kill_stager,
    "agents killed": _kill_agents,
    "slurmctld stops for a while": _stop_controller,
    "munged stops for a while": _stop_munge,
    "munged is restarted": _restart_munge,
    "another munge key on a node": _wrong_key,
    "the time limit": _time_limit,
    "the node root is removed": lambda target: target.on("sh", "-c", "rm -rf /tmp/stager-[0-9]*"),
}

# --- a node while the bundle travels -------------------------------------------------------------

_PROCESSES = """\
import glob, os, signal, sys, time
def read(path):
    try: return open(path, "rb").read()
    except OSError: return b""
ours = {}
for path in glob.glob("/proc/[0-9]*"):
    if b"SLURM_STEP_ID=" in read(path + "/environ") and b"python" in read(path + "/cmdline"):
        ours[int(path[6:])] = int(read(path + "/stat").rsplit(b")", 1)[1].split()[1])
chosen = [pid for pid, parent in ours.items() if (parent in ours) == (sys.argv[1] == "relay")]
for pid in chosen:
    os.kill(pid, getattr(signal, sys.argv[2]))
if sys.argv[3:]:
    time.sleep(float(sys.argv[3]))
    for pid in chosen:
        try: os.kill(pid, signal.SIGCONT)
        except ProcessLookupError: pass
"""
_DAMAGE = """\
import glob, os, random, sys
for path in glob.glob("/tmp/stager-*/incoming/*/bundle.tar"):
    with open(path, "r+b") as handle:
        length = os.fstat(handle.fileno()).st_size
        for place in random.Random(sys.argv[1]).sample(range(max(1, length)), min(20, length)):
            handle.seek(place)
            handle.write(b"?")
"""
_FILL = """\
import os
space = os.statvfs("/tmp")
with open("/tmp/filler", "wb") as handle:
    os.posix_fallocate(handle.fileno(), 0, max(1, (space.f_bavail - 16) * space.f_frsize))
"""


def _signal(whom: str, name: str, target: Target) -> None:
    target.on("python3", "-c", _PROCESSES, whom, name)


def _stop_for_a_while(target: Target) -> None:
    seconds = f"{target.rng.uniform(0.2, 8):.2f}"
    target.on("python3", "-c", _PROCESSES, "agent", "SIGSTOP", seconds)


def shape(target: Target, rate: str) -> None:
    shaped = f"root tbf rate {rate} burst 32kb latency 100ms"
    target.on("tc", "qdisc", "replace", "dev", target.link(), *shaped.split(), check=True)


def _fill(target: Target) -> None:
    target.undo.callback(target.on, "rm", "-f", "/tmp/filler")
    target.on("python3", "-c", _FILL)


TRANSFER_FAULTS: Faults = {
    "its agent is killed": partial(_signal, "agent", "SIGKILL"),
    "its agent is stopped": partial(_signal, "agent", "SIGSTOP"),
    "its agent is stopped for a while": _stop_for_a_while,
    "its relay is killed": partial(_signal, "relay", "SIGKILL"),
    "its relay is stopped": partial(_signal, "relay", "SIGSTOP"),
    "its link is cut": _cut_link,
    "its link is cut for a while": _cut_link_for_a_while,
    "its link becomes slow": lambda target: shape(target, f"{target.rng.randint(1, 3)}mbit"),
    "its copy is damaged": lambda target: target.on(
        "python3", "-c", _DAMAGE, str(target.rng.random())
    ),
    "its disk is full": _fill,
    "its slurmd dies": _stop_slurmd,
}
# After these the job has that node.
HARMLESS = ("its agent is stopped for a while", "its link becomes slow", "its copy is damaged")
