"""Which of many candidates failed first, and what the driver's result says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bundle.protocol.codec import encode
from bundle.protocol.enumerations import FailureClass
from bundle.protocol.events import JobEnds
from bundle.protocol.problem import Problem, ProblemCode
from stager.diagnosis.diagnosis import make_comparable
from stager.diagnosis.failure import FirstFailure
from stager.diagnosis.process_exits import LINES
from stager.diagnosis.verdict import (
    Candidate,
    Role,
    find_first_failure_of_result,
    judge_result,
    pick_first_failure,
    select_usable_result,
)
from tests.support.events import job_ends
from tests.support.failed_logs import WAITED

# --- The one order of candidates, whatever their evidence is -------------------------------------


def candidate(name: str, role: Role = Role.CAUSE, **changed: Any) -> Candidate:
    failure = FirstFailure(node=name, kind=FailureClass.UNKNOWN, cause="", hint="")
    return Candidate(role=role, failure=lambda: failure, **changed)


def name_of_blamed(*candidates: Candidate) -> str:
    return pick_first_failure(candidates).failure().node


@pytest.mark.parametrize(("stronger", "weaker"), list(itertools.pairwise(Role)))
def test_a_stronger_role_counts_though_it_came_later(stronger: Role, weaker: Role) -> None:
    late = candidate("late", stronger, time=9.0, survived=True)
    assert name_of_blamed(candidate("early", weaker, time=1.0), late) == "late"


def test_of_one_role_what_nobody_survived_counts_then_the_time_then_who_was_given_first() -> None:
    survived, timeless = candidate("survived", time=1.0, survived=True), candidate("timeless")
    late, early = candidate("late", time=3.0), candidate("early", time=2.0)
    for order in itertools.permutations([survived, timeless, late, early]):
        assert name_of_blamed(*order) == "early"
    assert name_of_blamed(timeless, late) == "late"
    assert name_of_blamed(survived, timeless) == "timeless"
    assert name_of_blamed(candidate("one", time=2.0), early) == "one"
    assert pick_first_failure([]) is None


def test_a_silent_cause_is_told_by_the_next_one_of_the_same_failure() -> None:
    silent = candidate("silent", time=1.0, silent=True, same=7)
    silent_too = candidate("silent too", time=2.0, silent=True, same=7)
    another = candidate("another", time=3.0, same=8)
    consequence = candidate("consequence", Role.LOST_PEER, time=1.0, same=7)
    assert name_of_blamed(silent, silent_too, another, consequence) == "silent"
    speaker, later = candidate("speaker", time=4.0, same=7), candidate("later", time=5.0, same=7)
    assert name_of_blamed(silent, silent_too, another, later, speaker) == "speaker"
    assert name_of_blamed(speaker, candidate("first", time=0.5, same=7)) == "first"


# --- The first failure, out of what nodes and ranks left behind ----------------------------------


GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45724. GLHF!"


def rank(number: int, *, time: float = 10.0, **changed: Any) -> dict[str, Any]:
    """The record of a rank that failed, two ranks a node."""
    fields = {
        "node": f"n{number // 2 + 1}", "rank": number, "local_rank": number % 2, "exit_code": 1,
        "exception": "ValueError", "message": "wrong", "lines": ["ValueError: wrong"], "time": time,
    }  # fmt: skip
    return {**fields, **changed}


def killed(number: int, code: int, **changed: Any) -> dict[str, Any]:
    fields = {"exception": "", "message": "", "lines": [], **changed}
    return rank(number, exit_code=code, **fields)


def lost(number: int, **changed: Any) -> dict[str, Any]:
    return rank(number, exception="RuntimeError", message=GLOO, **changed)


def result(*failures: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A driver's result event of two nodes that both failed."""
    codes = {"n1": 1, "n2": 1}
    return {"problems": {"n1": [], "n2": []}, "exit_codes": codes, "failures": list(failures),
            "tails": {"n1": ["=" * 60], "n2": ["=" * 60]}, **changed}  # fmt: skip


def silent(kind: str, node: str, **values: str) -> dict[str, Any]:
    """The problem of a node that gave no answer to a launch."""
    code = ProblemCode.from_json(f"no-answer{kind}")
    return Problem(code, node, {**values, "phase": "launch", "log_dir": "/logs"}).to_json()


def parsed(raw: dict[str, Any]) -> JobEnds:
    return select_usable_result(job_ends(**raw))


