"""One node's part in the process group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankGroup:
    """One node's part in the process group."""

    node: str
    """The node's name."""
    node_rank: int
    """Its rank among the nodes, from 0."""
    nnodes: int
    """The number of nodes."""
    nproc: int
    """Ranks on this node."""
    address: str
    """Address of the head node."""
    port: int
    """Port of the rendezvous on the head node."""
    interface: str
    """The network interface by which this node reaches the head."""
    backend: str
    """``gloo`` or ``nccl``."""
    threads: int
    """CPU threads of one rank."""
    max_restarts: int = 0
    """The number of times that failed ranks are restarted."""
    elastic: tuple[int, int] | None = None
    """The minimum and maximum of nodes that the group continues with."""
    own_address: str = ""
    """This node's address on its interface."""
    grace_seconds: int = 0
    """Grace period of ranks after SIGTERM, in seconds."""
    on_cpus: bool = False
    """True if ranks must not use GPUs, since some node has none."""

    @property
    def moving(self) -> bool:
        """True if there may be several rendezvous; ranks are not tied to nodes then."""
        return self.elastic is not None or self.max_restarts > 0
