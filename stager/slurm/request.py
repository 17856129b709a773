"""Where the nodes come from: the choice, and what Slurm is asked for. Pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config.load import Config
from ..core.errors import ConfigError

ALLOCATIONS = ("auto", "slurm", "local")
COMMANDS = ("salloc", "sbatch", "srun", "sbcast", "scontrol", "squeue")
"""What must be on PATH to use Slurm from here."""
INSIDE = ("srun", "sbcast", "scontrol", "squeue")
"""What must be on PATH inside an allocation."""

Source = Literal["local", "inside", "salloc", "sbatch"]
"""Processes here; the nodes of the allocation that this is in; of a new one; of a batch job."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What Slurm is asked for; None leaves an option to Slurm's own default."""

    name: str
    """The job's name."""
    nodes: tuple[int, int]
    """Fewest and most nodes."""
    partition: str | None
    """Slurm partition."""
    account: str | None
    """Slurm account that is charged."""
    time: str | None
    """Time limit in one of Slurm's forms."""
    exclude: str | None
    """Nodes to avoid: those of the settings or the command line, and of ``args``."""
    cpus_per_task: int | None
    """CPUs of each node's one task."""
    gpus_per_node: str | None
    """GPUs on each node."""
    args: tuple[str, ...]
    """Further options as they are; where one is given twice, Slurm takes the last."""

    def options(self) -> list[str]:
        """The options that ``salloc`` and ``sbatch`` share, without ``args``."""
        least, most = self.nodes
        named = {
            "job-name": self.name,
            "nodes": least if least == most else f"{least}-{most}",
            # With a range, it would have Slurm give the fewest of the nodes (seen with 22.05).
            "ntasks-per-node": 1 if least == most else None,
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-node": self.gpus_per_node,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "exclude": self.exclude,
        }
        return [f"--{key}={value}" for key, value in named.items() if value is not None]


def choose(asked: str, *, nodes: int, batch: bool, inside: str, found: Collection[str]) -> Source:
    """Decide where the nodes come from.

    Args:
        asked: ``auto``, ``slurm`` or ``local``.
        nodes: how many nodes the job takes at least.
        batch: whether a batch job is wanted.
        inside: ``SLURM_JOB_ID``; empty outside of an allocation.
        found: those of :data:`COMMANDS` that are on PATH.

    Raises:
        ConfigError: it cannot be had; the message names what is missing.
    """
    if asked not in ALLOCATIONS:
        raise ConfigError(
            f"--allocation {asked}: it is none of {', '.join(ALLOCATIONS)}",
            hint="auto takes Slurm where it is there; local makes nodes out of processes here",
        )
    if asked == "local":
        if batch:
            raise ConfigError(
                "--batch and --allocation local: a batch job needs Slurm",
                hint="leave one of the two out",
            )
        return "local"
    use: Source = "sbatch" if batch else "inside" if inside else "salloc"
    missing = [name for name in (INSIDE if use == "inside" else COMMANDS) if name not in found]
    if not missing:
        return use
    if asked == "auto" and not inside and not batch and nodes == 1:
        return "local"
    why = f"not on PATH: {', '.join(missing)}"
    if asked == "slurm" or batch or inside:
        what = "--batch" if batch else "--allocation slurm" if asked == "slurm" else f"job {inside}"
        message = f"{what}: Slurm's commands are missing here"
    else:
        message = f"{nodes} nodes are asked for, and there is no Slurm here"
    raise ConfigError(
        f"{message} ({why})",
        hint="go to a login node of the cluster (or load its module: module load slurm); "
        "--allocation local tries the job with nodes that are processes on this machine",
    )


def request(config: Config, env: Mapping[str, str]) -> Request:
    """What Slurm is asked for.

    The settings come first, then the user's own ``$SALLOC_OPTS``; nodes to avoid are joined.

    Args:
        config: the settings, with the command line's options in them.
        env: the variables of this process.

    Raises:
        ConfigError: ``SALLOC_OPTS`` has an open quote.
    """
    cluster = config.cluster
    try:
        extra = shlex.split(env.get("SALLOC_OPTS", ""))
    except ValueError as exc:
        raise ConfigError(
            f"SALLOC_OPTS cannot be read: {exc}", hint="close the quote in that variable"
        ) from exc
    avoided, args = _take_exclude([*cluster.salloc_args, *extra])
    exclude = ",".join(dict.fromkeys([*([cluster.exclude] if cluster.exclude else []), *avoided]))
    return Request(
        name=config.name,
        nodes=cluster.nodes,
        partition=cluster.partition,
        account=cluster.account,
        time=cluster.time,
        exclude=exclude or None,
        # Where nothing is said, each rank gets at least a CPU; Slurm's default is one a node.
        cpus_per_task=cluster.cpus_per_task or config.launch.nproc_per_node,
        gpus_per_node=cluster.gpus_per_node,
        args=tuple(args),
    )


def salloc_argv(asked: Request, command: Sequence[str]) -> tuple[str, ...]:
    """The command that runs another one inside a new allocation.

    When the allocation is taken away, its command is told by SIGTERM, so that it can still say so.
    When a node is lost the allocation stays: the driver ends the job itself, and brings home what
    the others have.
    """
    own = ("--kill-command=TERM", "--no-kill")
    return ("salloc", *asked.options(), *own, *asked.args, *command)


def _take_exclude(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Nodes that options exclude, and the other options."""
    avoided: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for one in rest:
        if one in ("-x", "--exclude"):
            avoided += [value for value in [next(rest, "")] if value]
        elif one.startswith("--exclude="):
            avoided.append(one.partition("=")[2])
        elif re.match(r"-x[^-]", one):
            avoided.append(one[2:].removeprefix("="))
        else:
            others.append(one)
    return avoided, others