def found(raw: dict[str, Any]) -> FirstFailure:
    failure = find_first_failure_of_result(parsed(raw))
    assert failure.hint
    return failure


def placed(raw: dict[str, Any]) -> tuple[str, int | None, int | None, str]:
    failure = found(raw)
    return failure.node, failure.rank, failure.exit_code, failure.kind


def test_the_earliest_of_several_causes() -> None:
    failure = found(result(rank(0, time=12.5), rank(3, time=12.1), rank(2, time=99.0)))
    assert (failure.node, failure.rank, failure.exit_code) == ("n2", 3, 1)
    assert (failure.kind, failure.cause) == ("python-error", "ValueError: wrong")
    assert failure.lines == ("ValueError: wrong",)
    for nothing in ({"ok": True, "problems": {}}, result(exit_codes={"n1": 0, "n2": 0}, tails={})):
        assert find_first_failure_of_result(parsed(nothing)) is None


@pytest.mark.parametrize(
    "consequences",
    [
        [killed(0, -15, time=1.0), killed(2, 143, time=1.0)],
        [lost(0, time=1.0), lost(1, time=1.1), lost(2, time=1.2)],
        [lost(2, time=1.0), killed(0, -15, time=0.5)],
    ],
)
@pytest.mark.parametrize("cause", [rank(3, time=50.0), killed(3, -9, time=50.0)])
def test_a_consequence_is_not_blamed_though_it_came_first(
    consequences: list[dict[str, Any]], cause: dict[str, Any]
) -> None:
    failure = found(result(*consequences, cause))
    assert (failure.node, failure.rank) == ("n2", 3)


def test_a_node_that_vanished_comes_before_ranks_that_missed_it() -> None:
    gone = silent("", "n2", why="exit status -9")
    raw = result(lost(0), problems={"n1": [], "n2": [gone]}, exit_codes={"n1": 1})
    assert placed(raw) == ("n2", None, None, "node-failure")
    assert found(raw).cause == "n2: launch gave no answer: exit status -9"
    assert found(raw).hint == "see its log in /logs"


def test_a_node_that_srun_took_along_is_not_blamed() -> None:
    along = silent("-followed", "n1", first="n2")
    gone = silent("-killed", "n2", why="task 1: Killed")
    assert placed({"problems": {"n1": [along], "n2": [gone]}}) == ("n2", None, None, "killed")
    assert found({"problems": {"n1": [along]}}).node == "n1"  # where there is no other
    # An agent that ends without a word is no lost node.
    gone = silent("-exited", "n2", why="task 2-3: Exited with exit code 1")
    assert placed({"problems": {"n2": [gone]}}) == ("n2", None, None, "environment")


def test_a_rank_that_hangs_is_named() -> None:
    late = Problem(ProblemCode.RANKS_DID_NOT_END, "n2", {"seconds": "60"}).to_json()
    raw = result(killed(3, 143, lines=["last words"]), problems={"n2": [late]})
    assert placed(raw) == ("n2", 3, 143, "hang")
    assert found(raw).lines == ("last words",)


def test_a_launcher_that_never_had_ranks() -> None:
    tail = [
        "Traceback (most recent call last):",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 61000, useIpv6: false, code: -98, name: EADDRINUSE, message: "
        "address already in use",
        "",
    ]
    raw = result(exit_codes={"n1": 1, "n2": 143}, tails={"n1": tail, "n2": ["SignalException"]})
    assert placed(raw) == ("n1", None, 1, "port")
    assert (found(raw).cause, found(raw).lines) == (tail[1], tuple(tail))


def test_the_launcher_that_was_told_to_end_follows_the_other() -> None:
    raw = result(exit_codes={"n1": 143, "n2": 1}, tails={"n1": ["told"], "n2": ["own fault"]})
    assert (found(raw).node, found(raw).cause) == ("n2", "own fault")
    # Even where it had ranks, which were ended with it.
    assert found({**raw, "failures": [killed(0, -15), lost(1)]}).node == "n2"


def test_only_consequences_are_known() -> None:
    """A rank that left with status 0 makes the others lose it; there is nobody else to show."""
    assert found(result(killed(0, -15, time=1.0), lost(3, time=2.0))).rank == 3
    failure = found(result(killed(2, -15), killed(1, -15, time=3.0)))
    assert (failure.rank, failure.kind) == (1, "killed")


