#!/usr/bin/env python3
"""Write the worked examples of ``docs/examples``: what ``stager script`` prints for a setting.

Usage: python scripts/examples.py [DIRECTORY]

The examples are read, not run: the bundle's path, its id and the digest in them are made up, and
the program is taken out of the bundle (``--no-embed``), so that nothing unreadable is in the way.
The first line under "made by" gives the same for a bundle of yours. A test keeps them in step.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from bundle.protocol.digest import Digest  # noqa: E402
from bundle.protocol.enumerations import Action, Allocation, Backend, Launcher  # noqa: E402
from bundle.protocol.job import (  # noqa: E402
    Job,
    Launch,
    Requires,
)
from stager import __version__  # noqa: E402
from stager.slurm.batch_script import ScriptFacts, batch_script  # noqa: E402
from stager.slurm.request import Request  # noqa: E402

BUNDLE_ID = Digest(hashlib.sha256(b"an example's bundle").hexdigest())
HOME = "/shared/home/you"

LAUNCH = Launch(
    command=("-m", "trainer", "tiny-bert", "--subset", "2000", "--epochs", "3"),
    nproc_per_node=2,
    launcher=Launcher.TORCHRUN,
    backend=Backend.AUTO,
    interface="auto",
    omp_num_threads=None,
    max_restarts=0,
)
JOB = Job(
    id="",
    name="ag-news",
    allocation=Allocation.SLURM,
    nodes=(),
    bundle=f"{HOME}/offline_repo_py311/bundles/ag-news-{BUNDLE_ID[:12]}.pkgs.tar",
    bundle_id=BUNDLE_ID,
    requires=Requires(python="3.11", machine="x86_64", libc="glibc", libc_version="2.28"),
    room=(1_600_000_000, 36_000),
    packages=("torch", "transformers", "datasets", "numpy"),
    imports=("torch", "transformers", "datasets", "numpy"),
    node_root="auto",
    run_dir=f"{HOME}/ag-news",
    log_dir=f"{HOME}/slurm_logs",
    action=Action.RUN,
    import_modules=False,
    python_hints=("python3.11",),
    launch=LAUNCH,
    cpus_per_task=4,
    outputs=("tiny_out",),
)
FACTS = ScriptFacts(
    job=JOB,
    program=b"stands in for the far side's program",
    bundle_bytes=395_000_000,
    request=Request(
        name=JOB.name, nodes=(3, 3), cpus_per_task=4, partition="torch", time="00:30:00"
    ),
    version=__version__,
    embed=False,
)
USUAL = "--nodes 3 --nproc-per-node 2 --partition torch --time 00:30:00"


def examples() -> dict[str, ScriptFacts]:
    """Return what each example is made from, by its name."""
    command = (*LAUNCH.command, "--resume")
    resuming = replace(JOB, launch=replace(LAUNCH, command=command))
    return {
        "run": replace(FACTS, made_with=f"stager script --no-embed {USUAL}"),
        "requeue": replace(
            FACTS,
            job=resuming,
            requeue=True,
            made_with=f"stager script --no-embed {USUAL} --requeue -- {' '.join(command)}",
        ),
    }


def main(folder: Path) -> None:
    """Write all examples into a directory."""
    for name, facts in examples().items():
        (folder / f"{name}.sbatch").write_text(batch_script(facts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPO / "docs" / "examples")
