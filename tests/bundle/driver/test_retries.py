"""The decision whether ranks are started again: tables of failures, and of attempts in a row."""

from __future__ import annotations

from typing import Any

import pytest

from bundle.driver.retries import History, RankProgress, find_failure, find_retry
from bundle.protocol.enumerations import FailureClass, Retry
from bundle.protocol.events import Hang, RankOutput
from bundle.protocol.messages import FailureRecord, LaunchAnswer, Vanished
from bundle.protocol.problem import Problem, ProblemCode

OOM = "stager: 1 oom-kill event on this node: the kernel killed for want of memory"
TRACE = (
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 12, in main',
    '  File "/e/lib/python3.11/site-packages/torch/x.py", line 3, in f',
    "RuntimeError: no luck",
)


def record(code: int = 1, exception: str = "", message: str = "", **more: Any) -> FailureRecord:
    fields: dict[str, Any] = {"node": "n2", "rank": 3, "time": 10.0, "told_to_end": False, **more}
    return FailureRecord(exit_code=code, exception=exception, message=message, **fields)


def failed(*records: FailureRecord, **more: Any) -> dict[str, LaunchAnswer]:
    return {
        "n1": LaunchAnswer("n1"),
        "n2": LaunchAnswer("n2", ok=False, exit_code=1, failures=records, **more),
    }


@pytest.mark.parametrize(
    ("found", "kind", "retry", "cause"),
    [
        (record(-9), "killed", "once", "rank 3 on n2 was killed (signal 9)"),
        (
            record(-9, lines=(OOM,)), "out-of-memory", "once",
            "rank 3 on n2 was killed (signal 9), as the node's memory ran out",
        ),
        (record(7), "unknown", "once", "rank 3 on n2 ended with exit status 7"),
        (
            record(1, "RuntimeError", "no luck\nmore", lines=TRACE), "python-error", "once",
            "rank 3 on n2: RuntimeError: no luck at train.py:12",
        ),
        (record(1, "ValueError", "NaN"), "python-error", "no", "rank 3 on n2: ValueError: NaN"),
        (record(2, "SystemExit", "2"), "python-error", "no", "rank 3 on n2: SystemExit: 2"),
        (record(4, "SystemExit", "4"), "python-error", "once", "rank 3 on n2: SystemExit: 4"),
        (
            record(1, "ModuleNotFoundError", "No module named 'x'"), "missing-module", "no",
            "rank 3 on n2: ModuleNotFoundError: No module named 'x'",
        ),
        (
            record(1, "OutOfMemoryError", "CUDA out of memory."), "out-of-memory", "no",
            "rank 3 on n2: OutOfMemoryError: CUDA out of memory.",
        ),
        (
            record(1, "OSError", "[Errno 28] No space left on device"), "disk-full", "no",
            "rank 3 on n2: OSError: [Errno 28] No space left on device",
        ),
        (
            record(1, "RuntimeError", "Connection closed by peer"), "rendezvous", "yes",
            "rank 3 on n2 lost its peers: RuntimeError: Connection closed by peer",
        ),
    ],
)  # fmt: skip
def test_a_rank_that_failed(found: FailureRecord, kind: str, retry: str, cause: str) -> None:
    failure = find_failure(failed(found))
    assert (failure.kind, failure.verdict.retry, failure.cause) == (kind, retry, cause)
    assert (failure.node, failure.rank) == ("n2", 3)
    assert failure.suspects == ({"n2"} if found.exit_code == -9 else frozenset())


def test_a_rank_that_lost_its_peers_or_was_told_to_end_is_not_the_first() -> None:
    lost = record(1, "RuntimeError", "Connection reset by peer", rank=0, time=1.0)
    told = record(-15, rank=1, time=2.0, told_to_end=True)
    assert find_failure(failed(lost, told, record(-9, time=3.0))).rank == 3
    assert find_failure(failed(told)).kind == FailureClass.UNKNOWN


def test_a_node_that_is_lost_is_left_out() -> None:
    values = {"phase": "launch", "log_dir": "/l"}
    problem = Problem(ProblemCode.NO_ANSWER_NODE_FAILURE, "n2", values)
    outcome = failed(record(1, "RuntimeError", "x"), problems=(problem,), lost=True)
    failure = find_failure(outcome)
    assert (failure.verdict.retry, failure.at_fault) == (Retry.YES, frozenset(("n2",)))
    assert failure.kind == FailureClass.NODE_FAILURE
    mine = find_failure(failed(record(1, "TypeError", "x"), problems=(problem,), lost=True))
    assert mine.verdict.retry is Retry.NO


