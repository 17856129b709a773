"""Faults of a real cluster during a job: the job ends in time, told right, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from _pytest import outcomes
from cluster import STATES, Cluster, make_cluster, remove_cluster
from processes import living, until

from .. import product
from ..product import Done, finish, said, sound, start
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, NotHere, Round, require
from ..world import World

_NODES = 3
_SECONDS = 150.0
"""In which a job with a fault must end; node failures are noticed by time limits of Slurm's own."""
_RANK = "import os, time\nprint('[RANK', os.environ.get('RANK'), ']', flush=True)\ntime.sleep({})\n"


def begin(world: World) -> None:
    """Start the cluster that all rounds share.

    Raises:
        NotHere: there is no Slurm here, or no right to make a cluster.
    """
    try:
        make_cluster(_name(world), "--nodes", str(_NODES))
    except (outcomes.Skipped, outcomes.Failed) as exc:
        raise NotHere(str(exc.msg)) from exc


def end(world: World) -> None:
    """Remove it, or what there is of it."""
    if (STATES / _name(world)).exists():
        remove_cluster(_name(world))


def play(round_: Round) -> str:
    """Start a job, hurt the cluster while it runs, and look at what is said and left."""
    name = _name(round_.world)
    nodes = tuple((STATES / name / "nodes").read_text().split())
    cluster = Cluster(name=name, nodes=nodes, shared=Path("/var/tmp") / f"stager-{name}")
    round_.use("project", "offline", "home")
    rng = round_.rng
    (round_.project / "train.py").write_text(_RANK.format(rng.choice((0, 2))))
    argv = ("verify", "--nodes", str(_NODES), "--time", "00:05:00")
    if rng.random() < 0.5:
        argv = ("run", *argv[1:], "--launcher", "srun", "--nproc-per-node", "1")
    env = {**cluster.env, "STAGER_NODE_ROOT": "/tmp"}
    kind = rng.choice(sorted(_FAULTS))
    node = rng.choice(nodes)
    wait = rng.uniform(0.2, 5)
    round_.did(f"stager {argv[0]} on {_NODES} nodes; {kind}, {node}, after {wait:.2f} s")
    out = round_.folder / "said" / "hurt"
    out.parent.mkdir()
    process = start(round_, argv, out=out, env=env)
    undo = _nothing
    try:
        _sleep(wait, process)
        running = process.poll() is None
        undo = _FAULTS[kind](cluster, node, process, rng)
        done = _ended(process, argv, out)
    finally:
        undo()
        cluster.settle()
    if kind != "stager killed":
        _told(done)
    _nothing_left(round_, cluster)
    again = sound(product.stager(round_, *argv, env=env, process=True, seconds=_SECONDS))
    require(again.code == 0, "the same job succeeds once the cluster is sound", again)
    if not running:
        return SAME
    return HEALED if done.code == 0 else REFUSED


def _name(world: World) -> str:
    return f"test-{world.owner}-torture"


def _sleep(seconds: float, process: subprocess.Popen[bytes]) -> None:
    end_ = time.monotonic() + seconds
    while time.monotonic() < end_ and process.poll() is None:
        time.sleep(0.02)


def _ended(process: subprocess.Popen[bytes], argv: tuple[str, ...], out: Path) -> Done:
    with contextlib.suppress(ProcessLookupError):
        return finish(process, argv, out, _SECONDS)
    return said(argv, -9, out)


def _told(done: Done) -> None:
    sound(done)
    require(done.code in (0, 1, 3), "the exit code is 0, 1 or 3", done)
    if done.code:
        require(len(done.err.strip()) > 20, "it says what happened", done)


