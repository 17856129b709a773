"""The choice where nodes come from, and the request that Slurm gets. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config.load import Config
from ..core.errors import ConfigError

ALLOCATIONS = ("auto", "slurm", "ssh", "local")
COMMANDS = ("salloc", "sbatch", "srun", "sbcast", "scontrol", "squeue")
"""What must be on PATH to use Slurm from here."""
INSIDE = ("srun", "sbcast", "scontrol", "squeue")
"""What must be on PATH inside an allocation."""

_LONG_NAMES = {
    **{"A": "account", "C": "constraint", "J": "job-name", "N": "nodes", "c": "cpus-per-task"},
    **{"n": "ntasks", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude"},
}
"""The long names of salloc's short options, of those that matter here."""

Source = Literal["local", "ssh", "inside", "salloc", "sbatch"]
"""Processes on this machine; hosts; the allocation this runs in; a new allocation; a batch job."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for nodes; None leaves an option to Slurm's own default."""

    name: str
    """The job's name."""
    nodes: tuple[int, int]
    """Fewest and most nodes."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account that is charged."""
    time: str | None = None
    """Time limit in one of Slurm's forms."""
    exclude: str | None = None
    """Nodes to avoid: those of the settings or the command line, and of ``args``."""
    cpus_per_task: int | None = None
    """CPUs of each node's one task."""
    gpus_per_node: str | None = None
    """GPUs on each node."""
    args: tuple[str, ...] = ()
    """Further options as they are; where one is given twice, Slurm takes the last."""
    nodelist: str | None = None
    """Nodes that must be among them, as a Slurm node list."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have, in Slurm's notation."""
    reservation: str | None = None
    """Slurm reservation."""
    mem: str | None = None
    """Memory on each node: megabytes, or a number with K, M, G or T."""
    comment: str | None = None
    """What ``squeue --format=%k`` and the accounting show: which bundle the job runs."""

    def named_options(self) -> dict[str, str | None]:
        """Return the values of the options that jobs of all kinds share, by long name."""
        least, most = self.nodes
        exact = least == most
        cpus = self.cpus_per_task
        return {
            "job-name": self.name,
            "nodes": str(least) if exact else f"{least}-{most}",
            # With a range, it would have Slurm give the fewest of the nodes (seen with 22.05).
            "ntasks-per-node": "1" if exact else None,
            "cpus-per-task": str(cpus) if cpus else None,
            "gpus-per-node": self.gpus_per_node,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "exclude": self.exclude,
            "nodelist": self.nodelist,
            "qos": self.qos,
            "constraint": self.constraint,
            "reservation": self.reservation,
            "mem": self.mem,
            "comment": self.comment,
        }

    def options(self) -> list[str]:
        """Return the options that ``salloc`` and ``sbatch`` share, without ``args``."""
        options = self.named_options().items()
        return [f"--{key}={value}" for key, value in options if value is not None]


@dataclass(frozen=True, kw_only=True)
class NamedHosts:
    """The place where the hosts of a job are named, if they are."""

    origin: str = ""
    """The place: ``--hosts``; empty if none are named."""
    by_option: bool = False
    """True for an option of the command line."""


def choose(
    asked: str,
    *,
    nodes: int,
    batch: bool,
    inside: str,
    found: Collection[str],
    hosts: NamedHosts = NamedHosts(),
) -> Source:
    """Decide where the nodes come from.

    Args:
        asked: ``auto``, ``slurm``, ``ssh`` or ``local``.
        nodes: the least number of nodes for the job.
        batch: True for a batch job.
        inside: ``SLURM_JOB_ID``; empty outside of an allocation.
        found: those of :data:`COMMANDS` that are on PATH.
        hosts: where hosts are named.

    Raises:
        ConfigError: it cannot be had; the message names what is missing.
    """
    _check_allocation(asked, hosts)
    if asked == "local":
        return _local(batch)
    if _uses_hosts(asked, inside, hosts):
        return _ssh(batch, hosts)
    source = _slurm_source(batch, inside)
    needed = INSIDE if source == "inside" else COMMANDS
    missing = [name for name in needed if name not in found]
    if not missing:
        return source
    if asked != "auto" or source != "salloc":
        reason = f"{_reason(asked, batch, inside)}: Slurm's commands are missing here"
        raise _no_slurm(reason, missing)
    if nodes > 1:
        raise _no_slurm(f"the job needs {nodes} nodes, and Slurm is not available here", missing)
    return "local"


def _check_allocation(asked: str, hosts: NamedHosts) -> None:
    if asked not in ALLOCATIONS:
        raise ConfigError(
            f"--allocation {asked} is not one of {', '.join(ALLOCATIONS)}",
            hint="auto uses Slurm where it is available; ssh takes the hosts that you name; local "
            "runs nodes as processes on this machine",
        )
    if asked in ("slurm", "local") and hosts.by_option:
        raise ConfigError(
            f"{hosts.origin} and --allocation {asked}: hosts are reached over ssh",
            hint="leave one of the two out",
        )


