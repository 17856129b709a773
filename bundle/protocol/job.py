"""The job as it travels: one frozen value, JSON on the way, parsed once at the edge.

``job.json``, version 4, has the fields of :class:`Job`. The driver reads it from a file; an agent
gets it as ``{"job": ..., ...}`` together with what its phase needs. A job for Slurm has neither an
id nor nodes until an allocation stands: ``bind`` of :mod:`bundle.driver.transports.slurm_commands`
fills them in.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import fields as kinds
from . import log_modes
from .digest import Digest
from .problem import NodeError, Problem
from .rates import Rates, rates_from
from .requires import Requires, check_requires

VERSION = 4
NAME_BYTES = 200
"""What a job's name, its id and a node may have together: a file's name has 255 bytes."""


@dataclass(frozen=True)
class Launch:
    """How the ranks are started."""

    command: tuple[str, ...]
    """A script or ``-m MODULE``, and its arguments; empty when nothing is launched."""
    nproc_per_node: int | None
    """Ranks on each node; None for one for each GPU, or one."""
    launcher: str
    """``torchrun`` or ``srun``."""
    backend: str
    """``gloo``, ``nccl`` or ``auto``."""
    interface: str | dict[str, str]
    """``auto``, a name, or names by node pattern."""
    omp_num_threads: int | None
    """CPU threads of one rank; None for its share of the CPUs."""
    max_restarts: int
    """How often torchrun starts failed ranks again."""
    elastic: tuple[int, int] | None = None
    """Fewest and most nodes that a group of ranks goes on with; None: all of them, or it ends."""
    pass_env: tuple[str, ...] = ()
    """Names of secret variables that the ranks get; only names ever travel in a job."""
    container_image: str | None = None
    """Image that the ranks run in, for Slurm's pyxis plugin."""
    container_mounts: tuple[str, ...] = ()
    """``SOURCE:TARGET`` pairs for it, besides the node root."""
    grace_seconds: int = 7
    """Seconds that ranks which are told to end get to save what they have."""


@dataclass(frozen=True)
class Job:
    """Everything the far side must know."""

    id: str
    """The allocation's id, or one made up for a local job."""
    name: str
    """The job's name, first part of every log's name."""
    allocation: str
    """``local``: nodes are processes on this machine; ``slurm``: those of an allocation."""
    nodes: tuple[str, ...]
    """Names of the nodes; the first one is the head."""
    bundle: str
    """Path of the bundle as seen from where the driver runs."""
    bundle_id: str
    """The bundle's id."""
    requires: Requires
    """What a node must have."""
    room: tuple[int, int]
    """Bytes and inodes that a fresh environment takes."""
    packages: tuple[str, ...]
    """Packages that the probe reports."""
    imports: tuple[str, ...]
    """Modules that the probe looks for."""
    node_root: str
    """``auto``, or the directory under which the node root is made."""
    run_dir: str
    """Where ranks run, if the node sees it."""
    log_dir: str
    """Where the driver writes logs."""
    action: str
    """``verify`` or ``run``."""
    import_modules: bool
    """Whether the probe really imports the modules, or only looks for them."""
    python_hints: tuple[str, ...]
    """Interpreters to try first on a node."""
    launch: Launch
    """How the ranks are started."""
    attempt: int = 0
    """How often Slurm has started the job before (a requeue)."""
    wanted: tuple[int, int] | None = None
    """Fewest and most nodes to take of an allocation; None: all that it has."""
    min_nodes: int | None = None
    """Nodes that fail are left out as long as so many remain; None: all must do."""
    stage: str = "auto"
    """``auto``, ``always`` or ``never``: whether the bundle is broadcast."""
    cpus_per_task: int | None = None
    """CPUs of each node's part; None for all that the allocation has there."""
    outputs: tuple[str, ...] = ()
    """Paths below the run directory that come back where nodes do not share it."""
    dry_run: bool = False
    """Whether to stop after the plan."""
    keep: tuple[str, ...] = ()
    """Ids of the bundles whose environments a ``clean`` leaves alone."""
    deep: bool = False
    """Whether ``verify`` also reads every file again, and tries the network."""
    rates: Rates | None = None
    """How quick the cluster is, as earlier jobs have shown; None for what is assumed."""
    log_mode: str = log_modes.PRIVATE
    """Who may read its files: ``private``, its user alone; ``group``, the log directory's group."""

    trusted_bundle: bool = False
    """Whether the offline root that sends it has made it: else each of its files is compared with
    its digest while it is unpacked."""
    show_all: bool = False
    """Whether every node's output is printed as it comes, or only the first node's; logs have all.
    """

    @property
    def one_step(self) -> bool:
        """Whether a step of Slurm's that takes its other phases may launch the ranks, too.

        Ranks that Slurm starts are tasks of their own, and what only ranks may know is for their
        own step alone; nor can nodes leave and stay by themselves in the step of all phases.
        """
        settings = self.launch
        return not (settings.launcher == "srun" or settings.pass_env or settings.elastic)

    def to_json(self) -> dict[str, Any]:
        """The job as a JSON object."""
        return {"v": VERSION, **asdict(self)}