class _Queue:
    """The cluster's jobs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def listing(self) -> str:
        """Return a line for each."""
        return self._cluster.run(["squeue", "--noheader"]).stdout.strip()

    def is_empty(self) -> bool:
        """Return whether there are none."""
        return not self.listing()


def _nothing_left(round_: Round, cluster: Cluster) -> None:
    """Hold that no allocation and no process of the job is left, anywhere."""
    queue = _Queue(cluster)
    require(until(queue.is_empty, 60), "no allocation is left", queue.listing())
    place = str(round_.folder)
    require(until(lambda: not living(place), 30), "no process is left", living(place))
    half = [path for path in round_.logs.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    require(not half, "no half-written file is left", half)


# --- what is done to the cluster -----------------------------------------------------------------


def _nothing() -> None:
    """Undo nothing."""


def _stop_slurmd(cluster, node, process, rng) -> Callable[[], None]:
    cluster.stop_slurmd(node)
    return lambda: cluster.start_slurmd(node)


def _lose(cluster, node, process, rng) -> Callable[[], None]:
    cluster.lose(node)
    return _nothing  # settle brings it back


def _cut_link(cluster, node, process, rng) -> Callable[[], None]:
    links = json.loads(cluster.on(node, ["ip", "-j", "link"]).stdout)
    link = next(one["ifname"] for one in links if one["ifname"] != "lo")
    routes = cluster.on(node, ["ip", "route", "show", "default"], check=False).stdout.split("\n")
    cluster.on(node, ["ip", "link", "set", link, "down"])

    def undo() -> None:
        cluster.on(node, ["ip", "link", "set", link, "up"])
        for route in filter(None, routes):
            cluster.on(node, ["ip", "route", "replace", *route.split()], check=False)

    if rng.random() < 0.5:  # for a moment only
        time.sleep(rng.uniform(0.1, 3))
        undo()
        return _nothing
    return undo


def _drain(cluster, node, process, rng) -> Callable[[], None]:
    update = ["scontrol", "update", f"nodename={node}"]
    cluster.run([*update, "state=drain", "reason=torture"])
    return lambda: cluster.run([*update, "state=resume"], check=False)


def _scancel(cluster, node, process, rng) -> Callable[[], None]:
    cluster.run(["scancel", "--user=root"], check=False)
    return _nothing


def _kill_stager(cluster, node, process, rng) -> Callable[[], None]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)))
    return _nothing


def _kill_agents(cluster, node, process, rng) -> Callable[[], None]:
    """Kill what runs on a node for the job, Slurm's own step managers or ours."""
    what = rng.choice(("node.pyz", "slurmstepd"))
    code = (
        "import os, signal, sys\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: line = open(f'/proc/{pid}/cmdline').read()\n"
        "    except OSError: continue\n"
        f"    if {what!r} in line and int(pid) != os.getpid(): os.kill(int(pid), signal.SIGKILL)\n"
    )
    cluster.on(node, ["python3", "-c", code], check=False)
    return _nothing


def _controller(cluster, node, process, rng) -> Callable[[], None]:
    """Stop slurmctld for a while; what was asked of it waits."""
    pid = int((cluster.state_dir / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(rng.uniform(1, 12))
    finally:
        os.kill(pid, signal.SIGCONT)
    return _nothing


def _lost_root(cluster, node, process, rng) -> Callable[[], None]:
    """Remove the node root, as a cleaner of /tmp does."""
    cluster.on(node, ["sh", "-c", "rm -rf /tmp/stager-*"], check=False)
    return _nothing


_FAULTS: dict[str, Callable[..., Callable[[], None]]] = {
    "slurmd dies": _stop_slurmd,
    "a node is lost": _lose,
    "a link is cut": _cut_link,
    "a node is drained": _drain,
    "scancel": _scancel,
    "stager killed": _kill_stager,
    "agents killed": _kill_agents,
    "slurmctld stops for a while": _controller,
    "the node root is removed": _lost_root,
}

AREA = Area(
    name="slurm",
    promise="a job on a hurt cluster ends in time, with what happened said or healed; no "
    "allocation, process or file is left, and the same job succeeds once the cluster is sound",
    play=play,
    rounds=40,
    sample=0,
    seconds=500,
    root=True,
    apart=True,
    begin=begin,
    end=end,
)
