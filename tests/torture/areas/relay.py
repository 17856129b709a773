"""Faults while nodes pass a file on to each other: who survives has it, who does not is named.

Whatever happens to the others, a node that is sound has the file that was sent in the end; one that
is not says why; nobody waits for ever, and nothing is left running.
"""

from __future__ import annotations

import contextlib
import time

from ..network import Network
from ..registry import Area
from ..relay_faults import CUT_OFF, DAMAGED, DISK, FAULTS, LOST, worst
from ..relay_nodes import SIZE, SOURCE, Swarm
from ..rounds import HEALED, REFUSED, SAME, Round, require

_RATE = "40mbit"
_SECONDS = 100.0  # to end on every node; a file at the lowest rate takes half of it
Hit = tuple[float, str, int]  # what happens: when, what, and to whom


def play(round_: Round) -> str:
    rng = round_.rng
    count = rng.randint(3, 9)
    hits: list[Hit] = sorted(
        (rng.uniform(0, 1), name, SOURCE if FAULTS[name].on_source else rng.randint(1, count))
        for name in rng.sample(sorted(FAULTS), rng.randint(1, 3))
    )
    full = {place: rng.randrange(1, SIZE) for _, name, place in hits if name == DISK}
    round_.did(f"{count} nodes")
    network = Network(count + 1, _RATE)
    with contextlib.closing(Swarm(round_.folder, rng, network, full)) as swarm:
        swarm.begin()
        struck = _strike(round_, swarm, hits)
        swarm.await_outcomes(_SECONDS)
        _judge(swarm, hits)
    if not struck:
        return SAME
    return REFUSED if any(outcome.failure for outcome in swarm.outcomes.values()) else HEALED


def _strike(round_: Round, swarm: Swarm, hits: list[Hit]) -> bool:
    """Do it; return whether it went on somewhere when it was done."""
    started = time.monotonic()
    struck = False
    for moment, name, place in hits:
        time.sleep(max(0.0, started + moment - time.monotonic()))
        going_on = bool(swarm.unfinished()) or name == DISK
        round_.did(f"{moment:.2f} s: {name}, {place}{'' if going_on else ', after the end'}")
        FAULTS[name].strike(swarm, place)
        struck = struck or going_on
    return struck


def _judge(swarm: Swarm, hits: list[Hit]) -> None:
    costs = {
        place: worst([FAULTS[name].cost for _, name, hit in hits if hit == place])
        for place in (SOURCE, *swarm.others)
    }
    damaged = {place for _, name, place in hits if FAULTS[name].cost == DAMAGED}
    for place, outcome in swarm.outcomes.items():
        named = damaged.issuperset(outcome.corrupt)
        require(named, "only a node with a damaged copy is named for it", swarm)
        if outcome.failure:
            allowed = costs[place] == LOST or costs[SOURCE] == CUT_OFF
            require(allowed, f"node {place} gets the file", swarm)
        elif costs[place] != DAMAGED:
            require(swarm.is_whole(place), f"node {place} has what was sent", swarm)


AREA = Area(play, rounds=150, sample=1, seconds=200, root=True)