@pytest.mark.parametrize(
    ("failed", "kind", "cause"),
    [
        (killed(1, -9), "killed", "it was killed by SIGKILL"),
        (killed(1, 137), "killed", "it was killed by SIGKILL"),
        (killed(1, -63), "killed", "it was killed by signal 63"),
        (killed(1, 7), "unknown", "it ended with exit status 7"),
        (
            killed(1, -9, lines=["ModuleNotFoundError: No module named 'optional'; going on"]),
            "killed",
            "it was killed by SIGKILL",
        ),
        (
            rank(0, exception="SystemExit", message="5", lines=["SystemExit: 5"]),
            "python-error",
            "the program ended itself: sys.exit(5)",
        ),
    ],
)
def test_a_rank_without_a_word_is_classed_by_its_status(
    failed: dict[str, Any], kind: str, cause: str
) -> None:
    failure = found(result(failed))
    assert (failure.kind, failure.cause) == (kind, cause)
    assert failure.exit_code == failed["exit_code"]
    alone = found(result(exit_codes={"n1": 1, "n2": 0}, tails={}))
    assert (alone.node, alone.cause) == ("n1", "the launcher ended with exit status 1")
    assert (alone.kind, alone.lines) == ("unknown", ())
    shot = found(result(exit_codes={"n1": 137, "n2": 0}, tails={"n1": ["step 7"]}))
    assert (shot.kind, shot.cause) == ("killed", "the launcher: it was killed by SIGKILL")


def test_problems_of_nodes_are_classed() -> None:
    code = ProblemCode.BUNDLE_DAMAGED
    problem = Problem(code, "n1", dict.fromkeys(code.names, "something"))
    raw = {"problems": {"n1": [problem.to_json()]}}
    assert placed(raw) == ("n1", None, None, "damaged-copy")
    failure = found(raw)
    assert (failure.hint, failure.problem) == (problem.fix, problem)
    assert failure.cause == f"n1: {problem.what}: {problem.why}"
    # One of another version is told in its own words.
    own = {"code": "no-coffee", "what": "the pot is empty", "where": "n1", "why": "", "fix": "brew"}
    other = found({"problems": {"n1": [own]}})
    assert (other.kind, other.cause, other.hint) == ("unknown", "n1: the pot is empty", "brew")


def test_only_the_last_lines_are_kept_and_the_json_has_the_documented_keys() -> None:
    failure = found(result(rank(0, lines=[str(number) for number in range(40)])))
    assert failure.lines == tuple(str(number) for number in range(40 - LINES, 40))
    assert encode(failure) == {
        "node": "n1", "rank": 0, "exit_code": 1, "class": "python-error",
        "cause": "ValueError: wrong", "hint": failure.hint, "lines": list(failure.lines),
        "meaning": "", "time": 10.0, "retry": None, "retry_reason": "", "hang": None,
        "variables": [], "step": {}, "seeds": {},
    }  # fmt: skip


def bare(number: int, *lines: str, code: int = 1, at: float = 1.0) -> dict[str, Any]:
    """A rank that ended itself without an exception, as ranks do that agree to give up."""
    said = {"exception": "", "message": "", "lines": list(lines)}
    return rank(number, time=at, exit_code=code, **said)


SAID = ["[RANK 0] WORLD_SIZE=2", "error: --data dat: there is no such folder", "hint: correct it"]


def test_of_ranks_that_give_up_together_the_one_that_says_why_counts() -> None:
    failure = found(result(bare(1, "[RANK 1] WORLD_SIZE=2"), bare(0, *SAID, at=1.2)))
    assert (failure.rank, failure.exit_code) == (0, 1)
    assert failure.cause == "error: --data dat: there is no such folder"
    assert (failure.kind, failure.hint) == ("missing-asset", "correct it")
    # One that ended otherwise does not speak for it, nor does Slurm.
    assert found(result(bare(1), bare(0, *SAID, code=2, at=1.2))).rank == 1
    assert found(result(bare(0, "srun: error: n1: task 0: Exited"))).kind == "unknown"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train.py: error: unrecognized arguments: --epcohs 3", "correct what follows the two"),
        ("prog sub: error: argument --n: invalid int value: 'x'", "correct what follows the two"),
        ("Error: no such thing", "the lines before that in its log say why"),
    ],
)
def test_a_program_that_ends_itself_is_told_in_its_own_words(line: str, hint: str) -> None:
    said = {"exception": "SystemExit", "message": "2", "lines": ["usage: train.py [-h]", line]}
    failure = found(result(rank(0, exit_code=2, **said)))
    assert (failure.cause, failure.kind) == (line, "python-error")
    assert failure.hint.startswith(hint)