def parse(raw: Mapping[str, Any]) -> Job:
    """Read a job.

    Raises:
        NodeError: another version, or a field is missing or unknown.
    """
    try:
        fields = dict(raw)
        version = fields.pop("v")
        if version != VERSION:
            raise ValueError(f"version {version!r}, this program speaks {VERSION}")
        launch = dict(fields.pop("launch"))
        for value, kind in ((launch, Launch), (fields, Job)):
            known = {one.name for one in dataclasses.fields(kind)} - {"launch"}
            if missing := sorted(known - value.keys()):
                raise ValueError(f"{', '.join(missing)}: missing")
        requires = fields.pop("requires")
        fields["rates"] = rates_from(fields["rates"])
        for key in ("nodes", "room", "packages", "imports", "python_hints", "outputs", "keep"):
            fields[key] = tuple(fields[key])
        for key in ("command", "pass_env", "container_mounts"):
            launch[key] = tuple(launch[key])
        for table, key in ((launch, "elastic"), (fields, "wanted")):
            if table[key] is not None:
                table[key] = tuple(table[key])
        job = Job(requires=Requires(**requires), launch=Launch(**launch), **fields)
        for whole in (job, job.launch, job.requires):
            kinds.check(whole)
        check(job)
        return job
    except (KeyError, TypeError, ValueError) as exc:
        raise NodeError(
            Problem(
                what="the job description cannot be read",
                where="job.json",
                why=f"{type(exc).__name__}: {exc}",
                fix="start the job with the same version of stager that built the bundle",
            )
        ) from exc


def redacted(job: Job) -> Job:
    """Return the job as it may be kept and shown: without the secrets among its arguments."""
    from ..redaction.masking import (  # an agent needs them later, if at all
        masked,
        without_url_secrets,
    )

    image = job.launch.container_image
    launch = replace(
        job.launch,
        command=tuple(masked(job.launch.command)),
        container_image=image and without_url_secrets(image),
    )
    return replace(job, launch=launch)


def load(path: str) -> Job:
    """Read a job from a file.

    Raises:
        NodeError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as handle:
            raw = json.load(handle)
    except (OSError, ValueError, RecursionError) as exc:
        problem = Problem("the job description cannot be read", path, str(exc), "start it again")
        raise NodeError(problem) from exc
    return parse(raw)


def _bytes(name: str) -> int:
    return len(os.fsencode(name))


def _cut(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def check(job: Job) -> None:
    """Refuse what would become the name of a file elsewhere, or the start of no rank.

    To be asked again when values come in later, as those of an allocation do.

    Raises:
        ValueError: a field cannot be used; the message names it.
    """
    Digest(job.bundle_id)
    check_requires(job.requires)
    if job.allocation not in ("local", "slurm"):
        raise ValueError(f"allocation {job.allocation!r} is neither local nor slurm")
    if job.allocation == "slurm" and not job.id and not job.nodes:
        # To be bound to an allocation first; slurm.bind then checks it again.
        job = replace(job, id="unbound", nodes=("unbound",))
    for what, name in [("id", job.id), ("name", job.name), *(("node", n) for n in job.nodes)]:
        if (
            not isinstance(name, str)
            or not name.isprintable()
            or "/" in name
            or name.strip(".") == ""
        ):
            raise ValueError(f"{what} {_cut(name)} cannot be part of a file's name")
    longest = max((f"{job.name}.{job.id}.{node}" for node in job.nodes), key=_bytes, default="")
    if _bytes(longest) > NAME_BYTES:
        raise ValueError(
            f"name, id and node have {_bytes(longest)} bytes together ({_cut(longest)}): the names "
            f"of logs begin with them, and have room for {NAME_BYTES}"
        )
    if not job.nodes or len(set(job.nodes)) != len(job.nodes):
        raise ValueError("the nodes must be one or more, and different")
    if job.log_mode not in log_modes.MODES:
        raise ValueError(f"log_mode {job.log_mode!r} is none of {', '.join(log_modes.MODES)}")
    if job.action not in ("verify", "run", "clean"):
        raise ValueError(f"action {job.action!r} is none of verify, run, clean")
