"""Faults of a real cluster while the bundle travels: the others have it, and that one is named.

Whatever happens to a node, the others have their file in time and the job goes on; the node is
named if it cannot; no allocation, process or file is left, and the same job succeeds once the
cluster is sound.
"""

from __future__ import annotations

import os

from tests.support.processes import until

from ..cluster_faults import HARMLESS, TRANSFER_FAULTS, Target, shape, take_turns
from ..product import finish, sound, stager, start, succeeded
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, Round, require
from . import slurm

_RATE = "20mbit"
_LEAST, _MOST = 2_000_000, 6_000_000  # bytes that no node has: a second or more at that rate
_SECONDS = 240.0  # a silent node is noticed within a minute; ending its step takes some more
_BEGIN_SECONDS = 60.0


def play(round_: Round) -> str:
    rng, cluster = round_.rng, slurm.cluster_of(round_.world)
    env = slurm.variables(cluster)
    round_.use("project", "offline", "home")
    (round_.project / "new.bin").write_bytes(rng.randbytes(rng.randint(_LEAST, _MOST)))
    way = rng.choice(("relay", "auto"))
    argv = ("verify", "--nodes", str(len(cluster.nodes)), "--min-nodes", "2", "--time", "00:10:00",
            "--stage", "always", "--transfer", way)  # fmt: skip
    succeeded(stager(round_, "build", env=env, process=True, seconds=_SECONDS))
    name = take_turns(round_, TRANSFER_FAULTS)
    round_.did(f"a bundle on its way to {len(cluster.nodes)} nodes by {way}")
    process = start(round_, argv, env=env)
    nodes = cluster.nodes
    targets = [Target(cluster=cluster, node=node, process=process, rng=rng) for node in nodes]
    target = rng.choice(targets)
    try:
        for one in targets:
            shape(one, _RATE)
        until(lambda: _arrives(target) or process.poll() is not None, _BEGIN_SECONDS)
        target.pause(0, 1)
        travels = _arrives(target)
        round_.did(f"{name}, {target.node}{'' if travels else ', when nothing travels'}")
        with target.undo:
            TRANSFER_FAULTS[name](target)
            done = sound(finish(process, _SECONDS))
    finally:
        for one in targets:
            one.on("tc", "qdisc", "del", "dev", one.link(), "root")
        cluster.settle()
    require(done.code == 0, "the job goes on with the nodes that are sound", done)
    left_out = [line for line in done.err.splitlines() if "is left out" in line]
    named = all(target.node in line for line in left_out)
    require(named, "only the node that was hurt is named", done)
    require(name not in HARMLESS or not left_out, "a fault that passes costs no node", done)
    slurm.nothing_left(round_, cluster)
    slurm.same_again(round_, argv, env, _SECONDS)
    if not travels:
        return SAME
    return REFUSED if left_out else HEALED


def _arrives(target: Target) -> bool:
    return bool(target.on("sh", "-c", f"ls /tmp/stager-{os.getuid()}/incoming/*/bundle.tar"))


AREA = Area(
    play, rounds=33, sample=2, seconds=600, root=True, apart=True, begin=slurm.begin, end=slurm.end
)