def test_a_caught_exception_is_told_in_the_words_that_the_program_has_for_it() -> None:
    printed = ["usage: train.py", "train.py: error: argument --n: invalid int value: 'x'"]
    message = "argument --n: invalid int value: 'x'"
    raw = {**rank(0, exception="ArgumentError", message=message, lines=printed), "exit_code": 2}
    assert found(result(raw)).cause == printed[1]
    # But not where they are about something else.
    raw["message"] = "Could not override 'epohcs'."
    assert found(result(raw)).cause == "ArgumentError: Could not override 'epohcs'."


# --- what the nodes saw of the ranks' processes --------------------------------------------------


def test_a_rank_that_nobody_told_to_end_is_no_consequence() -> None:
    own = killed(1, -15, time=20.0, told_to_end=False)
    followed = killed(0, -15, time=20.2, told_to_end=True)
    assert found(result(followed, own, lost(3, time=19.9))).rank == 1
    crashed = killed(2, -11, time=23.0, told_to_end=False)
    assert found(result(followed, own, crashed)).rank == 1
    assert found(result(followed, crashed)).rank == 2
    # Of two at the same time it is the one that torchrun blames.
    both = killed(0, -9, root_cause=False), killed(1, -9, root_cause=True)
    assert found(result(*both)).rank == 1


LEFT = {"node": "n1", "rank": 1, "time": 10.0}


def test_a_rank_that_left_early_is_named_before_those_that_missed_it() -> None:
    missed = lost(2, time=9.99, ended=10.4)
    raw = result(missed, lost(0), left=[LEFT])
    assert placed(raw) == ("n1", 1, 0, "hang")
    assert found(raw).time == 10.0
    # Not where somebody failed by himself, nor where all had gone before it.
    assert found(result(rank(2, time=30.0), left=[LEFT])).rank == 2
    codes = {"n2": 1}
    earlier = lost(2, time=5.0, ended=5.5)
    assert found(result(earlier, left=[LEFT], exit_codes=codes)).rank == 2
    assert found(result(killed(2, -15), left=[LEFT], exit_codes=codes)).rank == 2
    # It may go on as a process, or its end may be all that is known.
    raw = result(missed, left=[{**LEFT, "goes_on": True}])
    assert placed(raw) == ("n1", 1, None, "hang")
    assert "left its process group" in found(raw).cause
    raw = result(lost(3), vanished=[LEFT], exit_codes={})
    assert placed(raw) == ("n1", 1, None, "unknown")


@pytest.mark.parametrize(
    ("finished", "waits_for", "words"),
    [
        (9.0, ["thread saver"], "its process goes on: it waits for thread saver"),
        (9.0, [], "its exit handlers do not come to an end"),
        (None, [], "it goes on though other ranks of its node have ended"),
    ],
)
def test_a_rank_that_goes_on_for_too_long(
    finished: float | None, waits_for: list[str], words: str
) -> None:
    goes_on = {"node": "n2", "rank": 3, "finished": finished, "waits_for": waits_for}
    raw = {"ok": False, "interrupted": True, "problems": {}, "failures": [], "stopped": ["n2"]}
    failure = found({**raw, "exit_codes": {}, "lingering": [goes_on]})
    assert (failure.node, failure.rank, failure.kind) == ("n2", 3, "hang")
    assert words in failure.cause
    late = Problem(ProblemCode.RANKS_DID_NOT_END, "n2", {"seconds": "60"}).to_json()
    assert found(result(problems={"n2": [late]}, lingering=[goes_on])).rank == 3
    assert found(result(rank(0), lingering=[goes_on])).rank == 0


def test_ranks_that_have_all_left_their_group_keep_nobody_waiting() -> None:
    out = [
        {"node": "n1", "rank": rank, "finished": None, "waits_for": [], "left": 5.0 - rank}
        for rank in (0, 1)
    ]
    raw = {**result(exit_codes={}), "interrupted": True, "world_size": 3, "lingering": out}
    assert found(raw).rank == 1  # the one that left first
    assert find_first_failure_of_result(parsed({**raw, "world_size": 2})) is None


