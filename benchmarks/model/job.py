"""A job on some nodes, phase by phase: the driver asks node after node, and the nodes work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bundle.protocol.events import StagingWork

from .events import Clock, Process, Processors
from .transfer import TURN, Site, StagingCosts, relay

PHASES = ("start", "preflight", "place", "unpack", "probe")
"""The phases of ``stager verify``; ``start`` is what comes before and after those of the driver."""
TRANSFER = "unpack"
"""The phase that brings the file; its costs here are those besides."""


@dataclass(frozen=True, kw_only=True)
class PhaseCosts:
    """The costs of a phase."""

    fixed: float
    """Seconds, whatever the number of nodes."""
    driver: float
    """CPU seconds of the driver's host for each node, one node after the other."""
    agent: float
    """CPU seconds of each node."""


@dataclass(frozen=True, kw_only=True)
class JobCosts:
    """The costs of a job."""

    staging: StagingCosts
    """The transfer and the unpacking."""
    phases: Mapping[str, PhaseCosts]
    """The phases."""
    program: float = 0.0
    """Bytes of the program that the driver's host sends to each node."""
    announcement: float = 45.0
    """Bytes that tell each node where the source of the relay listens."""
    place: float = 25.6
    """Bytes of each place that a node asks the source for; it asks for two in each tree level."""


def phase_seconds(costs: PhaseCosts, site: Site) -> float:
    """Return the seconds of a phase: half of the driver's work is before a node's, half after."""
    clock = Clock()
    common = Processors(clock, site.cpus, TURN)
    driver = Process(common)
    half = costs.driver / 2

    def answered() -> None:
        driver.do(half, lambda: None)

    def asked() -> None:
        own = common if site.shared else Processors(clock, 1)
        Process(own).do(costs.agent, answered)

    for _ in range(site.nodes):
        driver.do(half, asked)
    return costs.fixed + clock.run()


def messages_seconds(costs: JobCosts, site: Site) -> float:
    """Return the seconds in which the driver's link carries what each node must know."""
    asked = costs.place * 2 * math.log2(max(site.nodes, 2))
    each = costs.program + costs.announcement + asked
    return each * site.nodes / (site.source_link or site.link)


def job_seconds(work: StagingWork, site: Site, costs: JobCosts) -> dict[str, float]:
    """Return the seconds of each phase of a job, and of the transfer as ``sent``.

    Args:
        work: the bytes and files of each node.
        site: the machines.
        costs: the speed of the programs.
    """
    seconds = {name: phase_seconds(costs.phases[name], site) for name in PHASES}
    staged = relay(work, site, costs.staging)
    seconds[TRANSFER] += staged.unpacked + messages_seconds(costs, site)
    return {**seconds, "sent": staged.sent}
