"""The alternative to staging: ranks that import from a shared file system. Pure functions.

It goes by the calls that name a path, of which an import makes two for each file of the
environment, and only then by bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from bundle.transfer.forecast import Nodes

REFERENCE = {"files": 34_255, "bytes": 1.38e9, "calls": 71_270, "opens": 4_514, "read": 781e6}
"""An environment of 47 packages (torch, transformers, datasets), and what its import does: calls
with a path, files opened, bytes read. Counted with strace; others are taken in proportion."""


@dataclass(frozen=True)
class SharedFiles:
    """A shared file system that ranks would import from instead. Cold: no node has read it yet."""

    name: str
    """Its name."""
    call: float
    """Seconds that a call with a path takes on a node that uses it alone."""
    calls: float
    """Such calls that it answers in a second, for all nodes together."""
    node: float
    """Bytes a second that one node reads."""
    all: float
    """Bytes a second that all nodes read together."""


LUSTRE = SharedFiles("Lustre", call=0.7e-3, calls=560e3, node=1e9, all=50e9)
"""Fits two published figures: 57 s for an environment on 8 nodes (Frontier), and 120 s for an
import of torch, 17,800 calls, on 2,048 nodes with 12 ranks each (Aurora, without Copper)."""
NFS = SharedFiles("NFS", call=0.7e-3, calls=3_500, node=0.3e9, all=1e9)
"""Fits 244 s for the same environment on 8 nodes (Frontier's NFS), each with 8 ranks."""


def from_shared(files: int, size: int, nodes: Nodes, shared: SharedFiles) -> float:
    """Return the seconds that ranks wait for files when they import from a shared file system.

    A node's ranks share what its kernel keeps of paths and files, except that every rank has each
    file that it opens checked again.
    """
    more_files, more_bytes = files / REFERENCE["files"], size / REFERENCE["bytes"]
    calls = more_files * REFERENCE["calls"]
    calls_of_node = calls + (nodes.ranks - 1) * more_files * REFERENCE["opens"]
    read = more_bytes * REFERENCE["read"]
    waiting = max(calls * shared.call, nodes.count * calls_of_node / shared.calls)
    return waiting + max(read / shared.node, nodes.count * read / shared.all)
