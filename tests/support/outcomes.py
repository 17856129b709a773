"""Jobs and their outcomes, local and on Slurm, for what is shown of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle.protocol.enumerations import Allocation
from bundle.protocol.job import Job
from stager.jobs.outcome import Outcome
from tests.support.events import job_ends
from tests.support.jobs import LAUNCH, PLAIN


def job() -> Job:
    local = {"id": "77", "allocation": Allocation.LOCAL, "nodes": ("local1", "local2")}
    bundle = {"bundle": "/b.tar", "bundle_id": "0" * 64, "packages": (), "imports": ()}
    launch = replace(LAUNCH, nproc_per_node=2)
    return replace(PLAIN, **local, **bundle, room=(1, 1), run_dir="/w", log_dir="/logs",
                   launch=launch)  # fmt: skip


def outcome(**result: Any) -> Outcome:
    return Outcome(job=job(), bundle=Path("/b.tar"), result=job_ends(**result))


def slurm_job(**changed: Any) -> Job:
    return replace(job(), allocation=Allocation.SLURM, id="", nodes=(), **changed)


def slurm_outcome(**result: Any) -> Outcome:
    asked = replace(job(), allocation=Allocation.SLURM, nodes=("n1", "n2", "n3"))
    return Outcome(job=asked, bundle=Path("/b.tar"), result=job_ends(**result))
