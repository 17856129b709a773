"""Commands in the place of Slurm's: a real cluster is in ``tests/slurm``."""

from __future__ import annotations

import os
from pathlib import Path

NAMES = ("salloc", "sbatch", "srun", "sbcast", "scontrol", "sinfo", "squeue")


def slurm_commands(folder: Path, otherwise: str = "exit 1", **answers: str) -> dict[str, str]:
    """A ``PATH`` with each of the commands first, which does as its answer in shell says."""
    folder.mkdir()
    for name in NAMES:
        command = folder / name
        command.write_text(f"#!/bin/sh\n{answers.get(name, otherwise)}\n")
        command.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": ""}
