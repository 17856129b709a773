"""The first failure out of logs alone: what counts before what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stager.diagnosis.diagnosis import diagnose
from stager.diagnosis.failure import FirstFailure
from stager.logs.job_files import find_job_files

AT = "2026-11-22 05:{:02}:00 INFO step\n"
PEER = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:47"
FAR = "torch.distributed.DistNetworkError: The client socket has timed out after 60s while trying "
FAR += "to connect to (node01, 29500)."
WAITED = "RuntimeError: [/x/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"
LIMIT = (
    "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-22T06:00:00 DUE TO TIME LIMIT ***\n"
)
KILLED = (
    "E1122 05:30:00.1 99 torch/distributed/elastic/x.py:1] failed (exitcode: -9) local_rank: 1\n"
)

Judge = Callable[..., FirstFailure | None]


def trace(closing: str, frame: str = "/home/you/train.py", mark: str = "") -> str:
    text = (
        f'Traceback (most recent call last):\n  File "{frame}", line 1, in f\n    go()\n{closing}\n'
    )
    return "".join(f"{mark}{line}\n" for line in text.splitlines())


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    """Diagnoses a directory with these files, or with one file of this text."""

    def judge(text: str = "", **files: str) -> FirstFailure | None:
        for name, content in {**files, **({"slurm": text} if text else {})}.items():
            (tmp_path / f"{name}.out").write_text(content)
        return diagnose(find_job_files(str(tmp_path), tmp_path)).first

    return judge


def kind(first: FirstFailure | None) -> str:
    return first.kind


def test_a_cause_counts_before_what_often_follows(judged: Judge) -> None:
    """Whatever the order: a rank that cannot reach the head, and why there is no head."""
    far = trace(FAR, "/x/torch/distributed/rendezvous.py", "[rank1]: ")
    first = judged(far + trace("ModuleNotFoundError: No module named 'x'", mark="[rank0]: "))
    assert (first.kind, first.rank) == ("missing-module", 0)


def test_a_signal_counts_before_a_symptom_and_a_symptom_before_a_hang(judged: Judge) -> None:
    waited = trace(WAITED, "/x/torch/distributed/c10d.py")
    far = trace(FAR, "/x/torch/distributed/rendezvous.py")
    assert kind(judged(waited)) == "hang"
    assert kind(judged(waited + far)) == "rendezvous"
    assert kind(judged(waited + far + KILLED)) == "killed"


@pytest.mark.parametrize("before", [trace("KeyError: 'cat'"), KILLED, trace(WAITED), trace(FAR)])
def test_what_failed_before_the_time_limit_counts(judged: Judge, before: str) -> None:
    """The job hangs on until its limit; a traceback has no time of its own."""
    assert kind(judged(before + LIMIT)) != "time-limit"
    assert kind(judged(LIMIT + before)) == "time-limit"


def test_the_time_limit_in_another_file(judged: Judge) -> None:
    early, late = AT.format(10) + trace("KeyError: 'cat'"), "2026-11-22 06:00:09 INFO\n"
    assert kind(judged(rank_1=early, batch=LIMIT)) == "python-error"
    assert kind(judged(rank_1=late + trace("KeyError: 'cat'"), batch=LIMIT)) == "time-limit"


def table(*processes: tuple[int, int]) -> str:
    """Torchrun's table of ranks and exit statuses, its root cause last."""
    *others, root = [
        f"[{rank}]:\n  time      : 2026-11-22_05:30:00\n  host      : n1\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 7{rank})\n"
        for rank, code in processes
    ]
    head = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    return f"{head}Failures:\n{''.join(others)}Root Cause (first observed failure):\n{root}"


def test_torchrun_kills_the_others(judged: Judge) -> None:
    """A rank that torchrun had to kill, as it waited for the one that failed, is not the first."""
    first = judged(table((0, -9), (1, 3)))
    assert (first.kind, first.rank, first.exit_code) == ("unknown", 1, 3)
    assert kind(judged(table((0, 1), (1, -9)))) == "killed"


def test_srun_kills_the_others(judged: Judge) -> None:
    killed = "srun: error: n2: task 1: Killed\n"
    ended = "srun: launch/slurm: _step_signal: Terminating StepId=17.0\n"
    assert kind(judged(killed + ended)) == "killed"
    assert kind(judged(ended + killed)) == "unknown"


def test_a_lost_connection_is_a_consequence_by_its_long_name_too(judged: Judge) -> None:
    closing = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, internal error"
    lost = trace(closing, "/x/torch/distributed/utils.py", "[rank1]: ")
    assert kind(judged(lost)) == "unknown"
    told = "[rank1]: Last error:\n[rank1]: Duplicate GPU detected : rank 1 and rank 0 both on\n"
    assert kind(judged(lost + told)) == "environment"


def test_a_checkpoint_that_does_not_fit_is_no_lost_connection(judged: Judge) -> None:
    frame = "/x/torch/distributed/checkpoint/default_planner.py"
    assert kind(judged(trace("RuntimeError: Missing key in checkpoint", frame))) == "python-error"


def test_a_line_that_is_taken_back_or_lacks_another(judged: Judge) -> None:
    blocked = (
        "srun: Job 17 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
    )
    ended = "srun: error: n1: task 1: Exited with exit code 1\n"
    assert kind(judged(blocked + ended)) == "environment"
    assert judged(blocked + "srun: Step created for StepId=17.1\n") is None
    name = "[W socket.cpp:601] [c10d] The IPv6 network addresses of (node01, 29500) cannot be "
    name += "retrieved (gai error: -2 - Name or service not known).\n"
    assert judged(name) is None
    assert kind(judged(name + trace(FAR))) == "name-resolution"


def test_a_rank_that_says_the_same_is_named(judged: Judge) -> None:
    line = (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
    )
    line += "shared memory (shm).\n\0"  # PyTorch ends it with its zero byte
    closing = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is "
    closing += "possible that dataloader's workers are out of shared memory."
    first = judged(line + trace(closing, mark="[rank5]: "))
    assert (first.kind, first.rank) == ("out-of-memory", 5)


def test_the_rank_that_is_behind_in_its_group(judged: Judge) -> None:
    line = "[rank{}]:[E1122 05:30:00.1 X.cpp:1] [PG ID {} PG GUID {}(a) Rank {}]  failure detected "
    line += "by watchdog at work sequence id: {} PG status: last enqueued work: {}, last completed "
    line += "work: 3\n"
    ahead = line.format(0, 0, 0, 0, 9, 11) + line.format(1, 0, 0, 1, 9, 9)
    first = judged(ahead)  # both wait at the same one
    assert (first.kind, first.rank) == ("hang", None)
    first = judged(ahead + line.format(2, 0, 0, 2, 8, 8))
    assert (first.kind, first.rank) == ("hang", 2)
    other = judged(ahead + line.format(2, 5, 5, 2, 4, 4))  # another group has its own numbers
    assert other.rank is None


def test_consequences_alone_are_unknown(judged: Judge) -> None:
    first = judged(trace(PEER, "/x/torch/distributed/c10d.py", "[rank0]: "))
    assert (first.kind, first.rank) == ("unknown", None)
    assert kind(judged(trace("KeyboardInterrupt"))) == "unknown"
    assert judged("step 1\n") is None
