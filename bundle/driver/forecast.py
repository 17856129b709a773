"""Forecast of the time until a job's ranks run, from a small model. Pure functions.

In a relay, every link carries the bundle once (:mod:`bundle.transfer.relay_chunks`). ``sbcast``
sends a block when every node has acknowledged the one before; each sender passes it on to ``width``
nodes over one link, and so on down the tree (``file_bcast.c`` and ``forward.c`` of Slurm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..format.manifest import Layer
from ..protocol.dataclass import dataclass
from ..protocol.events import StagingWork
from ..protocol.job import ASSUMED, Rates

BLOCK = 8 << 20  # bytes that ``sbcast`` sends at a time
WIDEST = 8  # nodes that a sender of a broadcast serves, up to Slurm 23.02; 64 later


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job."""

    count: int
    cpus: int = 2  # CPUs that unpack on each; if nodes share a machine, that machine's
    sharing: int = 1  # nodes that share one machine and its CPUs
    ranks: int = 1

    def compute_parallel(self, cpu_seconds: float) -> float:
        """Return the seconds for work that every node does on all of its CPUs."""
        return cpu_seconds * self.sharing / self.cpus

    def compute_serial(self, cpu_seconds: float) -> float:
        """Return the seconds for work that every node does on one CPU."""
        return cpu_seconds * max(1.0, self.sharing / self.cpus)


def measure_staging_work(fresh: Sequence[Layer], every: Sequence[Layer], sent: int) -> StagingWork:
    """Return the work of a node for a bundle of some layers of which some are new there."""
    files, linked = (sum(layer.files for layer in layers) for layers in (fresh, every))
    size = sum(layer.unpacked_size for layer in fresh)
    return StagingWork(sent=sent, bytes=size, files=files, linked=linked - files)


class Staging(NamedTuple):
    """Seconds to stage the environment on the nodes."""

    send: float  # until the last byte has arrived on the last node; 0 if nothing is sent
    unpack: float  # to unpack everything, without waiting for bytes
    tail: float  # to unpack the rest after the last byte has arrived: that of a block

    @property
    def seconds(self) -> float:
        """Both, as a node unpacks while the rest arrives."""
        return max(self.send + self.tail, self.unpack)


class Forecast(NamedTuple):
    """Seconds by phase until the ranks run; ``send`` and ``unpack`` are parts of ``stage``."""

    preflight: float
    send: float
    unpack: float
    stage: float
    probe: float
    launch: float  # until the launcher starts the ranks

    @property
    def total(self) -> float:
        """All phases."""
        return self.preflight + self.stage + self.probe + self.launch

    def to_json(self) -> dict[str, float]:
        """Return the seconds by phase, and the total."""
        by_phase = {**self._asdict(), "total": self.total}
        return {name: round(seconds, 3) for name, seconds in by_phase.items()}


def levels(nodes: int, width: int) -> int:
    """Return the depth of a broadcast's tree: with 8, it reaches 8, 72, 584 and 4,680 nodes."""
    reached, depth = 0, 0
    while reached < nodes:
        depth += 1
        reached += width**depth
    return depth


def block_seconds(nodes: int, width: int, rates: Rates = ASSUMED) -> float:
    """Return the seconds from one full block of a broadcast to the next."""
    depth = levels(nodes, width)
    return depth * width * BLOCK / rates.link + depth * rates.exchange


def best_width(nodes: int, widest: int, rates: Rates = ASSUMED) -> int:
    """Return the number of nodes to which each sender of a broadcast best passes a block on."""
    widths = range(1, max(1, min(widest, nodes)) + 1)
    return min(widths, key=lambda width: block_seconds(nodes, width, rates))


def forecast_relay(size: int, nodes: Nodes, rates: Rates = ASSUMED) -> float:
    """Return the seconds for the nodes to pass ``size`` bytes on to each other; 0 for no file."""
    if not size:
        return 0.0
    depth = levels(nodes.count, 2)
    return rates.relay + size * nodes.sharing / rates.link + depth * rates.relay_level


def forecast_broadcast(size: int, nodes: Nodes, rates: Rates = ASSUMED) -> float:
    """Return the seconds for ``sbcast`` to send ``size`` bytes to all nodes; 0 for no file."""
    if not size:
        return 0.0
    width = best_width(nodes.count, WIDEST, rates)
    depth = levels(nodes.count, width)
    copies = max(depth * width, nodes.sharing)
    acknowledgements = math.ceil(size / BLOCK) * depth * rates.exchange
    return rates.broadcast + copies * size / rates.link + acknowledgements


def forecast_staging(
    work: StagingWork,
    nodes: Nodes,
    rates: Rates = ASSUMED,
    *,
    relayed: bool = True,
    speed: float | None = None,
) -> Staging:
    """Return the seconds to stage the environment: read at ``speed`` bytes/s by all, or sent."""
    send, receiving = work.sent / (speed or 1.0), 0.0  # CPU seconds of a node
    if speed is None:
        send = (forecast_relay if relayed else forecast_broadcast)(work.sent, nodes, rates)
        receiving = rates.received * work.sent
    content = rates.file * work.files + rates.byte * work.bytes
    fixed = nodes.compute_serial(rates.environment + rates.link_file * work.linked)
    share = min(1.0, BLOCK / work.sent) if work.sent else 0.0
    unpack = fixed + nodes.compute_parallel(content + receiving)
    return Staging(send, unpack, nodes.compute_parallel(content) * share + rates.environment / 2)


def forecast_step(nodes: Nodes, rates: Rates = ASSUMED) -> float:
    """Return the seconds for a Slurm step on these nodes."""
    return rates.step + rates.node * nodes.count + nodes.compute_serial(rates.agent)


def forecast(
    staged: Sequence[Staging], nodes: Nodes, rates: Rates = ASSUMED, *, launcher: str = "torchrun"
) -> Forecast:
    """Return the seconds by phase; groups are staged in turn, none if all have the environment."""
    step = forecast_step(nodes, rates)
    probe = nodes.compute_serial(rates.probe)
    # Several groups have a step each. If nothing is staged, torchrun starts during the probe.
    extra_steps = len(staged) if len(staged) > 1 else 0
    torchrun = max(0.0, nodes.compute_serial(rates.torchrun) - (0.0 if staged else probe))
    return Forecast(
        preflight=step,
        send=sum(group.send for group in staged),
        unpack=sum(group.unpack for group in staged),
        stage=sum(group.seconds for group in staged) + extra_steps * step,
        probe=probe,
        launch={"torchrun": torchrun, "srun": step}.get(launcher, 0.0),
    )
