"""The comparisons with their targets, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["seconds", "bytes", "count"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    key: str
    """What ``--only`` calls it."""
    group: str
    """What is measured together; ``--only`` takes this as well."""
    what: str
    """What is done, in a few words."""
    ours: str
    """The name of our values."""
    peer: str = ""
    """The name of the values that ours are divided by; none: ours count by themselves."""
    versus: str = ""
    """The peer in a few words."""
    target: float | None = None
    """The largest ratio, or value where there is no peer, that is good enough; None: no target."""
    kind: Kind = "seconds"
    """What the values are."""
    slack: float = 0.0
    """How far above the target is still met: what two measurements of one thing may differ by."""


def _unpack(place: str, peer: str, versus: str, target: float | None) -> Row:
    return Row(
        key=f"unpack-{place}-{peer}",
        group="unpack",
        what=f"unpack to {place}",
        ours=f"unpack/{place}/ours",
        peer=f"unpack/{place}/{peer}",
        versus=versus,
        target=target,
    )


def _slurm(nodes: int) -> tuple[Row, ...]:
    """Nodes that have nothing, have it, and have all but one package; against the handout's way."""
    target = 0.45 if nodes == 3 else None
    start = f"{nodes} nodes to step 1" if nodes > 1 else "1 node to step 1"
    return tuple(
        Row(
            key=f"slurm-{nodes}-{state}",
            group="slurm",
            what=f"{start}, {state}",
            ours=f"slurm/{nodes}/step/{state}",
            peer=f"slurm/{nodes}/step/handout",
            versus="sbcast + tar xzf",
            target=target if state == "cold" else None,
        )
        for state in ("cold", "warm", "delta")
    )


RELAY_NODES = (1, 2, 4, 8, 16, 32)
"""The numbers of nodes that the relay is measured on."""
SBCAST_MOST = 16
"""The most nodes that ``sbcast`` is measured on: its time grows with them."""
_RELAY_TARGETS = {(16, "wire"): 1.4, (32, "wire"): 1.8, (16, "sbcast"): 0.10}
_RELAY_PEERS = {
    "wire": "size / link's rate",
    "sbcast": "sbcast by hand",
    "our-sbcast": "--transfer sbcast",
}


def _relay(nodes: int) -> Iterator[Row]:
    """The relay on slow links: against the wire alone, and against ``sbcast``, by hand and ours."""
    unit = "node" if nodes == 1 else "nodes"
    for peer, versus in _RELAY_PEERS.items():
        if peer == "wire" or nodes <= SBCAST_MOST:
            yield Row(
                key=f"relay-{nodes}-{peer}",
                group="relay",
                what=f"relay to {nodes} {unit}",
                ours=f"relay/{nodes}/relay",
                peer="relay/wire" if peer == "wire" else f"relay/{nodes}/{peer}",
                versus=versus,
                target=_RELAY_TARGETS.get((nodes, peer)),
            )


def _relay_unlimited(peer: str, target: float | None) -> Row:
    return Row(
        key=f"relay-large-{peer}",
        group="relay",
        what="300 MB, no limit, 3",
        ours="relay/large/relay",
        peer=f"relay/large/{peer}",
        versus=_RELAY_PEERS[peer],
        target=target,
    )


def _cuda(key: str, what: str, ours: str, peer: str, versus: str) -> Row:
    """Return a row of the CUDA environment, whose values have the names of the reference's."""
    return Row(
        key=f"cuda-{key}",
        group="cuda",
        what=what,
        ours=ours,
        peer=peer,
        versus=versus,
        target=_CUDA_TARGETS.get(key),
        kind="bytes" if key.startswith("size") else "seconds",
    )


_CUDA_TARGETS = {"build-uv": 0.90, "unpack-zst": 0.5}

