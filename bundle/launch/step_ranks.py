"""The rank that a task of ``srun`` is: for ``exec``, which no launcher of ours has started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..system.hostlist import expand_hostlist

_FIRST_PORT, _PORTS = 20_000, 10_000
"""Ports that all tasks of a step can tell from its number; below those that Linux gives away."""


def step_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for a task that ``srun`` has started.

    Empty where there is no such task, or only one in its step, and where the caller has set a rank
    itself. A batch script and the shell of ``salloc`` are none.
    """
    world = slurm.get("SLURM_STEP_NUM_TASKS", "1")
    listed = slurm.get("SLURM_STEP_NODELIST", "")
    if "RANK" in slurm or "SLURM_STEP_ID" not in slurm or world == "1" or not listed:
        return {}
    node = slurm["SLURM_NODEID"]
    here = _tasks_of_nodes(slurm.get("SLURM_STEP_TASKS_PER_NODE", "1"))[int(node)]
    job = int(slurm.get("SLURM_JOB_ID", "0")) + int(slurm["SLURM_STEP_ID"])
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": world,
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "MASTER_ADDR": slurm.get("MASTER_ADDR", expand_hostlist(listed)[0]),
        "MASTER_PORT": slurm.get("MASTER_PORT", str(_FIRST_PORT + job % _PORTS)),
    }


def _tasks_of_nodes(text: str) -> list[int]:
    """Parse Slurm's short form of tasks per node: ``2(x3),1`` is 2, 2, 2, 1."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks
