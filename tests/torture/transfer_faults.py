"""What is done to a node of a cluster while the bundle travels, and what that may cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .slurm_faults import Target, Undo, cut_link, find_link, nothing, stop_slurmd

_PROCESSES = """\
import glob, os, signal, sys, time
def read(path):
    try: return open(path, "rb").read()
    except OSError: return b""
ours = {}
for path in glob.glob("/proc/[0-9]*"):
    if b"SLURM_STEP_ID=" in read(path + "/environ") and b"python" in read(path + "/cmdline"):
        ours[int(path[6:])] = int(read(path + "/stat").rsplit(b")", 1)[1].split()[1])
first = [pid for pid, parent in ours.items() if parent not in ours]
others = [pid for pid, parent in ours.items() if parent in ours]
chosen = first if sys.argv[1] == "agent" else others
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


@dataclass(frozen=True)
class TransferFault:
    """A kind of fault."""

    strike: Callable[[Target], Undo]
    """Does it, and returns what undoes it."""
    costs_node: bool
    """Whether the job may have to do without the node."""


def _signal(
    whom: str, name: str, *, seconds: tuple[float, float] | None = None
) -> Callable[[Target], Undo]:
    def strike(target: Target) -> Undo:
        argv = ["python3", "-c", _PROCESSES, whom, name]
        if seconds is not None:
            argv.append(f"{target.rng.uniform(*seconds):.2f}")
        target.cluster.on(target.node, argv, check=False)
        return nothing

    return strike


def shape(target: Target, rate: str) -> None:
    """Hold what a node sends to a rate."""
    shaped = (
        f"tc qdisc replace dev {find_link(target)} root tbf rate {rate} burst 32kb latency 100ms"
    )
    target.cluster.on(target.node, shaped.split())


def unshape(target: Target) -> None:
    """Let a node send as fast as it can."""
    argv = ["tc", "qdisc", "del", "dev", find_link(target), "root"]
    target.cluster.on(target.node, argv, check=False)


def _cut_for_a_while(target: Target) -> Undo:
    undo = cut_link(target)
    target.pause(0.1, 3)
    undo()
    return nothing


def _slow(target: Target) -> Undo:
    shape(target, f"{target.rng.randint(1, 3)}mbit")
    return nothing


def _damage(target: Target) -> Undo:
    argv = ["python3", "-c", _DAMAGE, str(target.rng.random())]
    target.cluster.on(target.node, argv, check=False)
    return nothing


def _fill(target: Target) -> Undo:
    target.cluster.on(target.node, ["python3", "-c", _FILL], check=False)
    return lambda: target.cluster.on(target.node, ["rm", "-f", "/tmp/filler"], check=False)


FAULTS = {
    "its agent is killed": TransferFault(_signal("agent", "SIGKILL"), True),
    "its agent is stopped": TransferFault(_signal("agent", "SIGSTOP"), True),
    "its agent is stopped for a while": TransferFault(
        _signal("agent", "SIGSTOP", seconds=(0.2, 8)), False
    ),
    "its relay is killed": TransferFault(_signal("relay", "SIGKILL"), True),
    "its relay is stopped": TransferFault(_signal("relay", "SIGSTOP"), True),
    "its link is cut": TransferFault(cut_link, True),
    "its link is cut for a while": TransferFault(_cut_for_a_while, True),
    "its link becomes slow": TransferFault(_slow, False),
    "its copy is damaged": TransferFault(_damage, False),
    "its disk is full": TransferFault(_fill, True),
    "its slurmd dies": TransferFault(stop_slurmd, True),
}
"""By what is said of it."""
