"""Slurm is text: its command lines, and what its output and errors mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver.transports import slurm_text
from bundle.driver.transports.slurm_text import general_fault, parse_step_faults
from bundle.driver.transports.transport import Ended, Step
from bundle.protocol.enumerations import Action, Allocation, Launcher
from bundle.protocol.job import Job
from bundle.protocol.problem import NodeError, Problem, ProblemCode
from tests.support.jobs import LAUNCH, PLAIN

SAMPLES = Path(__file__).resolve().parents[3] / "samples" / "slurm-22.05"
STEP = Step(phase="preflight", nodes=("n07", "n08", "n11"), cpus=4)


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text()


def test_the_command_of_a_step() -> None:
    assert " ".join(slurm_text.make_step_argv(STEP, ["true"])) == (
        "srun --job-name=stager-preflight --nodes=3 --nodelist=n[07-08,11] --ntasks=3 "
        "--ntasks-per-node=1 --cpus-per-task=4 --distribution=block --overlap --mpi=none "
        "--export=ALL --chdir=/ --no-kill --kill-on-bad-exit=0 --wait=0 true"
    )


def test_the_command_of_ranks_that_slurm_starts() -> None:
    step = STEP._replace(phase="launch", nodes=("n07",), tasks_per_node=8, together=True)
    argv = slurm_text.make_step_argv(step._replace(patience=60), [])
    assert [word for word in argv if word not in slurm_text.make_step_argv(STEP, [])] == [
        *("--job-name=stager-launch", "--nodes=1", "--nodelist=n07", "--ntasks=8"),
        *("--ntasks-per-node=8", "--kill-on-bad-exit=1", "--wait=90"),
    ]


def test_the_command_of_a_step_in_a_container() -> None:
    step = STEP._replace(image="/images/a.sqsh", mounts=("/tmp:/tmp", "/data:/d"))
    plain = slurm_text.make_step_argv(STEP, [])
    image, mounts = "--container-image=/images/a.sqsh", "--container-mounts=/tmp:/tmp,/data:/d"
    end = "--no-container-mount-home"
    assert slurm_text.make_step_argv(step, ["true"]) == [*plain, image, mounts, end, "true"]
    assert slurm_text.make_step_argv(step._replace(mounts=()), []) == [*plain, image, end]


def test_the_command_of_a_broadcast() -> None:
    argv = slurm_text.make_broadcast_argv("/a/b.tar", "/tmp/b.tar", "42.3", 8)
    assert " ".join(argv) == "sbcast --force --compress=none -F8 --jobid=42.3 /a/b.tar /tmp/b.tar"


def test_options_for_other_commands_are_dropped_and_what_steps_need_is_kept() -> None:
    dropped = (
        "NTASKS NTASKS_PER_NODE CPUS_PER_TASK LABELIO STDOUTMODE EXPORT_ENV MPI_TYPE KILL_BAD_EXIT "
        "WAIT CPU_BIND CPU_BIND_TYPE DISTRIBUTION EXACT STEP_ID TIMELIMIT WORKING_DIR JOB_NAME"
    )
    kept = "SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_CONF SLURM_JOB_CPUS_PER_NODE NCCL_DEBUG PATH"
    names = [*kept.split(), *(f"SLURM_{name}" for name in dropped.split()), "SRUN_CONTAINER"]
    assert list(slurm_text.make_step_environment(dict.fromkeys(names, "1"))) == kept.split()


def unbound(
    wanted: tuple[int, int] | None = None, min_nodes: int | None = None, spares: int = 0
) -> Job:
    job = replace(PLAIN, id="", nodes=(), allocation=Allocation.SLURM, action=Action.RUN)
    return replace(job, wanted=wanted, min_nodes=min_nodes, spares=spares)


ALLOCATION = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[08-10],login1"}


@pytest.mark.parametrize(
    ("wanted", "min_nodes", "spares", "nodes", "spare"),
    [
        (None, None, 0, 4, 0),
        ((1, 2), None, 0, 2, 0),
        ((2, 9), None, 0, 4, 0),
        ((6, 6), 3, 0, 4, 0),
        (None, None, 1, 4, 1),  # all of the allocation, one of them spare
        ((2, 2), None, 1, 3, 1),
        ((3, 3), None, 2, 4, 1),  # it has room for one only
        ((6, 6), 3, 2, 4, 0),
        # Too few:
        ((5, 5), None, 0, 0, 0),
        ((5, 5), 5, 0, 0, 0),
        (None, 5, 0, 0, 0),
        (None, None, 4, 0, 0),
    ],
)
def test_a_job_takes_what_it_wants_of_an_allocation(
    wanted: tuple[int, int] | None, min_nodes: int | None, spares: int, nodes: int, spare: int
) -> None:
    job = unbound(wanted, min_nodes, spares)
    if not nodes:
        with pytest.raises(NodeError, match=r"too few nodes.*has 4, and 5 are required"):
            slurm_text.bind_allocation(job, ALLOCATION)
        return
    bound = slurm_text.bind_allocation(job, {**ALLOCATION, "SLURM_RESTART_COUNT": "2"})
    assert (bound.id, bound.spares, bound.attempt) == ("42", spare, 2)
    assert bound.nodes == ("n08", "n09", "n10", "login1")[:nodes]


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("SLURM_JOB_ID", None, "there is no Slurm allocation"),
        ("SLURM_JOB_NODELIST", None, "there is no Slurm allocation"),
        ("SLURM_JOB_ID", "../42", "id '../42' cannot be part of a file's name"),
        ("SLURM_JOB_ID", "4\n2", "cannot be part of a file's name"),
        ("SLURM_JOB_NODELIST", "n1,a/b", "node 'a/b' cannot be part of a file's name"),
        ("SLURM_JOB_NODELIST", "n[1-2],n2", "the nodes must be one or more, and different"),
    ],
)
def test_what_an_allocation_adds_is_checked_as_well(
    name: str, value: str | None, fault: str
) -> None:
    env = {**ALLOCATION, **({name: value} if value else {})}
    if value is None:
        del env[name]
    with pytest.raises(NodeError) as told:
        slurm_text.bind_allocation(unbound(), env)
    assert fault in str(told.value)
    assert value is None or "the Slurm allocation cannot be used" in str(told.value)


@pytest.mark.parametrize(
    ("launcher", "cpus", "nproc", "fault"),
    [
        (Launcher.TORCHRUN, 4, 8, ""),  # its ranks share the CPUs of one task
        (Launcher.SRUN, None, 4, ""),
        (Launcher.TORCHRUN, 5, None, "job 42 has 4 on a node, and cpus-per-task = 5 needs 5"),
        (Launcher.SRUN, 2, 8, "job 42 has 4 on a node, and nproc-per-node = 8 needs 8"),
    ],
)
def test_an_allocation_with_too_few_cpus_is_no_nodes_fault(
    launcher: Launcher, cpus: int | None, nproc: int | None, fault: str
) -> None:
    launch = replace(LAUNCH, launcher=launcher, nproc_per_node=nproc)
    job = replace(unbound((3, 3)), launch=launch, cpus_per_task=cpus)
    env = {**ALLOCATION, "SLURM_JOB_CPUS_PER_NODE": "4(x3),1"}  # the last node is not used
    if not fault:
        assert slurm_text.bind_allocation(job, env).id == "42"
        return
    with pytest.raises(NodeError) as told:
        slurm_text.bind_allocation(job, env)
    assert (told.value.problem.code, told.value.problem.where) == (ProblemCode.TOO_FEW_CPUS, "")
    assert told.value.problem.why == fault


def followed(first: str, *nodes: str) -> dict[str, str]:
    return dict.fromkeys(nodes, f"it was ended, as {first} had failed")


NO_START = """\
srun: error: Task launch for StepId=7.4 failed on node node02: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: node[01,03]: tasks 0,2: Killed
"""
LOST = """\
srun: error: Node failure on node[02-03]
srun: error: node01: task 0: Killed
"""
KILLED = """\
srun: error: node02: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.4
slurmstepd: error: *** STEP 7.4 ON node01 CANCELLED AT 2026-01-01T00:00:00 ***
srun: error: node01: task 0: Terminated
srun: error: node03: task 2: Killed
"""
TOLD = """\
srun: error: node01: task 0: Exited with exit code 143
srun: error: node02: task 1: Killed
"""
FAILED = """\
srun: error: node03: tasks 4-5: Exited with exit code 3
srun: error: node01: task 0: Terminated
"""
NO_NAME = "srun: error: n[1-: task 0: Killed\nsrun: error: Node failure on n[1-\n"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (sample("exit"), {"node02": "task 1: Exited with exit code 3"}),
        (
            sample("exitkill"),
            {"node02": "task 1: Exited with exit code 3", **followed("node02", "node01", "node03")},
        ),
        (sample("signal"), {"node03": "task 2: Killed"}),
        (sample("segv"), {"node02": "task 1: Segmentation fault"}),
        (
            sample("noprog"),
            {f"node0{n + 1}": f"task {n}: Exited with exit code 2" for n in range(2)},
        ),
        (sample("lost"), {"node03": "Slurm lost the node (node failure)"}),
        *((sample(name), {}) for name in ("down", "other", "badjob")),
        (KILLED, {"node02": "task 1: Killed", **followed("node02", "node01", "node03")}),
        (
            NO_START,
            {
                "node02": "Slurm cannot start anything there (Communication connection failure)",
                **followed("node02", "node01", "node03"),
            },
        ),
        (TOLD, {"node02": "task 1: Killed", **followed("node02", "node01")}),
        (FAILED, {"node03": "task 4-5: Exited with exit code 3", **followed("node03", "node01")}),
        (
            LOST,
            {
                **dict.fromkeys(("node02", "node03"), "Slurm lost the node (node failure)"),
                **followed("node02", "node01"),
            },
        ),
        (NO_NAME, {}),
    ],
)
def test_what_went_wrong_with_a_step(text: str, faults: dict[str, str]) -> None:
    """One is to blame, and the others follow."""
    found = slurm_text.parse_step_faults(text)
    whys = {node: Problem(fault.problem, node, fault.values).why for node, fault in found.items()}
    assert whys == faults
    for node in followed("", *(node for node in faults if faults[node].startswith("it was"))):
        assert (found[node].problem, found[node].code) == (ProblemCode.NO_ANSWER_FOLLOWED, -9)


def test_a_node_that_is_down_or_does_not_respond_can_start_nothing() -> None:
    listed = "n1 mixed\nn2 down*\nn3 mixed*\nn4 draining\nn2 down*\nn5 unknown\n"
    down = {"n2": "down*", "n3": "mixed*", "n5": "unknown"}
    assert slurm_text.parse_down_nodes(listed) == down


@pytest.mark.parametrize(
    ("text", "nodes", "why"),
    [
        (sample("sbcast-nodir"), 3, "No such file or directory"),
        (sample("sbcast-exists"), 3, "File exists"),
        # Slurm does not say that it is full; the nodes' agents do, see staging.py.
        (sample("sbcast-full"), 2, "Unspecified error"),
        (sample("sbcast-nosource"), 0, ""),
        (sample("sbcast-down"), 0, ""),
        ("sbcast: error: REQUEST_FILE_BCAST(n[1-): full\n", 0, ""),
    ],
)
def test_what_went_wrong_with_a_broadcast(text: str, nodes: int, why: str) -> None:
    expected = {f"node{number:02}": why for number in range(1, nodes + 1)}
    assert slurm_text.parse_broadcast_faults(text) == expected


COMPLETING = "JobId=1 JobState=COMPLETING Reason="


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        # What srun has said counts where the controller does not know it yet.
        ("JobState=RUNNING\nsrun: Job/step already completing or completed", "time-limit"),
        (f"{COMPLETING}None Restarts=3 \nSTEP 2.0 ON n1 CANCELLED DUE TO PREEMPTION", "preempted"),
        (sample("job-running"), ""),
        (sample("job-limit"), "time-limit"),
        (sample("job-cancelled"), "cancelled"),
        (f"{COMPLETING}TimeLimit Dependency=(null)", "time-limit"),
        (f"{COMPLETING}NodeDown Dependency=(null)", "node-failure"),
        (f"{COMPLETING}None Dependency=(null)", "cancelled"),
        (f"{COMPLETING}None PreemptTime=None", "cancelled"),
        (f"{COMPLETING}None PreemptTime=2026-11-22T06:14:37", "preempted"),
        ("JobId=1 JobState=NODE_FAIL Reason=NodeDown", "node-failure"),
        ("JobId=1 JobState=PREEMPTED Reason=None", "preempted"),
        ("JobId=1 JobState=DEADLINE Reason=None", "time-limit"),
        ("JobId=1 JobState=REVOKED Reason=None", "cancelled"),
        ("JobId=1 JobState=COMPLETED Reason=None", ""),
        ("", ""),
        # It goes back into the queue, as 22.05 shows it: only the number of restarts has changed.
        (f"{COMPLETING}None Requeue=1 Restarts=3 BatchFlag=1", "requeued"),
        (f"{COMPLETING}None Requeue=1 Restarts=2 BatchFlag=1", "cancelled"),
    ],
)
def test_why_a_job_ended(shown: str, why: str) -> None:
    assert (slurm_text.parse_job_ending(shown, 2, shown.partition("\n")[2]) or "") == why


def test_the_ports_that_srun_may_listen_on() -> None:
    lines = {
        "SrunPortRange           = 60001-60003": range(60001, 60004),
        "SrunPortRange           = 0-0": None,
        "SrunPortRange           = (null)": None,
        "SrunProlog              = 60001-60003": None,
    }
    for line, ports in lines.items():
        shown = f"Configuration data as of now\nSlurmctldPort = 6817\n{line}\nTmpFS = /tmp\n"
        assert slurm_text.parse_srun_ports(shown) == ports


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
    fault = parse_step_faults(f"srun: error: n1: task 1: {words}\n")["n1"]
    assert fault == Ended(code, {"why": f"task 1: {words}"}, status)
    for fault in parse_step_faults(NO_START)["node02"], parse_step_faults(LOST)["node03"]:
        assert fault.problem.row.is_unreachable


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
    assert fault == Ended(code, {"why": f"exit status 1; first; {stderr}"})
