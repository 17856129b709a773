"""Where on a node a job's node root goes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..protocol.job import Job
from ..system import files


def base_for(job: Job, env: Mapping[str, str], copies: int = 1) -> str:
    """The directory under which the node root goes: where the environment is, or has room.

    Args:
        job: the job.
        env: the node's variables.
        copies: how many environments are to be made there.

    Raises:
        NodeError: no directory fits.
    """
    base = files.choose_base(job.node_root, 0, 0, env)
    if not copies:
        return base
    own = os.path.join(base, f"stager-{os.geteuid()}")
    if os.path.isdir(env_of(job, own)):
        return base
    return files.choose_base(job.node_root, job.room[0] * copies, job.room[1] * copies, env)


def env_of(job: Job, root: str) -> str:
    """Return where the job's environment lies under a node root.

    It agrees with :func:`bundle.environment.unpack.env_path`.
    """
    return os.path.join(root, "envs", job.bundle_id)