ROWS: tuple[Row, ...] = (
    Row(
        key="build-pip",
        group="build",
        what="build, empty layer store",
        ours="build/ours",
        peer="build/pip",
        versus="pip + tar czf",
        target=0.24,
    ),
    Row(
        key="build-uv",
        group="build",
        what="build, empty layer store",
        ours="build/ours",
        peer="build/uv",
        versus="uv + tar zstd -3",
        target=0.90,
    ),
    Row(
        key="build-pex",
        group="build",
        what="build, empty layer store",
        ours="build/ours",
        peer="build/pex",
        versus="pex, stored",
    ),
    Row(
        key="build-proof",
        group="build",
        what="proof that it is whole",
        ours="build/proof",
        peer="build/ours",
        versus="our build",
    ),
    Row(
        key="rebuild-same",
        group="build",
        what="rebuild, nothing changed",
        ours="rebuild/same",
        peer="build/ours",
        versus="our build",
        target=0.02,
    ),
    Row(
        key="rebuild-one",
        group="build",
        what="rebuild, 1 changed",
        ours="rebuild/one",
        peer="build/ours",
        versus="our build",
        target=0.07,
    ),
    Row(
        key="size-gz",
        group="size",
        what="size, with .pyc",
        ours="size/ours",
        peer="size/pip",
        versus="tar.gz",
        target=0.77,
        kind="bytes",
    ),
    Row(
        key="size-zst",
        group="size",
        what="size, with .pyc",
        ours="size/ours",
        peer="size/uv",
        versus="tar.zst",
        target=0.88,
        kind="bytes",
    ),
    _unpack("tmpfs", "gz", "tar xzf", 0.2),
    _unpack("tmpfs", "zst", "tar --zstd -x", 0.6),
    _unpack("tmpfs", "squashfs", "unsquashfs -p 2", 0.7),
    _unpack("disk", "gz", "tar xzf", 0.5),
    _unpack("disk", "zst", "tar --zstd -x", 0.5),
    _unpack("disk", "squashfs", "unsquashfs -p 2", 0.5),
    Row(
        key="restage-same",
        group="restage",
        what="stage again, checked",
        ours="restage/same",
        peer="restage/first",
        versus="first stage",
        target=0.05,
    ),
    Row(
        key="restage-one",
        group="restage",
        what="stage again, 1 changed",
        ours="restage/one",
        peer="restage/first",
        versus="first stage",
        target=0.15,
    ),
    Row(
        key="import",
        group="import",
        what="import, warm",
        ours="import/ours",
        peer="import/venv",
        versus="plain venv",
        target=1.0,
        slack=0.02,
    ),
    Row(
        key="calls",
        group="calls",
        what="path calls, shared",
        ours="calls/ours",
        target=0,
        kind="count",
    ),
    Row(
        key="calls-shared-tree",
        group="calls",
        what="path calls, shared",
        ours="calls/ours",
        peer="calls/tree",
        versus="run from a tree",
        kind="count",
    ),
    Row(
        key="start",
        group="start",
        what="to the first line",
        ours="start/ours",
        peer="start/torchrun",
        versus="bare torchrun",
        target=1.05,
    ),
    Row(key="help", group="start", what="stager --help", ours="start/help", target=0.12),
    Row(
        key="slurm-verify",
        group="slurm",
        what="verify, warm, 3 nodes",
        ours="slurm/3/verify/warm",
        target=5.0,
    ),
    Row(
        key="slurm-bytes-same",
        group="slurm",
        what="bytes sent, no change",
        ours="slurm/3/bytes/warm",
        target=0,
        kind="bytes",
    ),
    Row(
        key="slurm-bytes-one",
        group="slurm",
        what="bytes sent, 1 changed",
        ours="slurm/3/bytes/delta",
        peer="slurm/changed",
        versus="changed layers",
        target=1.1,
        kind="bytes",
    ),
    Row(
        key="slurm-stage-same",
        group="slurm",
        what="3 nodes again, checked",
        ours="slurm/3/stage/warm",
        peer="slurm/3/stage/cold",
        versus="first stage",
        target=0.05,
    ),
    Row(
        key="slurm-stage-one",
        group="slurm",
        what="3 nodes again, 1 changed",
        ours="slurm/3/stage/delta",
        peer="slurm/3/stage/cold",
        versus="first stage",
        target=0.15,
    ),
    *(row for nodes in (1, 2, 3, 6) for row in _slurm(nodes)),
    *(row for nodes in RELAY_NODES for row in _relay(nodes)),
    # Here the nodes' CPUs are the limit, so the peer is the one whose nodes unpack as well.
    _relay_unlimited("our-sbcast", 1.0),
    _relay_unlimited("sbcast", None),
    _cuda("build-pip", "build, empty layer store", "build/ours", "build/pip", "pip + tar czf"),
    _cuda("build-uv", "build, empty layer store", "build/ours", "build/uv", "uv + tar zstd -3"),
    _cuda("build-proof", "proof that it is whole", "build/proof", "build/ours", "our build"),
    _cuda("rebuild-same", "rebuild, nothing changed", "rebuild/same", "build/ours", "our build"),
    _cuda("rebuild-one", "rebuild, 1 changed", "rebuild/one", "build/ours", "our build"),
    _cuda("size-gz", "size, with .pyc", "size/ours", "size/pip", "tar.gz"),
    _cuda("size-zst", "size, with .pyc", "size/ours", "size/uv", "tar.zst"),
    _cuda("unpack-gz", "unpack to tmpfs", "unpack/tmpfs/ours", "unpack/tmpfs/gz", "tar xzf"),
    _cuda(
        "unpack-zst", "unpack to tmpfs", "unpack/tmpfs/ours", "unpack/tmpfs/zst", "tar --zstd -x"
    ),
    _cuda("restage-same", "stage again, checked", "restage/same", "restage/first", "first stage"),
    _cuda("restage-one", "stage again, 1 changed", "restage/one", "restage/first", "first stage"),
)


def chosen(names: Sequence[str]) -> tuple[Row, ...]:
    """The rows of these keys and groups; all of them for no name.

    Raises:
        KeyError: with the first name that is neither.
    """
    for name in names:
        if not any(name in (row.key, row.group) for row in ROWS):
            raise KeyError(name)
    if not names:
        return ROWS
    return tuple(row for row in ROWS if row.key in names or row.group in names)
