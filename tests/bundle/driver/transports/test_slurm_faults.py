"""What srun says went wrong: on which node, whose fault it was, and what to do about it."""

from __future__ import annotations

import pytest

from bundle.driver.transports.slurm_commands import (
    PATIENCE,
    Step,
    advice,
    fault_code,
    patience,
    step_argv,
    step_faults,
)

KILLED = """\
srun: error: node02: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.4
slurmstepd: error: *** STEP 7.4 ON node01 CANCELLED AT 2026-01-01T00:00:00 ***
srun: error: node01: task 0: Terminated
srun: error: node03: task 2: Killed
"""
UNREACHABLE = """\
srun: error: Task launch for StepId=7.4 failed on node node02: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: node[01,03]: tasks 0,2: Killed
"""
FAILED = """\
srun: error: node03: tasks 4-5: Exited with exit code 3
srun: error: node01: task 0: Terminated
"""
LOST = """\
srun: error: Node failure on node[02-03]
srun: error: node01: task 0: Killed
"""


@pytest.mark.parametrize(
    ("text", "fault", "others"),
    [
        (KILLED, ("node02", "task 1: Killed"), ["node01", "node03"]),
        (
            UNREACHABLE,
            ("node02", "Slurm can start nothing there (Communication connection failure)"),
            ["node01", "node03"],
        ),
        (FAILED, ("node03", "task 4-5: Exited with exit code 3"), ["node01"]),
        (LOST, ("node02", "Slurm lost the node (node failure)"), ["node01"]),
    ],
)
def test_one_is_to_blame_and_the_others_follow(
    text: str, fault: tuple[str, str], others: list[str]
) -> None:
    found = step_faults(text)
    assert found[fault[0]] == fault[1]
    for node in others:
        assert found[node] == f"srun ended it, as {fault[0]} had failed"


def test_the_exit_status_of_a_fault() -> None:
    assert fault_code("task 1: Killed", 1) == -9
    assert fault_code("task 1: Terminated", 1) == -15
    assert fault_code("tasks 4-5: Exited with exit code 3", 1) == 3
    assert fault_code("srun ended it, as node02 had failed", 1) == -9
    assert fault_code("Slurm lost the node (node failure)", 1) == 1


def test_what_to_do() -> None:
    for fault in step_faults(UNREACHABLE)["node02"], step_faults(LOST)["node03"]:
        assert "--exclude=n7" in advice("n7", fault)
    refused = "exit status 1; srun: error: Unable to create step for job 7: Requested node ..."
    assert "sinfo -N -n n7" in advice("n7", refused)
    assert advice("n7", "task 1: Killed") == ""


def test_how_long_others_may_go_on() -> None:
    assert [patience({"SLURM_WAIT": text}) for text in ("0", "90", "soon", "")] == [
        0,
        90,
        PATIENCE,
        PATIENCE,
    ]
    step = {"phase": "launch", "nodes": ("n1", "n2"), "cpus": 1}
    assert "--wait=0" in step_argv(Step(**step), [])
    assert f"--wait={PATIENCE + 30}" in step_argv(Step(**step, patience=PATIENCE), [])
