"""The place of a job's node root on a node."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..protocol.job import Job
from ..system import files


def base_for(job: Job, env: Mapping[str, str], copies: int = 1) -> str:
    """Return the directory for the node root: one that has the environment, or room for it.

    Args:
        job: the job.
        env: the node's variables.
        copies: number of environments to be made there.

    Raises:
        NodeError: no directory fits.
    """
    base = files.choose_base(job.node_root, 0, 0, env)
    if not copies:
        return base
    root = os.path.join(base, files.node_root_name())
    if os.path.isdir(env_of(job, root)):
        return base
    size, inodes = job.room
    return files.choose_base(job.node_root, size * copies, inodes * copies, env)


def env_of(job: Job, root: str) -> str:
    """Return the path of the job's environment under a node root.

    It agrees with :func:`bundle.environment.unpack.env_path`.
    """
    return os.path.join(root, "envs", job.bundle_id)
