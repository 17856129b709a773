"""Jobs that fail, for real: the first failure is found, shown and classed, and nothing stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import until
from tests.support.torch_project import Ran, TorchProject

pytestmark = [pytest.mark.slow, pytest.mark.network]

FAILURE_KEYS = {
    "node", "rank", "exit_code", "class", "cause", "hint", "lines", "meaning", "time", "retry",
    "retry_reason", "hang", "variables", "step", "seeds",
}  # fmt: skip
ONE = ("--nodes", "1", "--nproc-per-node", "1")
ONE_NODE = ("--nodes", "1")
MEET = """\
import os, signal, time
import torch
import torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == 3:
    time.sleep(0.5)  # the others wait by now
    {fault}
dist.all_reduce(torch.ones(1))
"""
ALONE = """\
import ctypes, os, sys, time
if os.environ["RANK"] == "{rank}":
    print("last words of rank {rank}", flush=True)
    time.sleep(0.5)
    {fault}
time.sleep(600)
"""


def failed(torch_project: TorchProject, ran: Ran) -> dict[str, Any]:
    """What every failed job has in common; returns its first failure."""
    report = ran.report
    assert ran.code == 3
    assert report["ok"] is False
    failure: dict[str, Any] = report["first_failure"]
    assert set(failure) == FAILURE_KEYS
    assert failure["hint"]
    assert len(failure["lines"]) <= 20
    who = (
        failure["node"] if failure["rank"] is None else f"{failure['node']} rank {failure['rank']}"
    )
    (error,) = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert error == f"error: {who} failed (exit status {failure['exit_code']}): {failure['cause']}"
    for ours in (
        "bundle/driver/driver.py",
        "bundle/agent/agent.py",
        "stager/cli/",
        "stager/jobs/driver.py",
    ):
        assert ours not in ran.stderr
    assert until(lambda: not torch_project.left_over()), torch_project.left_over()
    return failure


def test_one_rank_raises_while_the_others_wait(torch_project: TorchProject, tmp_path: Path) -> None:
    script = MEET.format(fault="raise ValueError('rank three is unhappy')")
    ran = torch_project.run(script, cwd=tmp_path)
    failure = failed(torch_project, ran)
    assert (failure["node"], failure["rank"], failure["exit_code"]) == ("local2", 3, 1)
    assert failure["class"] == "python-error"
    assert failure["cause"] == "ValueError: rank three is unhappy"
    assert failure["lines"][0] == "Traceback (most recent call last):"
    assert failure["lines"][-1] == "ValueError: rank three is unhappy"
    assert f'File "{tmp_path}/script.py", line 7, in <module>' in failure["lines"][1]
    assert set(ran.report["exit_codes"]) == {"local1", "local2"}
    assert 0 not in ran.report["exit_codes"].values()
    assert "  | ValueError: rank three is unhappy" in ran.stderr.splitlines()
    assert "ValueError: rank three is unhappy" in ran.log("local2")
    asked_later(torch_project, ran, failure, consequences=[0, 1, 2])


def asked_later(
    torch_project: TorchProject, ran: Ran, failure: dict[str, Any], consequences: list[int]
) -> None:
    """The same first failure, out of the files alone, with the line that shows it."""
    options = ("--log-dir", str(ran.logs))
    told = torch_project.stager("diagnose", ran.report["job_id"], *options, "--json", cwd=ran.logs)
    report = json.loads(told.stdout)
    assert (told.returncode, report["first_failure"]) == (0, failure)
    assert report["consequences"] == ran.report["consequences"] == consequences
    (proof,) = report["evidence"]
    line = Path(proof["file"]).read_text().splitlines()[proof["line"] - 1]
    assert line.endswith(proof["text"])  # torch may have marked it: [rank3]:
    shown = torch_project.stager("logs", *options, "--errors", cwd=ran.logs).stdout.splitlines()
    assert shown[0].endswith("local2 3 | Traceback (most recent call last):")
    assert sum(line.endswith("(the same traceback as above, here as well)") for line in shown) == 1
    assert not [line for line in shown if "ChildFailedError" in line]
    assert len(shown) < 30  # all ranks have written some eighty lines


@pytest.mark.full
def test_one_rank_is_killed_while_the_others_wait(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    """It leaves no word, and its peers have raised before anybody knows that it is gone."""
    script = MEET.format(fault="os.kill(os.getpid(), signal.SIGKILL)")
    failure = failed(torch_project, torch_project.run(script, cwd=tmp_path))
    assert (failure["node"], failure["rank"], failure["exit_code"]) == ("local2", 3, -9)
    assert failure["class"] == "killed"
    assert failure["cause"] == "it was killed by SIGKILL"
    assert "memory" in failure["hint"]


@pytest.mark.full
def test_a_crash_in_compiled_code(torch_project: TorchProject, tmp_path: Path) -> None:
    script = ALONE.format(rank=1, fault="ctypes.string_at(0)")
    failure = failed(torch_project, torch_project.run(script, cwd=tmp_path, options=ONE_NODE))
    assert (failure["node"], failure["rank"], failure["exit_code"]) == ("local1", 1, -11)
    assert (failure["class"], failure["cause"]) == ("killed", "it was killed by SIGSEGV")
    # What torchrun has to say about it, forty lines, is not what the rank wrote.
    assert failure["lines"] == ["last words of rank 1"]


def test_there_is_no_such_script(torch_project: TorchProject, tmp_path: Path) -> None:
    """By an absolute path, which is the nodes' own affair; any other is missed before."""
    absent = tmp_path / "a.py"
    failure = failed(torch_project, torch_project.job("run", *ONE, "--", absent, cwd=tmp_path))
    assert (failure["node"], failure["rank"], failure["exit_code"]) == ("local1", 0, 2)
    assert failure["class"] == "missing-module"
    assert f"there is no {absent}" in failure["cause"]
    logs = tmp_path / "other-logs"
    bundle = ("--bundle", torch_project.bundle, "--log-dir", logs)
    misspelt = torch_project.stager("run", *ONE, *bundle, "--", "a.py", cwd=tmp_path)
    assert (misspelt.returncode, misspelt.stdout) == (1, "")
    assert "there is no script a.py" in misspelt.stderr
    assert not list(logs.glob("events.*")), "it would be taken for the newest job"


@pytest.mark.full
def test_a_rank_that_is_started_again(torch_project: TorchProject, tmp_path: Path) -> None:
    settings = "[environment]\nrequirements = []\n[launch]\nmax-restarts = 1\n"
    (tmp_path / "stager.toml").write_text(settings)
    script = (
        "import os\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('the first time')\n"
        "print('the second time')\n"
    )
    ran = torch_project.run(script, cwd=tmp_path, options=ONE)
    assert (ran.code, ran.report["first_failure"]) == (0, None)
    assert ran.output().count("the second time") == 1
    assert "ValueError: the first time" in ran.output()
    assert torch_project.left_over() == []
