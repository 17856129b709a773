"""``verify --deep`` by the real driver on local nodes; ``tests/slurm`` has what real nodes add."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from bundle.driver.deep_check import names_to_compare
from bundle.protocol.enumerations import Allocation
from bundle.protocol.job import Job
from stager.pack.bundle import Packed
from tests.support.bundles import rot
from tests.support.jobs import ask, job_for
from tests.support.ports import unused_port


def verify(program: Path, job: Job) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Exit status, result and all events of a deep verification."""
    file = Path(job.run_dir) / "job.json"
    file.write_text(json.dumps(job.to_json()))
    argv = [sys.executable, "-I", "-S", str(program), "drive", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr == ""
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, events[-1], events


def module(node: str) -> Path:
    """The file of the only package on a local node."""
    roots = Path(os.environ["STAGER_NODE_ROOT"])
    (found,) = roots.glob(f"*/nodes/{node}/*/envs/*/lib/*/site-packages/single/__init__.py")
    return found


def environments(node: str) -> list[Path]:
    return list(Path(os.environ["STAGER_NODE_ROOT"]).glob(f"*/nodes/{node}/*/envs/*"))


def test_all_is_well(single: Packed, program: Path, tmp_path: Path) -> None:
    code, result, events = verify(program, job_for(single, tmp_path, deep=True))
    assert (code, result["problems"]) == (0, {})
    begun = [event["phase"] for event in events if event["event"] == "begin"]
    assert begun[-3:] == ["probe", "deep", "all_reduce"]
    assert result["deep"]["all_reduce"] is None
    assert result["deep"]["skipped"] == "torch is not in the bundle"
    assert "the all-reduce is left out: torch is not in the bundle" in [
        event.get("text") for event in events
    ]
    log = (tmp_path / "logs" / "demo.4711.local2.1.out").read_text()
    assert "local2 deep: the environment is as it was built, every file" in log


def test_a_damaged_file_is_named_and_does_not_stay(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    job = job_for(single, tmp_path, deep=True)
    verify(program, job)
    damaged = module("local2")
    rot(damaged)
    code, result, _ = verify(program, job)
    assert (code, list(result["problems"])) == (3, ["local2"])
    (problem,) = result["problems"]["local2"]
    assert (problem["what"], problem["where"]) == ("the environment is damaged", str(damaged))
    assert "makes it again" in problem["fix"]
    assert environments("local2") == []
    assert len(environments("local1")) == 1
    code, result, _ = verify(program, job)
    assert (code, result["problems"]) == (0, {})


def test_an_agent_that_is_the_head_waits_for_the_others(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    """Alone it waits for nobody; and what it finds is no failure of its own."""
    job = job_for(single, tmp_path, nodes=("local1",))
    asked = {
        "head": ["127.0.0.1", unused_port()],
        "names": {"localhost": [], "no-such.invalid": []},
    }
    code, events = ask(program, "deep", job, root=str(tmp_path / "nowhere"), python="", **asked)
    clock, answer = events
    assert (code, clock["event"], answer["event"], answer["ok"]) == (0, "clock", "deep", True)
    assert answer["network"]["missing"] == []
    assert list(answer["network"]["differs"]) == ["localhost"]
    assert answer["damage"]


def test_a_port_that_is_taken(single: Packed, program: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        head = list(taken.getsockname()[:2])
        job = job_for(single, tmp_path, nodes=("local1",))
        root = str(tmp_path / "nowhere")
        _, events = ask(program, "deep", job, root=root, python="", head=head, names={})
    problem = events[-1]["network"]["problem"]
    assert problem["what"] == "the head node cannot listen on the job's port"


def test_names_that_only_ssh_knows_are_not_looked_up(single: Packed, tmp_path: Path) -> None:
    nodes = ("no-such.invalid", "ann@localhost")
    by_ssh = job_for(single, tmp_path, nodes=nodes, allocation=Allocation.SSH)
    assert names_to_compare(by_ssh).keys() == {"localhost"}
    by_slurm = job_for(single, tmp_path, nodes=nodes[:1], allocation=Allocation.SLURM)
    assert names_to_compare(by_slurm) == {"no-such.invalid": ()}
