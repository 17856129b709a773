"""``[cluster]``: the resources to request from Slurm, or the hosts where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bundle.protocol.enumerations import LogMode, Stage, TransferWay

from . import checks
from .table import Table


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """``[cluster]``: the resources to request from Slurm; None leaves an option to Slurm."""

    nodes: tuple[int, int]
    """Fewest and most nodes, 1 or more; equal if the number is fixed."""
    min_nodes: int | None
    """Unusable nodes are left out while this many remain; None: every node must be usable."""
    partition: str | None
    """Slurm partition."""
    cpus_per_task: int | None
    """CPUs for each task, 1 or more."""
    gpus_per_node: str | None
    """GPUs on each node, as Slurm writes it: ``4``, ``a100:4`` or ``v100:4,a100:2``."""
    time: str | None
    """Time limit in one of Slurm's forms: minutes, ``HH:MM:SS``, ``UNLIMITED``..."""
    account: str | None
    """Slurm account that is charged."""
    exclude: str | None
    """Nodes to avoid, as a Slurm node list."""
    nodelist: str | None
    """Nodes that must be among them, as a Slurm node list."""
    qos: str | None
    """Quality of service."""
    constraint: str | None
    """Features that nodes must have, in Slurm's notation."""
    reservation: str | None
    """Slurm reservation."""
    mem: str | None
    """Memory on each node: megabytes, or a number with K, M, G or T; 0 for all."""
    avoid_bad: bool
    """True to avoid nodes that failed in the last days as well."""
    salloc_args: tuple[str, ...]
    """Further options, passed on as they are."""
    hosts: tuple[str, ...]
    """Hosts that are reached over ``ssh`` where there is no Slurm, in its notation."""
    node_root: str
    """Directory on each node under which the node root is made; ``auto`` looks for a local one."""
    stage: Stage
    """The rule by which the bundle is sent to the nodes."""
    transfer: TransferWay
    """The way in which it is sent."""
    log_mode: LogMode
    """The readers of a job's files."""
    container_image: str | None
    """Image that the ranks run in: one for Slurm's pyxis plugin, or one of Apptainer's."""
    container_mounts: tuple[str, ...]
    """``SOURCE:TARGET`` pairs for it, besides the node root."""


def cluster(table: Table) -> ClusterConfig:
    """Read the table; problems are noted in it."""
    count = checks.COUNT
    nodes = table.take("nodes", (1, 1), checks.node_range, f'{count}, or "MIN:MAX" in quotes', 1)
    min_nodes = table.take("min-nodes", None, checks.whole(1), count)
    if min_nodes is not None and min_nodes > nodes[1]:
        table.problem("min-nodes", f"found {min_nodes}, which is more than cluster.nodes")
    return ClusterConfig(
        nodes=nodes,
        min_nodes=min_nodes,
        **_slurm(table, count),
        hosts=table.take(
            "hosts", (), checks.each(checks.word), 'hosts, for example ["node[01-08]", "user@gpu9"]'
        ),
        node_root=table.take(
            "node-root",
            "auto",
            checks.node_path,
            'an absolute path, a path with a $VARIABLE of the node first, "auto" or "auto-memory"',
        ),
        stage=table.take(
            "stage", Stage.AUTO, checks.member_of(Stage), '"auto", "always" or "never"'
        ),
        transfer=table.take(
            "transfer",
            TransferWay.AUTO,
            checks.member_of(TransferWay),
            '"auto", "relay", "sbcast" or "shared"',
        ),
        log_mode=table.take(
            "log-mode", LogMode.PRIVATE, checks.member_of(LogMode), '"private" or "group"'
        ),
        container_image=table.take(
            "container-image", None, checks.word, "the name of an image, or the path of one"
        ),
        container_mounts=table.take(
            "container-mounts",
            (),
            checks.each(checks.mount),
            'a list of mounts, for example ["/scratch:/scratch"]',
        ),
    )


def _slurm(table: Table, count: str) -> dict[str, Any]:
    return {
        "partition": table.take("partition", None, checks.word, "the name of a partition"),
        "cpus_per_task": table.take("cpus-per-task", None, checks.whole(1), count),
        "gpus_per_node": table.take("gpus-per-node", None, checks.gpus, checks.GPUS),
        "time": table.take("time", None, checks.slurm_time, checks.TIME),
        "account": table.take("account", None, checks.word, "the name of an account"),
        "exclude": table.take(
            "exclude", None, checks.node_list, 'nodes, for example "node0[1-3],node07" or a list'
        ),
        "nodelist": table.take(
            "nodelist", None, checks.node_list, 'nodes, for example "node0[1-3]" or a list'
        ),
        "qos": table.take("qos", None, checks.word, "the name of a quality of service"),
        "constraint": table.take(
            "constraint", None, checks.word, 'features of nodes, for example "a100&nvlink"'
        ),
        "reservation": table.take("reservation", None, checks.word, "the name of a reservation"),
        "mem": table.take("mem", None, checks.memory, checks.MEMORY),
        "avoid_bad": table.take("avoid-bad", False, checks.boolean, "true or false"),
        "salloc_args": table.take(
            "salloc-args", (), checks.texts, "a list of strings, one for each argument"
        ),
    }
