"""How long a job takes until its ranks run, predicted from a small model. Pure functions.

A job looks at the nodes, sends them the bundle while they unpack it, checks the environment, and
starts the ranks, all of it in one step of Slurm's, with a few exceptions. The sending is
``sbcast``'s: blocks of 8 MiB, the next of which leaves when every node has acknowledged the last;
each sender passes a block on to ``width`` nodes over one link, which they share, and so on down the
tree (``file_bcast.c`` and ``forward.c`` of Slurm). The unpacking goes by bytes and by files, and
files count for as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..format.manifest import Layer
from ..protocol.rates import ASSUMED, Rates

BLOCK = 8 << 20
"""Bytes that ``sbcast`` sends at a time."""
WIDEST = 8
"""The most nodes that a sender of a broadcast serves itself, up to Slurm 23.02; 64 later."""


@dataclass(frozen=True)
class Nodes:
    """Where it happens."""

    count: int
    """How many nodes take part, 1 or more."""
    cpus: int = 2
    """CPUs that unpack on each; where nodes share a machine, that machine's."""
    sharing: int = 1
    """How many nodes share one machine and its CPUs; 1 on a cluster of many machines."""
    ranks: int = 1
    """Ranks on each node."""

    def busy(self, cpu_seconds: float) -> float:
        """Seconds for work that every node does on all of its CPUs."""
        return cpu_seconds * self.sharing / self.cpus

    def alone(self, cpu_seconds: float) -> float:
        """Seconds for work that every node does on one CPU."""
        return cpu_seconds * max(1.0, self.sharing / self.cpus)


@dataclass(frozen=True)
class Work:
    """What one node has to do for its environment."""

    sent: int
    """Bytes that it is sent."""
    bytes: int
    """Bytes that it writes."""
    files: int
    """Files that it writes."""
    linked: int = 0
    """Files that it has already, and takes by hard link."""

    @classmethod
    def of(cls, fresh: Sequence[Layer], every: Sequence[Layer], sent: int) -> Work:
        """The work for a bundle of some layers of which some are new on a node."""
        files = sum(layer.files for layer in fresh)
        return cls(
            sent=sent,
            bytes=sum(layer.unpacked_size for layer in fresh),
            files=files,
            linked=sum(layer.files for layer in every) - files,
        )


@dataclass(frozen=True)
class Staging:
    """Seconds for bringing the bundle to the nodes."""

    send: float
    """Until the last byte has arrived on the last node; 0 where nothing is sent."""
    unpack: float
    """What the unpacking takes with all that it needs at hand."""
    tail: float
    """How much of the unpacking is left when the last byte arrives: that of a block."""

    @property
    def seconds(self) -> float:
        """Both, as a node unpacks what has arrived while the rest is on its way."""
        return max(self.send + self.tail, self.unpack)

    @property
    def apart(self) -> float:
        """Both, one after the other."""
        return self.send + self.unpack


@dataclass(frozen=True)
class Forecast:
    """Seconds by phase until the ranks run."""

    preflight: float
    """The look at the nodes."""
    send: float
    """See :class:`Staging`; a part of ``stage``."""
    unpack: float
    """See :class:`Staging`; a part of ``stage``."""
    stage: float
    """The environment on every node: sent and unpacked at the same time."""
    probe: float
    """The check of every node."""
    launch: float
    """Until the launcher starts the ranks."""

    @property
    def total(self) -> float:
        """All phases."""
        return self.preflight + self.stage + self.probe + self.launch

    def to_json(self) -> dict[str, float]:
        """Seconds by phase, and in all."""
        named = {**asdict(self), "total": self.total}
        return {name: round(seconds, 3) for name, seconds in named.items()}


def levels(nodes: int, width: int) -> int:
    """How deep the tree of a broadcast is: with 8, it reaches 8, 72, 584 and 4,680 nodes."""
    reached, deep = 0, 0
    while reached < nodes:
        deep += 1
        reached += width**deep
    return deep


def block_seconds(nodes: int, width: int, rates: Rates = ASSUMED, sharing: int = 1) -> float:
    """Seconds from one full block of a broadcast to the next.

    On one machine that is several nodes, every copy costs the same CPUs, however deep the tree is.
    """
    deep = levels(nodes, width)
    return max(deep * width, sharing) * BLOCK / rates.link + deep * rates.exchange


def best_width(nodes: int, widest: int, rates: Rates = ASSUMED) -> int:
    """How many nodes each sender of a broadcast best passes a block on to."""
    every = range(1, max(1, min(widest, nodes)) + 1)
    return min(every, key=lambda width: block_seconds(nodes, width, rates))


def sending(size: int, nodes: Nodes, rates: Rates = ASSUMED) -> float:
    """Seconds for ``sbcast`` to bring a file of ``size`` bytes to all nodes; 0 for no file."""
    if not size:
        return 0.0
    width = best_width(nodes.count, WIDEST, rates)
    deep = levels(nodes.count, width)
    copies = max(deep * width, nodes.sharing)
    acknowledged = math.ceil(size / BLOCK) * deep * rates.exchange
    return rates.broadcast + copies * size / rates.link + acknowledged


def staging(
    work: Work, nodes: Nodes, rates: Rates = ASSUMED, reading: float | None = None
) -> Staging:
    """Seconds for the environment to come to all nodes.

    Args:
        work: what each node has to do.
        nodes: where.
        rates: how quick they are.
        reading: bytes a second with which the slowest node reads the bundle where it lies; None
            where the bundle is sent.
    """
    send = sending(work.sent, nodes, rates) if reading is None else work.sent / reading
    content = rates.file * work.files + rates.byte * work.bytes
    taking_in = rates.received * work.sent if reading is None else 0.0
    fixed = nodes.alone(rates.environment + rates.link_file * work.linked)
    share = min(1.0, BLOCK / work.sent) if work.sent else 0.0
    return Staging(
        send=send,
        unpack=fixed + nodes.busy(content + taking_in),
        tail=nodes.busy(content) * share + rates.environment / 2,
    )


def a_step(nodes: Nodes, rates: Rates = ASSUMED, cpu_seconds: float = 0.0) -> float:
    """Seconds for a step of Slurm's in which every node's agent works so long."""
    started = rates.step + rates.node * nodes.count
    return started + nodes.alone(rates.agent + cpu_seconds)


def forecast(
    staged: Sequence[Staging], nodes: Nodes, rates: Rates = ASSUMED, *, launcher: str = "torchrun"
) -> Forecast:
    """Seconds by phase.

    Args:
        staged: how groups of nodes come by their environments, one group after the other; none
            where all have it.
        nodes: all of them.
        rates: how quick they are.
        launcher: ``torchrun`` or ``srun``.
    """
    step = a_step(nodes, rates)
    probe = nodes.alone(rates.probe)
    # Groups that are served apart have a step each, and so have ranks that Slurm starts; torchrun
    # is begun while the nodes are probed where they need nothing but that.
    apart = len(staged) if len(staged) > 1 else 0
    starting = max(0.0, nodes.alone(rates.torchrun) - (0.0 if staged else probe))
    return Forecast(
        preflight=step,
        send=sum(one.send for one in staged),
        unpack=sum(one.unpack for one in staged),
        stage=sum(one.seconds for one in staged) + apart * step,
        probe=probe,
        launch=starting if launcher == "torchrun" else step,
    )
