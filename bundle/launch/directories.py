"""The directories of a job under a node root."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..node.node_root import env_path
from ..protocol.enumerations import Launcher
from ..protocol.job import Job
from ..protocol.messages import PlacedRequest


@dataclass(frozen=True)
class JobDirectories:
    """The directories of a job on one node."""

    root: str
    """The node root."""
    environment: str
    """The unpacked bundle."""
    job_dir: str
    """This job's private directory under the node root."""


def directories_of(request: PlacedRequest) -> JobDirectories:
    """Return the directories of a job on the node that is asked."""
    job = request.job
    task = os.environ.get("SLURM_LOCALID", "0") if job.launch.launcher is Launcher.SRUN else "0"
    return JobDirectories(
        root=request.root,
        environment=env_path(request.root, job.bundle_id),
        job_dir=os.path.join(request.root, "jobs", f"{job.id}.{request.node_rank}.{task}"),
    )


def work_tree(job: Job, root: str) -> str:
    """Return the copy of the project's folder on a node that does not share the run directory."""
    return os.path.join(root, "jobs", f"{job.id}.work")


def work_dir(job: Job, root: str) -> str:
    """Return the ranks' working directory on a node that does not share the run directory."""
    tree = work_tree(job, root)
    return os.path.join(tree, job.run_subdir) if job.run_subdir else tree