def _uses_hosts(asked: str, inside: str, hosts: NamedHosts) -> bool:
    """Return whether hosts are used; a Slurm allocation is preferred to hosts from a file."""
    if asked == "auto" and not hosts.by_option:
        return bool(hosts.origin) and not inside
    return asked == "ssh" or hosts.by_option


def _no_slurm(reason: str, missing: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{reason} (not on PATH: {', '.join(missing)})",
        hint="go to a login node of the cluster (or load its module: module load slurm); "
        "without Slurm name the hosts with --hosts; --allocation local tries the job with nodes "
        "that are processes on this machine",
    )


def _local(batch: bool) -> Source:
    if batch:
        raise ConfigError(
            "--batch and --allocation local: a batch job needs Slurm",
            hint="leave one of the two out",
        )
    return "local"


def _ssh(batch: bool, hosts: NamedHosts) -> Source:
    if not hosts.origin:
        raise ConfigError(
            "--allocation ssh: no hosts are named",
            hint="name them: --hosts node[01-08], --host-file FILE, or [cluster] hosts in "
            "stager.toml; in a job of PBS, LSF or OAR those of the job are taken",
        )
    if batch:
        raise ConfigError(
            f"--batch and hosts over ssh ({hosts.origin}): a batch job needs Slurm",
            hint="leave --batch out; to go on after you log out, start it with nohup or in tmux",
        )
    return "ssh"


def _slurm_source(batch: bool, inside: str) -> Source:
    if batch:
        return "sbatch"
    return "inside" if inside else "salloc"


def _reason(asked: str, batch: bool, inside: str) -> str:
    if batch:
        return "--batch"
    return "--allocation slurm" if asked == "slurm" else f"job {inside}"


def request(config: Config, env: Mapping[str, str], bundle_id: str = "") -> Request:
    """Return the request for a job's nodes.

    The settings come first, then the user's own ``$SALLOC_OPTS``; nodes to avoid are joined.

    Raises:
        ConfigError: ``SALLOC_OPTS`` has an open quote.
    """
    cluster = config.cluster
    given = list(_read_options(cluster.salloc_args, "cluster.salloc-args, --salloc-arg"))
    own = list(_read_options(_user_options(env), "SALLOC_OPTS"))
    excluded = [value for name, value, _ in (*given, *own) if name == "exclude" and value]
    if cluster.exclude:
        excluded.insert(0, cluster.exclude)
    asked = Request(
        name=config.name,
        nodes=cluster.nodes,
        partition=cluster.partition,
        account=cluster.account,
        time=cluster.time,
        exclude=",".join(dict.fromkeys(excluded)) or None,
        # Where nothing is said, each rank gets at least a CPU; Slurm's default is one a node.
        cpus_per_task=cluster.cpus_per_task or config.launch.nproc_per_node or None,
        gpus_per_node=cluster.gpus_per_node,
        args=tuple(
            word for name, _, words in (*given, *own) if name != "exclude" for word in words
        ),
        nodelist=cluster.nodelist,
        qos=cluster.qos,
        constraint=cluster.constraint,
        reservation=cluster.reservation,
        mem=cluster.mem,
        comment=f"stager:{bundle_id[:12]}" if bundle_id else None,
    )
    _refuse_contradictions(given, asked)
    return asked


def _user_options(env: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(env.get("SALLOC_OPTS", ""))
    except ValueError as exc:
        raise ConfigError(
            f"SALLOC_OPTS cannot be read: {exc}", hint="close the quote in that variable"
        ) from exc


def salloc_argv(asked: Request, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs another one inside a new allocation.

    When the allocation is revoked, Slurm sends its command SIGTERM, so that it can still report.
    When a node is lost the allocation stays: the driver ends the job itself, and collects the
    results of the other nodes.
    """
    fixed = ("--kill-command=TERM", "--no-kill")
    return ("salloc", *asked.options(), *fixed, *asked.args, *command)


def _read_options(words: Sequence[str], place: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each option's long name, its value, and the words that give it."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            raise ConfigError(
                f"{place}: {word} is not an option of Slurm",
                hint=f"options begin with dashes: --{word}",
            )
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--"):
            name, value = _LONG_NAMES.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
        given = [word]
        if not (equals or value) and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
            given.append(value)
        yield name, value, given


def _refuse_contradictions(given: Sequence[tuple[str, str, Sequence[str]]], asked: Request) -> None:
    """Refuse options of the settings that would override what the job relies on."""
    free = ("exclude", "comment")  # joined; and the user's own wins
    own = {name: value for name, value in asked.named_options().items() if name not in free}
    own |= {"job-name": None, "ntasks-per-node": "1"}
    for name, value, words in given:
        if name in ("ntasks", "ntasks-per-node") and value != own.get(name):
            why, instead = "one task is started on each node", "--nproc-per-node for ranks"
        elif own.get(name) not in (None, value):
            why, instead = f"the job has --{name}={own[name]}", f"cluster.{name}"
        else:
            continue
        raise ConfigError(
            f"cluster.salloc-args, --salloc-arg: {' '.join(words)} contradicts the job: {why}",
            hint=f"leave it out, and use {instead}",
        )