def test_a_hang_that_was_ended_and_a_rank_that_vanished() -> None:
    hang = Hang(kind="stopped", rank=3, node="n2", text="rank 3 is stopped", ended=True)
    failure = find_failure({"n2": LaunchAnswer("n2", ok=False, stopped=True)}, hang)
    assert (failure.kind, failure.verdict.retry) == (FailureClass.HANG, Retry.ONCE)
    assert (failure.cause, failure.suspects) == ("rank 3 is stopped", frozenset(("n2",)))
    gone = find_failure(failed(vanished=(Vanished("n2", 3, None),)))
    assert gone.cause == "the process of rank 3 on n2 ended, with an unknown status"
    assert find_failure({}).cause == "the ranks failed"


def test_a_launcher_that_was_killed() -> None:
    answers = {"n1": LaunchAnswer("n1", ok=False, stopped=True), "n2": LaunchAnswer("n2", ok=False)}
    failure = find_failure(answers)
    assert failure.cause == "the ranks failed on n2"
    assert failure.suspects == frozenset(("n2",))


def test_every_class_has_a_verdict_with_a_reason() -> None:
    for kind in FailureClass:
        verdict = find_retry(kind)
        assert verdict.reason
        assert verdict.reason[-1] != "."


NO_LUCK = record(1, "RuntimeError", "a", lines=TRACE)
AGAIN = record(1, "RuntimeError", "b", lines=TRACE, rank=1)  # the message may have a number
LOST = record(1, "RuntimeError", "Broken pipe")


@pytest.mark.parametrize(
    ("limit", "found", "steps", "last"),
    [
        pytest.param(9, [NO_LUCK, AGAIN], [], "no", id="again at the same place"),
        pytest.param(9, [record(-9)] * 3, [100, 200, 200], "no", id="further, then no more"),
        pytest.param(9, [record(-9), record(7), record(-9)], [], "once", id="another in between"),
        pytest.param(2, [LOST] * 3, [], "yes", id="until the number is used up"),
        pytest.param(0, [LOST], [], "yes", id="none is allowed"),
    ],
)
def test_attempts_in_a_row(
    limit: int, found: list[FailureRecord], steps: list[int], last: str
) -> None:
    history = History(limit)
    for number, one in enumerate(found):
        assert number == 0 or history.may_go_on()
        progress = RankProgress()
        if steps:
            progress.seen["step"] = steps[number]
        attempt = history.judge(find_failure(failed(one)), progress, 1.0)
        assert attempt.number == number
    assert attempt.retry == last
    assert attempt.reason == "the same failure came again at the same place" or last != "no"
    assert history.may_go_on() == (last == "once")
    assert attempt.progress == (f"step {steps[-1]}" if steps else "")


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("step 12/300 epoch 0.25 loss 0.1", "step 12, epoch 0.25"),
        ("{'loss': 1.2, 'grad_norm': 3.0, 'epoch': 2.5}", "epoch 2.5"),
        ("{'loss': '1.2', 'epoch': '2.5'}", "epoch 2.5"),
        ("global_step=40 loss=2", "step 40"),
        (" iteration      120/    3000 | consumed samples:", "step 120"),
        ("Saving model checkpoint to out/checkpoint-500", "checkpoint 500"),
        ("Epoch 3: 50%", "epoch 3"),
        ("step 1234567", "step 1234567"),
        ("12 steps a second, step time 3 s", ""),
        ("stepping stone 5", ""),
        ("step " + "9" * 40, ""),
    ],
)
def test_progress_is_read_from_output(line: str, seen: str) -> None:
    progress = RankProgress()
    progress.take(RankOutput("n1", 0, b"step\n" + line.encode() + b"\n", of_ranks=True))
    assert str(progress) == seen


def test_progress_never_goes_back() -> None:
    progress = RankProgress()
    for line in (b"step 9\n", b"step 3\n", b"\xff\xfe step \x00\n", b""):
        progress.take(RankOutput("n1", 0, line, of_ranks=True))
    assert str(progress) == "step 9"
    assert progress.is_beyond({"step": 8.0})
    assert not progress.is_beyond({"epoch": 1.0})
