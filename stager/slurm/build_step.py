"""The command that runs a build from source on a node: ``stager build --on-node``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace

from ..config.load import Config
from .request import request

_NAME = "--job-name=stager-build"


def launcher(config: Config, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beginning of a command that runs the rest on a node.

    It is a step of the allocation that this runs in, else a job of its own, with the project's
    partition, account, time limit and GPUs. Without Slurm this machine is the node: nothing.
    """
    if shutil.which("srun", path=env.get("PATH")) is None:
        return ()
    if env.get("SLURM_JOB_ID"):
        cpus = env.get("SLURM_CPUS_ON_NODE", "")
        share = [f"--cpus-per-task={cpus}"] if cpus.isdigit() else []
        return ("srun", _NAME, "--nodes=1", "--ntasks=1", *share, "--overlap", "--mpi=none")
    asked = replace(request(config, env), name="stager-build", nodes=(1, 1))
    return ("srun", *asked.options(), "--mpi=none", *asked.args)
