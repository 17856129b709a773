"""Faults of a real cluster while the bundle travels: the others have it, and that one is named."""

from __future__ import annotations

import os
import random

from tests.support.processes import until

from .. import product
from ..product import Done, sound, start
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, Round, require
from ..slurm_faults import Target, nothing
from ..transfer_faults import FAULTS, TransferFault, shape, unshape
from . import slurm

_RATE = "20mbit"
_LEAST, _MOST = 2_000_000, 6_000_000
"""Bytes that no node has, which take a second or more at that rate."""
_SECONDS = 240.0
"""A node that falls silent is noticed within a minute; ending its step takes some more."""
_BEGIN_SECONDS = 60.0
_KINDS = tuple(sorted(FAULTS))


def play(round_: Round) -> str:
    """Send a bundle to the nodes, hurt one of them on the way, and look at what becomes of all."""
    rng, cluster = round_.rng, slurm.cluster_of(round_.world)
    env = {**cluster.env, "STAGER_NODE_ROOT": "/tmp"}
    round_.use("project", "offline", "home")
    (round_.project / "new.bin").write_bytes(rng.randbytes(rng.randint(_LEAST, _MOST)))
    way = rng.choice(("relay", "auto"))
    argv = ("verify", "--nodes", str(len(cluster.nodes)), "--min-nodes", "2", "--time", "00:10:00",
            "--stage", "always", "--transfer", way)  # fmt: skip
    sound(product.stager(round_, "build", env=env, process=True, seconds=_SECONDS))
    out = round_.folder / "said" / "hurt"
    out.parent.mkdir(exist_ok=True)
    name = _kind(round_)
    round_.did(f"a bundle on its way to {len(cluster.nodes)} nodes by {way}")
    process = start(round_, argv, out=out, env=env)
    target = Target(cluster=cluster, node=rng.choice(cluster.nodes), process=process, rng=rng)
    others = [
        Target(cluster=cluster, node=node, process=process, rng=rng) for node in cluster.nodes
    ]
    undo = nothing
    try:
        for other in others:
            shape(other, _RATE)
        until(lambda: _arrives(target) or process.poll() is not None, _BEGIN_SECONDS)
        target.pause(0, 1)
        travels = _arrives(target)
        round_.did(f"{name}, {target.node}{'' if travels else ', when nothing travels'}")
        undo = FAULTS[name].strike(target)
        done = slurm.ended(process, argv, out, _SECONDS)
    finally:
        undo()
        for other in others:
            unshape(other)
        cluster.settle()
    _judge(done, FAULTS[name], target.node)
    slurm.nothing_left(round_, cluster)
    again = sound(product.stager(round_, *argv, env=env, process=True, seconds=_SECONDS))
    require(again.code == 0, "the same job succeeds once the cluster is sound", again)
    if not travels:
        return SAME
    return REFUSED if done.code or "is left out" in done.err else HEALED


def _kind(round_: Round) -> str:
    """Choose a fault: in as many rounds as there are kinds, each has its turn."""
    turn, place = divmod(round_.number, len(_KINDS))
    return random.Random(f"{round_.seed}:{turn}").sample(_KINDS, len(_KINDS))[place]


def _arrives(target: Target) -> bool:
    """Return whether the file is on its way to the node."""
    look = ["sh", "-c", f"ls /tmp/stager-{os.getuid()}/incoming/*/bundle.tar"]
    return target.cluster.on(target.node, look, check=False).returncode == 0


def _judge(done: Done, fault: TransferFault, node: str) -> None:
    """Hold that the others have their file, and that nobody else is named."""
    sound(done)
    require(done.code == 0, "the job goes on with the nodes that are sound", done)
    left_out = [line for line in done.err.splitlines() if "is left out" in line]
    require(all(node in line for line in left_out), "only the node that was hurt is named", done)
    require(fault.costs_node or not left_out, "a fault that passes costs no node", done)


AREA = Area(
    name="transfer",
    promise="whatever happens to a node while the bundle travels on a real cluster, the others "
    "have it in time and the job goes on; the node is named if it cannot; no allocation, process "
    "or file is left, and the same job succeeds once the cluster is sound",
    play=play,
    rounds=33,
    sample=2,
    seconds=600,
    root=True,
    apart=True,
    begin=slurm.begin,
    end=slurm.end,
)
