"""What srun says went wrong: on which node, whose fault it was, and what to do about it."""

from __future__ import annotations

import pytest

from bundle.driver.transports.slurm_text import (
    PATIENCE,
    general_fault,
    patience,
    step_argv,
    step_faults,
)
from bundle.driver.transports.transport import Step, StepFault
from bundle.protocol.problem import Problem, ProblemCode

KILLED = """\
srun: error: node02: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.4
slurmstepd: error: *** STEP 7.4 ON node01 CANCELLED AT 2026-01-01T00:00:00 ***
srun: error: node01: task 0: Terminated
srun: error: node03: task 2: Killed
"""
NO_START = """\
srun: error: Task launch for StepId=7.4 failed on node node02: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: node[01,03]: tasks 0,2: Killed
"""
FAILED = """\
srun: error: node03: tasks 4-5: Exited with exit code 3
srun: error: node01: task 0: Terminated
"""
TOLD = """\
srun: error: node01: task 0: Exited with exit code 143
srun: error: node02: task 1: Killed
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
            NO_START,
            ("node02", "Slurm cannot start anything there (Communication connection failure)"),
            ["node01", "node03"],
        ),
        (FAILED, ("node03", "task 4-5: Exited with exit code 3"), ["node01"]),
        (TOLD, ("node02", "task 1: Killed"), ["node01"]),
        (LOST, ("node02", "Slurm lost the node (node failure)"), ["node01"]),
    ],
)
def test_one_is_to_blame_and_the_others_follow(
    text: str, fault: tuple[str, str], others: list[str]
) -> None:
    found = step_faults(text)
    assert worded(fault[0], found[fault[0]]).why == fault[1]
    for node in others:
        assert found[node].problem is ProblemCode.NO_ANSWER_FOLLOWED
        assert worded(node, found[node]).why == f"it was ended, as {fault[0]} had failed"


def worded(node: str, fault: StepFault) -> Problem:
    """The problem of a node that a fault is."""
    return Problem(fault.problem, node, {**fault.values, "phase": "unpack", "log_dir": "/logs"})


@pytest.mark.parametrize(
    ("words", "code", "status"),
    [
        ("Killed", ProblemCode.NO_ANSWER_KILLED, -9),
        ("Terminated", ProblemCode.NO_ANSWER, -15),
        ("Exited with exit code 3", ProblemCode.NO_ANSWER_EXITED, 3),
        ("Segmentation fault", ProblemCode.NO_ANSWER, None),
    ],
)
def test_the_kind_and_the_exit_status_of_a_fault(
    words: str, code: ProblemCode, status: int | None
) -> None:
    fault = step_faults(f"srun: error: n1: task 1: {words}\n")["n1"]
    assert (fault.problem, fault.status) == (code, status)
    assert fault.values == {"why": f"task 1: {words}"}


def test_one_that_follows_counts_as_killed() -> None:
    assert step_faults(KILLED)["node01"].status == -9
    assert step_faults(LOST)["node02"].status is None


def test_what_to_do() -> None:
    for fault in step_faults(NO_START)["node02"], step_faults(LOST)["node03"]:
        assert fault.problem.row.is_unreachable
        assert "--exclude=n7" in worded("n7", fault).fix
    assert worded("n7", step_faults(KILLED)["node02"]).fix == "see its log in /logs"


@pytest.mark.parametrize(
    ("stderr", "code"),
    [
        ("srun: error: Unable to create step for job 7: Requested", ProblemCode.NO_ANSWER_NO_STEP),
        ("srun: error: n1: task 0: Exited with exit code 2", ProblemCode.NO_ANSWER_EXITED),
        ("srun: error: n1: task 0: Killed", ProblemCode.NO_ANSWER_KILLED),
        ("anything else", ProblemCode.NO_ANSWER),
    ],
)
def test_a_node_of_which_nothing_is_said(stderr: str, code: ProblemCode) -> None:
    fault = general_fault(1, f"first\n\n{stderr}\n")
    assert fault == StepFault(code, {"why": f"exit status 1; first; {stderr}"})


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
