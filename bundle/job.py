"""The job as it travels: one frozen value, JSON on the way, parsed once at the edge.

``job.json``, version 1, has the fields of :class:`Job`. The driver reads it from a file; an agent
gets it on its standard input as ``{"job": ..., ...}`` together with what its phase needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .manifest import Digest, Requires
from .problem import NodeError, Problem

VERSION = 1


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


@dataclass(frozen=True)
class Job:
    """Everything the far side must know."""

    id: str
    """The allocation's id, or one made up for a local job."""
    name: str
    """The job's name, first part of every log's name."""
    allocation: str
    """``local``: nodes are processes on this machine."""
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
        requires = fields.pop("requires")
        for key in ("nodes", "room", "packages", "imports", "python_hints"):
            fields[key] = tuple(fields[key])
        launch["command"] = tuple(launch["command"])
        job = Job(requires=Requires(**requires), launch=Launch(**launch), **fields)
        _check(job)
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


def _check(job: Job) -> None:
    """Refuse what would become the name of a file elsewhere, or the start of no rank.

    Raises:
        ValueError: a field cannot be used; the message names it.
    """
    Digest(job.bundle_id)
    for what, name in [("id", job.id), ("name", job.name), *(("node", n) for n in job.nodes)]:
        if (
            not isinstance(name, str)
            or not name.isprintable()
            or "/" in name
            or name.strip(".") == ""
        ):
            raise ValueError(f"{what} {name!r} cannot be part of a file's name")
    if not job.nodes or len(set(job.nodes)) != len(job.nodes):
        raise ValueError("the nodes must be one or more, and different")
    if job.action not in ("verify", "run"):
        raise ValueError(f"action {job.action!r} is neither verify nor run")
