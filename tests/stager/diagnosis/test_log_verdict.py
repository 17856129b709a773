"""The first failure out of logs alone: what counts before what, what is survived, whose it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stager.diagnosis.diagnosis import diagnose
from stager.diagnosis.failure import Diagnosis, FirstFailure
from stager.logs.job_files import find_job_files
from tests.support.failed_logs import EXITED, PEER, WAITED, mark, report, table, trace

AT = "2026-11-22 05:{:02}:00 INFO step\n"
FAR = "torch.distributed.DistNetworkError: The client socket has timed out after 60s while trying "
FAR += "to connect to (node01, 29500)."
PREEMPTED = "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-22T06:00:00 DUE TO {} ***\n"
LIMIT = PREEMPTED.format("TIME LIMIT")
STEPS = "".join(f"iter {number} | loss 2.{number}\n" for number in range(40))
KEY_ERROR = trace("KeyError: 'cat'")

Judge = Callable[..., Diagnosis]
Blame = Callable[..., FirstFailure | None]


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    """Diagnoses a directory with these files, or with one file of this text."""

    def judge(text: str = "", **files: str) -> Diagnosis:
        for name, content in {**files, **({"slurm-17.out": text} if text else {})}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return diagnose(find_job_files(str(tmp_path), tmp_path))

    return judge


@pytest.fixture
def blamed(judged: Judge) -> Blame:
    """The first failure in such a directory."""
    return lambda text="", **files: judged(text, **files).first


def kind(first: FirstFailure | None) -> str:
    return first.kind


FROM_C10D = trace(WAITED, "/x/torch/distributed/c10d.py")
NO_HEAD = trace(FAR, "/x/torch/distributed/rendezvous.py")
KILLED = "srun: error: n2: task 1: Killed\n"
ENDED = "srun: launch/slurm: _step_signal: Terminating StepId=17.0\n"


@pytest.mark.parametrize(
    ("text", "kind", "rank"),
    [
        # A cause counts before what often follows, whatever the order.
        (mark("[rank1]: ", NO_HEAD) + mark("[rank0]: ", trace("ModuleNotFoundError: No module "
         "named 'x'")), "missing-module", 0),
        # A signal counts before a symptom, and a symptom before a hang.
        (FROM_C10D, "hang", None),
        (FROM_C10D + NO_HEAD, "rendezvous", None),
        (FROM_C10D + NO_HEAD + report(-9), "killed", None),
        # Torchrun and srun kill the others, which are not the first.
        (table((0, -9), (1, 3)), "unknown", 1),
        (table((0, 1), (1, -9)), "killed", None),
        (KILLED + ENDED, "killed", None),
        (ENDED + KILLED, "unknown", None),
        # A checkpoint that does not fit is no lost connection.
        (trace("RuntimeError: Missing key in checkpoint",
               "/x/torch/distributed/checkpoint/default_planner.py"), "python-error", None),
        # Only statuses of signals are signals.
        *((f"srun: error: n1: task 1: Exited with exit code {code}\n", kind, None)
          for code, kind in ((137, "killed"), (255, "unknown"))),
        (STEPS + LIMIT + STEPS, "time-limit", None),  # ranks go on until they are killed
    ],
)  # fmt: skip
def test_what_counts(blamed: Blame, text: str, kind: str, rank: int | None) -> None:
    first = blamed(text)
    assert first.kind == kind
    assert rank is None or first.rank == rank


# --- what counts before what ---------------------------------------------------------------------


@pytest.mark.parametrize("before", [KEY_ERROR, report(-9), trace(WAITED), trace(FAR)])
def test_what_failed_before_the_time_limit_counts(blamed: Blame, before: str) -> None:
    """The job hangs on until its limit; a traceback has no time of its own."""
    assert kind(blamed(before + LIMIT)) != "time-limit"
    assert kind(blamed(LIMIT + before)) == "time-limit"


def test_the_time_limit_in_another_file(blamed: Blame) -> None:
    early, late = AT.format(10) + KEY_ERROR, "2026-11-22 06:00:09 INFO\n"
    assert kind(blamed(**{"rank_1.out": early, "batch.out": LIMIT})) == "python-error"
    assert kind(blamed(**{"rank_1.out": late + KEY_ERROR, "batch.out": LIMIT})) == "time-limit"


def test_a_line_that_is_taken_back_or_lacks_another(blamed: Blame) -> None:
    blocked = (
        "srun: Job 17 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
    )
    assert kind(blamed(blocked + EXITED)) == "environment"
    assert blamed(blocked + "srun: Step created for StepId=17.1\n") is None
    name = "[W socket.cpp:601] [c10d] The IPv6 network addresses of (node01, 29500) cannot be "
    name += "retrieved (gai error: -2 - Name or service not known).\n"
    assert blamed(name) is None
    assert kind(blamed(name + trace(FAR))) == "name-resolution"


def test_the_rank_that_is_behind_in_its_group(blamed: Blame) -> None:
    line = "[rank{}]:[E1122 05:30:00.1 X.cpp:1] [PG ID {} PG GUID {}(a) Rank {}]  failure detected "
    line += "by watchdog at work sequence id: {} PG status: last enqueued work: {}, last completed "
    line += "work: 3\n"
    ahead = line.format(0, 0, 0, 0, 9, 11) + line.format(1, 0, 0, 1, 9, 9)
    first = blamed(ahead)  # both wait at the same one
    assert (first.kind, first.rank) == ("hang", None)
    first = blamed(ahead + line.format(2, 0, 0, 2, 8, 8))
    assert (first.kind, first.rank) == ("hang", 2)
    other = blamed(ahead + line.format(2, 5, 5, 2, 4, 4))  # another group has its own numbers
    assert other.rank is None


def test_consequences_alone_are_unknown(blamed: Blame) -> None:
    first = blamed(trace(PEER, "/x/torch/distributed/c10d.py", "[rank0]: "))
    assert (first.kind, first.rank) == ("unknown", None)
    assert kind(blamed(trace("KeyboardInterrupt"))) == "unknown"
    assert blamed("step 1\n") is None


# --- what shows that something ended badly: what was printed afterwards, and later attempts -------


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
        trace("OSError: [Errno 39] Directory not empty: '/tmp/x'", "/py/multiprocessing/util.py")
        .replace("in main", "in _run_finalizers"),
        "2026-03-04 10:00:00 [WARNING] data: cannot read the index, using the slow path\n"
        + trace("FileNotFoundError: [Errno 2] No such file or directory: 'index.json'"),
        "Exception in thread Thread-1 (watch):\n" + KEY_ERROR,
        trace("ConnectionError: reset by peer") + "retrying in 5 s\n" + STEPS,
        trace("ModuleNotFoundError: No module named 'apex'") + "apex is optional\n" + STEPS,
        "OSError: [Errno 28] No space left on device\nwriting to /scratch instead\n" + STEPS,
    ],
)  # fmt: skip
def test_what_programs_print_and_survive_is_no_failure(judged: Judge, line: str) -> None:
    found = judged(STEPS + line)
    assert (found.first, found.ok) == (None, None)
    survived = judged(KEY_ERROR + STEPS)
    assert survived.first is None
    assert [line.text for line in survived.evidence] == ["KeyError: 'cat'"], "it is listed"


@pytest.mark.parametrize("name", ["train-17.{}", "train.{}17", "none_x/attempt_0/1/std{}.log"])
def test_errors_in_a_file_of_their_own_are_survived_by_a_trained_model(
    judged: Judge, name: str
) -> None:
    streams = ("o", "e") if name.startswith("train.") else ("out", "err")
    out, err = map(name.format, streams)
    assert judged(**{out: STEPS + "Training completed.\n", err: KEY_ERROR}).first is None
    first = judged(**{out: STEPS + "Job finished\n", err: KEY_ERROR}).first
    assert first.cause == "KeyError: 'cat'"


@pytest.mark.parametrize(
    "below",
    [
        "",
        "wandb: Synced 5 files\nJob finished at Wed Mar  4\nreal\t0m3.1s\n",
        "terminate called without an active exception\nframe #0: f + 0x1 (0x7 in l.so)\nAborted\n",
        trace("torch.distributed.DistBackendError: NCCL error: remote process exited"),
    ],
)
def test_what_is_printed_as_a_process_ends_is_not_survival(judged: Judge, below: str) -> None:
    assert judged(STEPS + KEY_ERROR + below).first.cause == "KeyError: 'cat'"


def test_the_line_that_ended_the_job_counts_before_one_that_was_survived(judged: Judge) -> None:
    retried = trace("OSError: [Errno 28] No space left on device") + "trying again\n" + STEPS * 3
    assert judged(retried + KEY_ERROR + EXITED).first.cause == "KeyError: 'cat'"
    assert judged(retried + LIMIT).first.kind == "time-limit"
    assert judged(retried + EXITED).first.kind == "disk-full"  # a bare status says less than it


def test_lines_of_other_ranks_are_no_survival(judged: Judge) -> None:
    """Where a log has marks, only the same process counts; without, a few lines do not."""
    first = judged(mark("[rank3]: ", KEY_ERROR) + STEPS).first
    assert (first.rank, first.cause) == (3, "KeyError: 'cat'")
    teed = mark("[default2]:", KEY_ERROR)
    assert judged(teed + mark("[default0]:", STEPS)).first is not None
    assert judged(teed + mark("[default2]:", STEPS)).first is None
    assert judged(KEY_ERROR + STEPS + EXITED).first.cause == "KeyError: 'cat'"


BEGUN = "jobstart Wed Mar  4 01:00:00 UTC 2026 on n1\n"


@pytest.mark.parametrize(
    "earlier",
    [
        PREEMPTED.format("PREEMPTION"),
        EXITED + "=== attempt 2 ===\n",
        EXITED + "training failed, restarting\n",
        report(-9) + STEPS,
        KILLED + BEGUN.replace("Wed Mar  4", "Thu Mar  5"),
    ],
)
def test_the_last_attempt_of_a_log_is_judged(judged: Judge, earlier: str) -> None:
    first = judged(BEGUN + STEPS + earlier + STEPS + KEY_ERROR + EXITED).first
    assert first.cause == "KeyError: 'cat'"
    assert judged(BEGUN + STEPS + KEY_ERROR + earlier + STEPS).first is None


def ended(*rows: tuple[int, int]) -> str:
    """What a torchrun prints that ends with a traceback of its own."""
    frame = trace("", "/x/torch/distributed/run.py").rstrip("\n") + "\n"
    return report() + frame + table(*rows, host="gpu02")


def test_the_root_cause_of_torchrun_counts_before_other_ranks(judged: Judge) -> None:
    later = mark("[rank3]: ", KEY_ERROR)
    earlier = later.replace("rank3", "rank1").replace("cat", "dog")
    first = judged(earlier + later + ended((1, 1), (3, 1))).first
    assert (first.rank, first.node, first.cause) == (3, "gpu02", "KeyError: 'cat'")
    unmarked = judged(KEY_ERROR + STEPS + ended((4, -15), (6, 1))).first
    assert (unmarked.rank, unmarked.node) == (6, "gpu02")
    # One that failed at last had one table.
    before = KEY_ERROR.replace("cat", "dog") + report()
    assert judged(before + KEY_ERROR + ended((1, -15), (0, 1))).first.cause == "KeyError: 'cat'"
    # A rank that only the table names did not come.
    waited = trace("RuntimeError: Timed out waiting 6000ms for recv operation to complete")
    found = judged(mark("[rank0]: ", waited) + ended((1, -15), (0, 1)))
    assert (found.first.kind, found.first.rank, found.missing) == ("hang", 1, (1,))


@pytest.mark.parametrize(("last", "cause"), [("", ""), (KEY_ERROR, "KeyError: 'cat'")])
def test_the_last_of_torchruns_folders_is_judged(judged: Judge, last: str, cause: str) -> None:
    files = {
        "main.txt": report(),
        "none_x/attempt_0/1/stderr.log": KEY_ERROR.replace("cat", "dog"),
        "none_x/attempt_1/1/stderr.log": last,
        "none_x/attempt_1/1/stdout.log": STEPS,
    }
    first = judged(**files).first
    assert (first.cause if first else "") == cause


# --- logs that are whole torchruns', named by Slurm's tasks --------------------------------------


@pytest.fixture
def ran(judged: Judge) -> Judge:
    """Diagnoses one log a node."""

    def judge(*texts: str) -> Diagnosis:
        logs = {
            f"train.9.node0{task + 1}.{task}.out": f"step 1\n{t}" for task, t in enumerate(texts)
        }
        return judged(**logs)

    return judge


TOLD = "W1122 06:40:55.3 9 torch/distributed/elastic/agent/server/api.py:753] Received 15 death\n"
RAISED = trace("ValueError: the labels are wrong")


def of_node(rank: int, each: int) -> str:
    return report() + table((rank, 1), host=f"node0{rank // each + 1}", each=each)


@pytest.mark.parametrize(
    ("texts", "node", "rank"),
    [
        ((TOLD, RAISED + of_node(3, 2), TOLD), "node02", 3),
        ((TOLD, TOLD, RAISED + of_node(2, 1)), "node03", 2),  # a torchrun of one rank is its task
        ((TOLD, TOLD, RAISED + of_node(8, 4)), "node03", 8),  # only a node's first rank has failed
        (("step 2\n", RAISED), "node02", 1),  # tasks are ranks
    ],
)
def test_the_table_names_the_rank_of_a_traceback(
    ran: Judge, texts: tuple[str, ...], node: str, rank: int
) -> None:
    found = ran(*texts)
    assert (found.first.node, found.first.rank, found.first.kind) == (node, rank, "python-error")
    assert found.consequences == ()


def test_a_rank_that_nobody_has_heard_of_is_missed(ran: Judge) -> None:
    """Its torchrun has two ranks, as the others' tables tell, and one of them has waited."""
    waited = {rank: trace(WAITED, before=f"[rank{rank}]: ") for rank in (0, 1, 2, 4, 5)}
    nodes = [waited[1] + waited[0], waited[2], waited[4] + waited[5]]
    found = ran(*(text + of_node(rank, 2) for text, rank in zip(nodes, (0, 2, 5), strict=True)))
    assert (found.first.node, found.first.rank, found.first.kind) == ("node02", 3, "hang")
    assert (found.missing, found.consequences) == ((3,), (0, 1, 2, 4, 5))
