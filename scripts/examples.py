#!/usr/bin/env python3
"""Writes the worked examples ``scripts/*.sbatch``: what ``stager script`` prints for a setting.

Usage: python scripts/examples.py [DIRECTORY]

The examples are read, not run: the bundle's path, its id and the digest in them are made up, and
the program is taken out of the bundle (``--no-embed``), so that nothing unreadable is in the way.
The first line under "made by" gives the same for a bundle of yours. A test keeps them in step.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bundle.protocol.digest import Digest  # noqa: E402
from bundle.protocol.job import Job, Launch  # noqa: E402
from bundle.protocol.requires import Requires  # noqa: E402
from stager import __version__  # noqa: E402
from stager.slurm.script import ScriptFacts, batch_script  # noqa: E402

BUNDLE_ID = Digest(hashlib.sha256(b"an example's bundle").hexdigest())
HOME = "/shared/home/you"

LAUNCH = Launch(
    command=("-m", "trainer", "tiny-bert", "--subset", "2000", "--epochs", "3"),
    nproc_per_node=2,
    launcher="torchrun",
    backend="auto",
    interface="auto",
    omp_num_threads=None,
    max_restarts=0,
)
JOB = Job(
    id="",
    name="ag-news",
    allocation="slurm",
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
    action="run",
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
    nodes=(3, 3),
    version=__version__,
    partition="torch",
    time="00:30:00",
    embed=False,
)
INTERFACES = {"node0[1-3]": "ens1f1", "node04": "ens1f0", "node05": "ens1f0np0"}


def facts() -> Iterator[tuple[str, ScriptFacts]]:
    """Each example's name and what it is made from."""
    usual = "--nodes 3 --nproc-per-node 2 --partition torch --time 00:30:00"
    yield "torchrun", _example(FACTS, usual)
    yield "srun", _example(FACTS, f"{usual} --launcher srun", launcher="srun")
    # The interfaces come from stager.toml: interface = { "node0[1-3]" = "ens1f1", ... }
    yield "gloo", _example(FACTS, f"{usual} --backend gloo", backend="gloo", interface=INTERFACES)
    gpus = replace(FACTS, partition="gpu", nodes=(4, 4), time="02:00:00", gpus_per_node="8")
    gpus = replace(gpus, job=replace(JOB, cpus_per_task=32))
    # CPUs and GPUs a node come from stager.toml: cpus-per-task = 32, gpus-per-node = 8
    on_gpus = "--nodes 4 --nproc-per-node 8 --partition gpu --time 02:00:00"
    yield (
        "nccl",
        _example(gpus, f"{on_gpus} --backend nccl", nproc_per_node=8, backend="nccl"),
    )
    image = "/shared/images/pytorch.sqsh"
    yield (
        "container",
        _example(
            gpus,
            f"{on_gpus} --container-image {image} --container-mounts /shared/data:/data",
            nproc_per_node=8,
            container_image=image,
            container_mounts=("/shared/data:/data",),
        ),
    )
    again = replace(FACTS, requeue=True)
    resuming = (*LAUNCH.command, "--resume")
    yield (
        "requeue",
        _example(again, f"{usual} --requeue -- {' '.join(resuming)}", command=resuming),
    )


def _example(facts: ScriptFacts, options: str, **launch: object) -> ScriptFacts:
    job = replace(facts.job, launch=replace(facts.job.launch, **launch))  # type: ignore[arg-type]
    return replace(facts, job=job, made_with=f"stager script --no-embed {options}")


def main(folder: Path) -> None:
    """Write all examples into a directory."""
    for name, setting in facts():
        (folder / f"{name}.sbatch").write_text(batch_script(setting), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
