"""Faults while nodes pass a file on to each other: who survives has it, who does not is named."""

from __future__ import annotations

import time

from ..network import Network
from ..registry import Area
from ..relay_faults import CUT_OFF, DAMAGED, FAULTS, LOST, WELL, Fault, place_of, worst
from ..relay_nodes import SOURCE, Swarm
from ..rounds import HEALED, REFUSED, SAME, Round, require

_RATE = "40mbit"
_SIZE = 3_500_000
"""So a file takes 0.7 s, and a little more for each node on its way."""
_SECONDS = 100.0
"""In which it must have ended on every node; a file at the lowest rate takes half of it."""


def play(round_: Round) -> str:
    """Relay a file, hurt some nodes at random moments, and hold the others to their file."""
    rng = round_.rng
    count = rng.randint(3, 9)
    network = Network(count + 1, _RATE)
    swarm = Swarm(round_.folder, network, count, _SIZE + rng.randrange(70_000), rng)
    hits = _hits(swarm)
    full = {place: rng.randrange(1, _SIZE) for _, name, place in hits if FAULTS[name].full}
    round_.did(f"{count} nodes")
    try:
        swarm.start(full)
        swarm.begin()
        struck = _strike(round_, swarm, hits)
        swarm.await_outcomes(_SECONDS)
        _judge(swarm, hits)
    finally:
        swarm.close()
    if not struck:
        return SAME
    return REFUSED if any(outcome.failure for outcome in swarm.outcomes.values()) else HEALED


def _hits(swarm: Swarm) -> list[tuple[float, str, int]]:
    """Choose what happens when, and to whom; at least one node is to survive."""
    names = swarm.rng.sample(sorted(FAULTS), swarm.rng.randint(1, 3))
    hits = [(swarm.rng.uniform(0, 1), name, place_of(FAULTS[name], swarm)) for name in names]
    return sorted(hits)


def _strike(round_: Round, swarm: Swarm, hits: list[tuple[float, str, int]]) -> bool:
    """Do it; return whether it went on somewhere when it was done."""
    started = time.monotonic()
    struck = False
    for moment, name, place in hits:
        time.sleep(max(0.0, started + moment - time.monotonic()))
        going_on = bool(swarm.unfinished()) or FAULTS[name].full
        round_.did(f"{moment:.2f} s: {name}, {place}{'' if going_on else ', after the end'}")
        FAULTS[name].strike(swarm, place)
        struck = struck or going_on
    return struck


def _judge(swarm: Swarm, hits: list[tuple[float, str, int]]) -> None:
    """Hold each node to what the faults allow it."""
    faults: list[tuple[int, Fault]] = [(place, FAULTS[name]) for _, name, place in hits]
    general = worst([WELL, *(fault.cost for place, fault in faults if place == SOURCE)])
    damaged = {place for place, fault in faults if fault.cost == DAMAGED}
    for place, outcome in swarm.outcomes.items():
        cost = worst([WELL, *(fault.cost for hit, fault in faults if hit == place)])
        corrupt = set(outcome.corrupt)
        require(corrupt <= damaged, "only a node with a damaged copy is named for it", swarm)
        if outcome.failure:
            allowed = cost == LOST or general == CUT_OFF
            require(allowed, f"node {place} gets the file", swarm)
        elif cost != DAMAGED:
            swarm.assert_whole(place)


AREA = Area(
    name="relay",
    promise="whatever happens to the others, a node that is sound has the file that was sent in "
    "the end; one that is not says why; nobody waits for ever, and nothing is left running",
    play=play,
    rounds=150,
    sample=3,
    seconds=200,
    root=True,
)