def test_what_followed_from_ctrl_c_is_no_failure() -> None:
    codes = {"n1": 143, "n2": 1}
    told = rank(0, exception="KeyboardInterrupt", told_to_end=True)
    raw = result(told, exit_codes=codes, stopped=["n1"], tails={"n2": ["own fault"]})
    assert found({**raw, "interrupted": True}).cause == "own fault"
    everywhere = {**raw, "interrupted": True, "stopped": ["n1", "n2"]}
    assert find_first_failure_of_result(parsed(everywhere)) is None
    assert found({**raw, "interrupted": True, "ended_by": "time-limit"}) == found(raw)


STOOD = {
    "kind": "behind", "rank": 3, "node": "n2", "ranks": [3], "waiting": 3, "number": 7,
    "operation": "all_reduce", "place": "loader.py:88 read_shard", "text": "rank 3 is not there",
}  # fmt: skip
IN_VAIN = rank(0, exception="RuntimeError", message=WAITED.partition(": ")[2])
WORKING = {**STOOD, "certain": False}
ENDED_FOR_IT = Problem(ProblemCode.RANKS_HANG, "n1", {"seconds": "900", "why": "x"}).to_json()


@pytest.mark.parametrize(
    ("raw", "of_hang"),
    [
        (result(IN_VAIN, hang=STOOD), True),
        (result(IN_VAIN, hang=WORKING), True),  # the others gave up all the same
        (result(killed(0, -15, told_to_end=True), problems={"n1": [ENDED_FOR_IT]},
                hang={**WORKING, "ended": True}), True),
        (result(problems={}, exit_codes={}, hang=STOOD, interrupted=True), True),
        (result(problems={}, hang=STOOD, ended_by="time-limit"), True),
        (result(problems={}, hang=STOOD, ended_by="cancelled"), True),
        (result(problems={}, hang=WORKING, ended_by="time-limit"), False),  # it may have worked
        (result(problems={}, hang={**STOOD, "kind": "unknown"}, ended_by="time-limit"), False),
        (result(problems={}, hang=STOOD, ended_by="preempted"), False),
        (result(rank(2), hang=STOOD), False),  # what it hung in has failed at last
        (result(problems={"n1": [silent("-deserted", "n1")]}, hang=STOOD), False),
    ],
)  # fmt: skip
def test_a_hang_that_lasted_to_the_end(raw: dict[str, Any], of_hang: bool) -> None:
    first = judge_result(parsed(raw), "77")
    assert first is not None
    assert (first.hang is not None) == of_hang
    if of_hang:
        assert (first.node, first.rank, first.exit_code, first.kind) == ("n2", 3, None, "hang")
        assert (first.hang.number, first.hang.place) == (7, "loader.py:88 read_shard")
        assert first.cause.startswith("rank 3 is not there")
        assert "what that rank does at this line" in first.hint
        assert "time limit was reached" in first.cause or raw.get("ended_by") != "time-limit"


ROOT = "/scratch/n1/stager-1000"


@pytest.mark.parametrize(
    ("message", "other", "same"),
    [
        (f"no x in y ({ROOT}/envs/ab/y.py)", "no x in y (/tmp/stager-1000/envs/ab/y.py)", True),
        (f"'{ROOT}/jobs/7.0.0/z' is gone", "'/scratch/n2/stager-1000/jobs/7.1.0/z' is gone", True),
        ("rank 0: no answer from 10.0.0.1:4000", "rank 12: no answer from 10.0.0.2:51000", True),
        ("bad block on n1, pid 4242", "bad block on n2, pid 7", True),
        ("no peer [fe80::1]:29500", "no peer [fe80::2]:29501", True),
        ("<Foo object at 0x7f01aa00> is no Bar", "<Foo object at 0x7f99bb00> is no Bar", True),
        ("index 5 is out of bounds", "index 7 is out of bounds", False),
        ("no file /data/part-1.csv", "no file /data/part-2.csv", False),
        ("version 1.2.3 is too old", "version 1.2.4 is too old", False),
        ("tensor[3] has no gradient", "tensor[4] has no gradient", False),
    ],
)
def test_the_same_failure_in_two_places(message: str, other: str, same: bool) -> None:
    raw = {"failures": [rank(0, message=message), rank(2, message=other)]}
    one, two = map(make_comparable, parsed(raw).failures)
    assert (one == two) is same
