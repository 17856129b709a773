"""Jobs and their outcomes, local and on Slurm, for what is shown of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle.protocol.enumerations import Action, Allocation, Backend, Launcher
from bundle.protocol.job import Job, Launch, Requires
from stager.jobs.outcome import Outcome
from tests.support.events import job_ends


def job() -> Job:
    launch = Launch(("t.py",), 2, Launcher.TORCHRUN, Backend.AUTO, "auto", None, 0)
    return Job(
        id="77", name="demo", allocation=Allocation.LOCAL, nodes=("local1", "local2"),
        bundle="/b.tar",
        bundle_id="0" * 64, requires=Requires("3.11", "x86_64", "glibc", "2.28"), room=(1, 1),
        packages=(), imports=(), node_root="auto", run_dir="/w", log_dir="/logs", action=Action.RUN,
        import_modules=False, python_hints=(), launch=launch,
    )  # fmt: skip


def outcome(**result: Any) -> Outcome:
    return Outcome(job=job(), bundle=Path("/b.tar"), result=job_ends(**result))


def slurm_job(**changed: Any) -> Job:
    return replace(job(), allocation=Allocation.SLURM, id="", nodes=(), **changed)


def slurm_outcome(**result: Any) -> Outcome:
    asked = replace(job(), allocation=Allocation.SLURM, nodes=("n1", "n2", "n3"))
    return Outcome(job=asked, bundle=Path("/b.tar"), result=job_ends(**result))
