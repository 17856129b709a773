"""Jobs for the far side in tests: job values for real bundles, and agents asked directly."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle.format.manifest import estimate_room
from bundle.protocol.digest import Digest
from bundle.protocol.enumerations import Action, Allocation, Backend, Launcher
from bundle.protocol.job import Job, Launch, Requires
from bundle.protocol.messages import GroupSettings, LaunchRequest
from stager.pack.bundle import Packed
from tests.support.bundles import BASE_PYTHON
from tests.support.processes import run

LAUNCH = Launch(
    command=("t.py",),
    nproc_per_node=1,
    launcher=Launcher.TORCHRUN,
    backend=Backend.AUTO,
    interface="auto",
    omp_num_threads=None,
    max_restarts=0,
)


PLAIN = Job(
    id="4711",
    name="demo",
    allocation=Allocation.SLURM,
    nodes=("n0", "n1"),
    bundle="/shared/demo.pkgs.tar",
    bundle_id=Digest.of(b"bundle"),
    requires=Requires(python="3.11", machine="x86_64", libc="glibc", libc_version="2.28"),
    room=(1000, 20),
    packages=("torch",),
    imports=("torch",),
    node_root="auto",
    run_dir="/home/me/project",
    log_dir="/home/me/slurm_logs",
    action=Action.RUN,
    import_modules=False,
    python_hints=(),
    launch=LAUNCH,
)


def launch_request(
    node_rank: int = 1, nodes: int = 3, settings: GroupSettings | None = None, **launch: Any
) -> LaunchRequest:
    """What a node of job 42 is asked to start: two ranks, unless other settings are given."""
    names = tuple(f"hpc{number:02}" for number in range(7, 7 + nodes))
    job = replace(PLAIN, id="42", nodes=names, launch=replace(LAUNCH, **launch))
    settings = settings or GroupSettings("10.1.2.3", 61042, "gloo", 2)
    return LaunchRequest(job, names[node_rank], node_rank, 1, "", "", settings, shared=True)


def job_for(packed: Packed, folder: Path, **changed: Any) -> Job:
    """A job that verifies a bundle on two local nodes, and logs below a folder."""
    manifest = packed.manifest
    job = replace(
        PLAIN,
        allocation=Allocation.LOCAL,
        nodes=("local1", "local2"),
        bundle=str(packed.path),
        bundle_id=manifest.id,
        requires=manifest.requires,
        room=estimate_room(manifest.layers),
        packages=manifest.packages,
        imports=manifest.imports,
        run_dir=str(folder),
        log_dir=str(folder / "logs"),
        action=Action.VERIFY,
        python_hints=(BASE_PYTHON,),
    )
    return replace(job, **changed)


def ask(
    program: Path, phase: str, job: Job | dict[str, Any], **request: Any
) -> tuple[int, list[dict[str, Any]]]:
    told = job.to_json() if isinstance(job, Job) else job
    node = {"node": "local1", "node_rank": 0, "nodes_here": 1}
    asked = {"v": 1, "phase": phase, "job": told, **node, **request}
    argv = [sys.executable, "-I", "-S", program, "agent", phase]
    done = run(argv, given=json.dumps(asked) + "\n")
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def driver_argv(program: Path, job: Job, *prefix: str) -> list[str]:
    file = Path(job.run_dir) / "job.json"
    file.write_text(json.dumps(job.to_json()))
    return [*prefix, sys.executable, "-I", "-S", str(program), "drive", str(file)]


def drive(
    program: Path, job: Job, *prefix: str, **env: str
) -> tuple[int, list[dict[str, Any]], str]:
    done = run(driver_argv(program, job, *prefix), env={**os.environ, **env})
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr
