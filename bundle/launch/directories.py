"""The directories of a job under a node root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..node.location import env_of
from ..protocol.job import Job


@dataclass(frozen=True)
class JobDirectories:
    """The directories of a job on one node."""

    root: str
    """The node root."""
    environment: str
    """The unpacked bundle."""
    job_dir: str
    """This job's private directory under the node root."""


def place_of(job: Job, request: Mapping[str, Any]) -> JobDirectories:
    """Return the directories of a job on this node."""
    root = str(request["root"])
    task = os.environ.get("SLURM_LOCALID", "0") if job.launch.launcher == "srun" else "0"
    return JobDirectories(
        root=root,
        environment=env_of(job, root),
        job_dir=os.path.join(root, "jobs", f"{job.id}.{request['node_rank']}.{task}"),
    )


def work_dir(job: Job, root: str) -> str:
    """Return the ranks' working directory on a node that does not share the run directory."""
    return os.path.join(root, "jobs", f"{job.id}.work")
