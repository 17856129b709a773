"""The speed of a cluster, from which the model of ``forecast`` computes seconds.

Once earlier jobs have measured the rates, they travel in a job as JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Rates:
    """The speed of a cluster, in seconds unless said otherwise.

    The defaults are assumed: measured on one machine of 2 cores, with nodes in memory (tmpfs) and
    a bridge between them, or taken from publications. Unpacking to a disk may take twice as long.
    """

    link: float = 600e6
    """Bytes a second of one sender, for all it serves."""
    exchange: float = 0.013
    """For a block to be taken in and acknowledged, on each level of the tree. These two fit 334 MB
    to 1, 3 and 6 nodes on one machine, in 1.2, 2.0 and 4.4 s, and decide how wide a tree is; not
    measured on a large cluster."""
    broadcast: float = 0.15
    """For ``sbcast`` to start, and to ask the controller once."""
    relay: float = 0.3
    """For the nodes of a relay to learn of each other, and to connect."""
    relay_level: float = 0.06
    """For each level of a relay's trees. These two fit 40 MB over links of 200 Mbit/s to 16 nodes
    in 2.3 s; not measured on a large cluster."""
    received: float = 0.3e-9
    """CPU time for a byte that a node takes in, beside the unpacking."""
    byte: float = 1.2e-9
    """CPU time for a byte that is unpacked: decompressed, checked and written."""
    file: float = 45e-6
    """CPU time for a file that is made. 34,928 files of 1.39 GB: 3.2 s of CPU time in all."""
    link_file: float = 15e-6
    """For a hard link to a file of an older environment; ``cp -rl`` needs as long."""
    environment: float = 0.3
    """For an environment besides: reading the indexes, directories, publishing."""
    step: float = 0.25
    """For a step of Slurm's to start and to end, beside the agents' own time."""
    node: float = 0.007
    """CPU time of the driver for each node, of all phases together: measured on up to 64 nodes
    (docs/scale.md), and assumed to be the same on more."""
    agent: float = 0.25
    """CPU time of an agent's start on its node; 0.24 s were measured, most of them imports."""
    probe: float = 0.3
    """CPU time of the check, without imports."""
    torchrun: float = 1.7
    """For the launcher to start: an import of torch. Nothing where ``srun`` starts the ranks."""

    def __post_init__(self) -> None:
        """Refuse rates that are not above zero: the model divides and multiplies by them."""
        for name, value in asdict(self).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ValueError(f"rates.{name} is {value!r}")

    def scaled(self, *, send: float = 1.0, unpack: float = 1.0, step: float = 1.0) -> Rates:
        """Return the rates of a cluster on which these take so many times as long."""
        return replace(
            self,
            link=self.link / send,
            exchange=self.exchange * send,
            broadcast=self.broadcast * send,
            relay=self.relay * send,
            relay_level=self.relay_level * send,
            received=self.received * unpack,
            byte=self.byte * unpack,
            file=self.file * unpack,
            link_file=self.link_file * unpack,
            environment=self.environment * unpack,
            step=self.step * step,
            node=self.node * step,
            agent=self.agent * step,
        )


ASSUMED = Rates()
