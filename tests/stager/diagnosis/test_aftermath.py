"""What shows that something ended badly: what its writer printed afterwards, and later attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stager.diagnosis.diagnosis import diagnose
from stager.diagnosis.failure import Diagnosis
from stager.logs.job_files import find_job_files

STEPS = "".join(f"iter {number} | loss 2.{number}\n" for number in range(40))
TRACE = 'Traceback (most recent call last):\n  File "/home/you/train.py", line 7, in f\n    go()\n'
KEY_ERROR = TRACE + "KeyError: 'cat'\n"
EXITED = "srun: error: n1: task 1: Exited with exit code 1\n"
PREEMPTED = "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-03-04T01:00:00 DUE TO {} ***\n"
REPORT = "E0304 10:22:31.101000 9 torch/distributed/x.py:1] failed (exitcode: 1) local_rank: 1\n"

Judge = Callable[..., Diagnosis]


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    """Diagnoses a directory with these files, or with one file of this text."""

    def judge(text: str = "", **files: str) -> Diagnosis:
        for name, content in {**files, **({"slurm-17.out": text} if text else {})}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return diagnose(find_job_files(str(tmp_path), tmp_path))

    return judge


@pytest.mark.parametrize(
    "line",
    [
        "WARNING:accelerate.utils.memory:CUDA out of memory. Tried to allocate 2.00 GiB. "
        "Decreasing batch size to: 32.\n",
        "WARNING step 41: loss is nan, skipping this batch\n",
        "node1:7:9 [0] NCCL INFO Call to connect returned Connection refused, retrying\n",
        "[W304 10:09:01.1 TCPStore.cpp:106] [c10d] sendBytes failed: Broken pipe\n",
        "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + KEY_ERROR,
        "--- Logging error ---\n" + KEY_ERROR,
        "Failed to send a request. It is safe to ignore this once.\n" + KEY_ERROR,
        TRACE.replace("/home/you/train.py", "/py/multiprocessing/util.py").replace(
            "in f", "in _run_finalizers"
        )
        + "OSError: [Errno 39] Directory not empty: '/tmp/pymp-x1'\n",
        "2026-03-04 10:00:00 [WARNING] data: cannot read the index, using the slow path\n"
        + TRACE
        + "FileNotFoundError: [Errno 2] No such file or directory: 'index.json'\n",
        "Exception in thread Thread-1 (watch):\n" + KEY_ERROR,
        TRACE + "ConnectionError: reset by peer\nretrying in 5 s\n" + STEPS,
        TRACE + "ModuleNotFoundError: No module named 'apex'\napex is optional\n" + STEPS,
        "OSError: [Errno 28] No space left on device\nwriting to /scratch instead\n" + STEPS,
    ],
)
def test_what_programs_print_and_survive_is_no_failure(judged: Judge, line: str) -> None:
    found = judged(STEPS + line)
    assert found.first is None
    assert found.ok is None


@pytest.mark.parametrize("name", ["train-17.{}", "train.{}17", "none_x/attempt_0/1/std{}.log"])
def test_errors_in_a_file_of_their_own_are_survived_by_a_trained_model(
    judged: Judge, name: str
) -> None:
    streams = ("o", "e") if name.startswith("train.") else ("out", "err")
    out, err = map(name.format, streams)
    assert judged(**{out: STEPS + "Training completed.\n", err: KEY_ERROR}).first is None
    first = judged(**{out: STEPS + "Job finished\n", err: KEY_ERROR}).first
    assert first.cause == "KeyError: 'cat'"


def test_a_program_that_says_that_it_gives_up_has_failed(judged: Judge) -> None:
    assert judged(STEPS + "Loss is nan, stopping training\n").first.kind == "python-error"


def test_what_was_survived_is_listed(judged: Judge) -> None:
    found = judged(KEY_ERROR + STEPS)
    assert found.first is None
    assert [line.text for line in found.evidence] == ["KeyError: 'cat'"]


@pytest.mark.parametrize(
    "below",
    [
        "",
        "wandb: Synced 5 files\nJob finished at Wed Mar  4\nreal\t0m3.1s\n",
        "terminate called without an active exception\nframe #0: f + 0x1 (0x7 in l.so)\nAborted\n",
        TRACE + "torch.distributed.DistBackendError: NCCL error: remote process exited\n",
    ],
)
def test_what_is_printed_as_a_process_ends_is_not_survival(judged: Judge, below: str) -> None:
    assert judged(STEPS + KEY_ERROR + below).first.cause == "KeyError: 'cat'"


def test_the_line_that_ended_the_job_counts_before_one_that_was_survived(judged: Judge) -> None:
    retried = TRACE + "OSError: [Errno 28] No space left on device\ntrying again\n"
    assert judged(retried + STEPS * 3 + KEY_ERROR + EXITED).first.cause == "KeyError: 'cat'"
    assert judged(retried + STEPS * 3 + PREEMPTED.format("TIME LIMIT")).first.kind == "time-limit"
    alone = judged(retried + STEPS * 3 + EXITED).first  # a bare status says less than it
    assert alone.kind == "disk-full"


def test_lines_of_other_ranks_are_no_survival(judged: Judge) -> None:
    """Where a log has marks, only the same process counts; without, a few lines do not."""
    marked = "".join(f"[rank3]: {line}\n" for line in KEY_ERROR.splitlines())
    first = judged(marked + STEPS).first
    assert (first.rank, first.cause) == (3, "KeyError: 'cat'")
    others = "".join(f"[default0]:{line}\n" for line in STEPS.splitlines())
    teed = "".join(f"[default2]:{line}\n" for line in KEY_ERROR.splitlines())
    assert judged(teed + others).first is not None
    assert judged(teed + others.replace("default0", "default2")).first is None
    assert judged(KEY_ERROR + STEPS + EXITED).first.cause == "KeyError: 'cat'"


@pytest.mark.parametrize(
    "earlier",
    [
        PREEMPTED.format("PREEMPTION"),
        EXITED + "=== attempt 2 ===\n",
        EXITED + "training failed, restarting\n",
        REPORT.replace("exitcode: 1", "exitcode: -9") + STEPS,
    ],
)
def test_the_last_attempt_of_a_log_is_judged(judged: Judge, earlier: str) -> None:
    assert judged(STEPS + earlier + STEPS + KEY_ERROR + EXITED).first.cause == "KeyError: 'cat'"
    assert judged(STEPS + KEY_ERROR + earlier + STEPS).first is None


def test_a_script_that_begins_again_is_another_attempt(judged: Judge) -> None:
    begin = "jobstart Wed Mar  4 01:00:00 UTC 2026 on n1\n"
    again = "jobstart Thu Mar  5 01:00:00 UTC 2026 on n1\n"
    killed = "srun: error: n1: task 0: Killed\n"
    assert judged(begin + STEPS + killed + again + KEY_ERROR + EXITED).first.kind == "python-error"


def table(*rows: tuple[int, int]) -> str:
    """What torchrun prints of ranks and exit statuses at its end, its root cause last."""
    closing = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    table = [
        f"  time      : 2026-03-04_10:22:31\n  host      : gpu02\n"
        f"  rank      : {rank} (local_rank: {rank % 4})\n  exitcode  : {code} (pid: 7)\n"
        for rank, code in rows
    ]
    table.insert(-1, "Root Cause (first observed failure):\n")
    frame = TRACE.replace("/home/you/train.py", "/x/torch/distributed/run.py")
    return f"{REPORT}{frame}{closing}{''.join(table)}"


def test_the_root_cause_of_torchrun_counts_before_other_ranks(judged: Judge) -> None:
    later = "".join(f"[rank3]: {line}\n" for line in KEY_ERROR.splitlines())
    earlier = later.replace("rank3", "rank1").replace("cat", "dog")
    first = judged(earlier + later + table((1, 1), (3, 1))).first
    assert (first.rank, first.node, first.cause) == (3, "gpu02", "KeyError: 'cat'")
    unmarked = judged(KEY_ERROR + STEPS + table((4, -15), (6, 1))).first
    assert (unmarked.rank, unmarked.node) == (6, "gpu02")


def test_a_rank_that_only_the_table_names_did_not_come(judged: Judge) -> None:
    waited = TRACE + "RuntimeError: Timed out waiting 6000ms for recv operation to complete\n"
    marked = "".join(f"[rank0]: {line}\n" for line in waited.splitlines())
    found = judged(marked + table((1, -15), (0, 1)))
    assert (found.first.kind, found.first.rank, found.missing) == ("hang", 1, (1,))


@pytest.mark.parametrize(("last", "cause"), [("", ""), (KEY_ERROR, "KeyError: 'cat'")])
def test_the_last_of_torchruns_folders_is_judged(judged: Judge, last: str, cause: str) -> None:
    found = judged(
        **{
            "main.txt": REPORT,
            "none_x/attempt_0/1/stderr.log": KEY_ERROR.replace("cat", "dog"),
            "none_x/attempt_1/1/stderr.log": last,
            "none_x/attempt_1/1/stdout.log": STEPS,
        }
    )
    assert (found.first.cause if found.first else "") == cause


def test_a_line_replaces_those_that_follow_from_it(judged: Judge) -> None:
    timed_out = (
        "[rank{0}]:[E304 10:32:31.4 X.cpp:607] [Rank {0}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=7, OpType=ALLGATHER, Timeout(ms)=9) ran for 9 milliseconds\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    )
    assert judged(timed_out.format(0) + timed_out.format(1)).first.kind == "hang"


def test_the_line_of_a_launcher_places_a_crash_above_it(judged: Judge) -> None:
    crash = "[c1:23] *** Process received signal ***\n[c1:23] Signal: Segmentation fault (11)\n"
    told = "mpirun noticed that process rank 1 with PID 23 on node c1 exited on signal 11 "
    first = judged(crash + told + "(Segmentation fault).\n").first
    assert (first.kind, first.rank, first.node) == ("killed", 1, "c1")
    started = "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms "
    started = TRACE.replace("home/you/train.py", "x/torch/distributed/run.py") + started
    first = judged(f"{started}while trying to connect to (n1, 29500).\n{EXITED}").first
    assert (first.kind, first.rank, first.node) == ("rendezvous", None, "n1")


def test_torchrun_that_failed_at_last_had_one_table(judged: Judge) -> None:
    earlier = KEY_ERROR.replace("cat", "dog") + REPORT
    assert judged(earlier + KEY_ERROR + table((1, -15), (0, 1))).first.cause == "KeyError: 'cat'"


def test_ranks_that_go_on_until_they_are_killed_are_no_other_attempt(judged: Judge) -> None:
    assert judged(STEPS + PREEMPTED.format("TIME LIMIT") + STEPS).first.kind == "time-limit"


@pytest.mark.parametrize(("code", "kind"), [(137, "killed"), (255, "unknown"), (139, "killed")])
def test_only_statuses_of_signals_are_signals(judged: Judge, code: int, kind: str) -> None:
    first = judged(f"srun: error: n1: task 1: Exited with exit code {code}\n").first
    assert (first.kind, first.exit_code) == (kind, code)


def test_srun_adds_the_node_to_a_line_about_memory(judged: Judge) -> None:
    line = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks\n"
    first = judged(line + "srun: error: n7: task 2: Out Of Memory\n").first
    assert (first.kind, first.node, first.rank) == ("out-of-memory", "n7", 2)
