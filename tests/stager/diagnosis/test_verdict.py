"""Which of many candidates failed first, and what the driver's result says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bundle.protocol.codec import encode
from bundle.protocol.enumerations import FailureClass
from bundle.protocol.events import JobEnds
from bundle.protocol.messages import FailureRecord
from bundle.protocol.problem import Problem, ProblemCode
from stager.diagnosis.diagnosis import make_comparable
from stager.diagnosis.failure import FirstFailure
from stager.diagnosis.process_exits import LINES
from stager.diagnosis.verdict import (
    Candidate,
    Role,
    find_first_failure_of_result,
    pick_first_failure,
    select_usable_result,
)
from tests.support.events import job_ends

# --- The one order of candidates, whatever their evidence is -------------------------------------


def candidate(name: str, role: Role = Role.CAUSE, **changed: Any) -> Candidate:
    failure = FirstFailure(node=name, kind=FailureClass.UNKNOWN, cause="", hint="")
    return Candidate(role=role, failure=lambda: failure, **changed)


def name_of_blamed(*candidates: Candidate) -> str:
    first = pick_first_failure(candidates)
    return first.failure().node


def test_without_candidates_nothing_failed() -> None:
    assert pick_first_failure([]) is None


@pytest.mark.parametrize(("stronger", "weaker"), list(itertools.pairwise(Role)))
def test_a_stronger_role_counts_though_it_came_later(stronger: Role, weaker: Role) -> None:
    late = candidate("late", stronger, time=9.0, survived=True)
    assert name_of_blamed(candidate("early", weaker, time=1.0), late) == "late"


def test_of_one_role_what_nobody_survived_counts_and_then_the_time() -> None:
    survived = candidate("survived", time=1.0, survived=True)
    timeless = candidate("timeless")
    late, early = candidate("late", time=3.0), candidate("early", time=2.0)
    for order in itertools.permutations([survived, timeless, late, early]):
        assert name_of_blamed(*order) == "early"
    assert name_of_blamed(timeless, late) == "late"
    assert name_of_blamed(survived, timeless) == "timeless"


def test_of_two_at_the_same_time_the_one_that_was_given_first() -> None:
    one, other = candidate("one", time=1.0), candidate("other", time=1.0)
    assert name_of_blamed(one, other) == "one"
    assert name_of_blamed(other, one) == "other"


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


def record(raw: dict[str, Any]) -> FailureRecord:
    (failure,) = parsed({"failures": [raw]}).failures or ()
    return failure


def found(raw: dict[str, Any] | JobEnds) -> FirstFailure:
    failure = find_first_failure_of_result(raw if isinstance(raw, JobEnds) else parsed(raw))
    assert isinstance(failure.kind, FailureClass)
    assert failure.hint
    return failure


def test_nothing_failed() -> None:
    assert find_first_failure_of_result(parsed({"ok": True, "problems": {}})) is None
    assert (
        find_first_failure_of_result(parsed(result(exit_codes={"n1": 0, "n2": 0}, tails={})))
        is None
    )


def test_the_earliest_of_several_causes() -> None:
    failure = found(result(rank(0, time=12.5), rank(3, time=12.1), rank(2, time=99.0)))
    assert (failure.node, failure.rank, failure.exit_code) == ("n2", 3, 1)
    assert (failure.kind, failure.cause) == ("python-error", "ValueError: wrong")
    assert failure.lines == ("ValueError: wrong",)


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
    failure = found(result(lost(0), problems={"n1": [], "n2": [gone]}, exit_codes={"n1": 1}))
    assert (failure.node, failure.rank, failure.exit_code) == ("n2", None, None)
    assert failure.kind == "node-failure"
    assert failure.cause == "n2: launch gave no answer: exit status -9"
    assert failure.hint == "see its log in /logs"


def test_a_node_that_srun_took_along_is_not_blamed() -> None:
    along = silent("-followed", "n1", first="n2")
    gone = silent("-killed", "n2", why="task 1: Killed")
    failure = found({"problems": {"n1": [along], "n2": [gone]}})
    assert (failure.node, failure.kind) == ("n2", "killed")
    assert found({"problems": {"n1": [along]}}).node == "n1"  # where there is no other


def test_an_agent_that_ends_without_a_word_is_no_lost_node() -> None:
    gone = silent("-exited", "n2", why="task 2-3: Exited with exit code 1")
    failure = found({"problems": {"n2": [gone]}})
    assert (failure.node, failure.kind) == ("n2", "environment")


def test_a_rank_that_hangs_is_named() -> None:
    late = Problem(ProblemCode.RANKS_DID_NOT_END, "n2", {"seconds": "60"}).to_json()
    ended = killed(3, 143, lines=["last words"])
    failure = found(result(ended, problems={"n2": [late]}))
    assert (failure.node, failure.rank, failure.exit_code) == ("n2", 3, 143)
    assert (failure.kind, failure.lines) == ("hang", ("last words",))


def test_a_launcher_that_never_had_ranks() -> None:
    tail = [
        "Traceback (most recent call last):",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 61000, useIpv6: false, code: -98, name: EADDRINUSE, message: "
        "address already in use",
        "",
    ]
    raw = result(exit_codes={"n1": 1, "n2": 143}, tails={"n1": tail, "n2": ["SignalException"]})
    failure = found(raw)
    assert (failure.node, failure.rank, failure.exit_code) == ("n1", None, 1)
    assert failure.kind == "port"
    assert failure.cause == tail[1]
    assert failure.lines == tuple(tail)


def test_the_launcher_that_was_told_to_end_follows_the_other() -> None:
    raw = result(exit_codes={"n1": 143, "n2": 1}, tails={"n1": ["told"], "n2": ["own fault"]})
    assert (found(raw).node, found(raw).cause) == ("n2", "own fault")
    # Even where it had ranks, which were ended with it.
    assert found({**raw, "failures": [killed(0, -15), lost(1)]}).node == "n2"


def test_without_any_words_the_exit_status_is_left() -> None:
    failure = found(result(exit_codes={"n1": 1, "n2": 0}, tails={}))
    assert (failure.node, failure.cause) == ("n1", "the launcher ended with exit status 1")
    assert (failure.kind, failure.lines) == ("unknown", ())


def test_only_consequences_are_known() -> None:
    """A rank that left with status 0 makes the others lose it; there is nobody else to show."""
    assert found(result(killed(0, -15, time=1.0), lost(3, time=2.0))).rank == 3
    failure = found(result(killed(2, -15), killed(1, -15, time=3.0)))
    assert (failure.rank, failure.kind) == (1, "killed")


def test_an_exit_of_the_programs_own_is_told_with_its_status() -> None:
    failure = found(result(rank(0, exception="SystemExit", message="5", lines=["SystemExit: 5"])))
    assert failure.kind == "python-error"
    assert failure.cause == "the program ended itself: sys.exit(5)"


@pytest.mark.parametrize(
    ("code", "kind", "cause"),
    [
        (-9, "killed", "it was killed by SIGKILL"),
        (-11, "killed", "it was killed by SIGSEGV"),
        (137, "killed", "it was killed by SIGKILL"),
        (-63, "killed", "it was killed by signal 63"),
        (7, "unknown", "it ended with exit status 7"),
    ],
)
def test_a_rank_without_a_word_is_classed_by_its_status(code: int, kind: str, cause: str) -> None:
    failure = found(result(killed(1, code)))
    assert (failure.kind, failure.cause, failure.exit_code) == (kind, cause, code)


def test_lines_of_others_do_not_class_a_rank_that_was_killed() -> None:
    raw = killed(1, -9)
    raw["lines"] = ["ModuleNotFoundError: No module named 'optional'; going on without"]
    assert found(result(raw)).kind == "killed"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ProblemCode.BUNDLE_DAMAGED, "damaged-copy"),
        (ProblemCode.NO_ROOM, "disk-full"),
    ],
)
def test_problems_of_nodes_are_classed(code: ProblemCode, kind: str) -> None:
    problem = Problem(code, "n1", dict.fromkeys(code.names, "something"))
    failure = found({"problems": {"n1": [problem.to_json()]}})
    assert (failure.node, failure.rank, failure.exit_code) == ("n1", None, None)
    assert (failure.kind, failure.hint, failure.problem) == (kind, problem.fix, problem)
    assert failure.cause == f"n1: {problem.what}: {problem.why}"


def test_a_problem_of_another_version_is_told_in_its_own_words() -> None:
    raw = {"code": "no-coffee", "what": "the pot is empty", "where": "n1", "why": "", "fix": "brew"}
    failure = found({"problems": {"n1": [raw]}})
    assert (failure.kind, failure.cause, failure.hint) == (
        "unknown",
        "n1: the pot is empty",
        "brew",
    )


def test_only_the_last_lines_are_kept_and_the_json_has_the_documented_keys() -> None:
    failure = found(result(rank(0, lines=[str(number) for number in range(40)])))
    assert failure.lines == tuple(str(number) for number in range(40 - LINES, 40))
    assert encode(failure) == {
        "node": "n1", "rank": 0, "exit_code": 1, "class": "python-error",
        "cause": "ValueError: wrong", "hint": failure.hint, "lines": list(failure.lines),
        "meaning": "", "time": 10.0,
    }  # fmt: skip


def bare(number: int, *lines: str, code: int = 1, at: float = 1.0) -> dict[str, Any]:
    """A rank that ended itself without an exception, as ranks do that agree to give up."""
    return {
        **rank(number, exception="", message="", lines=list(lines)),
        "exit_code": code,
        "time": at,
    }


SAID = ["[RANK 0] WORLD_SIZE=2", "error: --data dat: there is no such folder", "hint: correct it"]


def test_of_ranks_that_give_up_together_the_one_that_says_why_counts() -> None:
    failure = found(result(bare(1, "[RANK 1] WORLD_SIZE=2"), bare(0, *SAID, at=1.2)))
    assert (failure.rank, failure.exit_code) == (0, 1)
    assert failure.cause == "error: --data dat: there is no such folder"
    assert (failure.kind, failure.hint) == ("missing-asset", "correct it")
    # One that ended otherwise does not speak for it.
    assert found(result(bare(1), bare(0, *SAID, code=2, at=1.2))).rank == 1


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train.py: error: unrecognized arguments: --epcohs 3", "correct what follows the two"),
        ("prog sub: error: argument --n: invalid int value: 'x'", "correct what follows the two"),
        ("Error: no such thing", "the lines before that in its log say why"),
    ],
)
def test_a_program_that_ends_itself_is_told_in_its_own_words(line: str, hint: str) -> None:
    lines = ["usage: train.py [-h]", line]
    raw = {**rank(0, exception="SystemExit", message="2", lines=lines), "exit_code": 2}
    failure = found(result(raw))
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


def test_what_slurm_says_is_not_the_programs() -> None:
    assert found(result(bare(0, "srun: error: n1: task 0: Exited"))).kind == "unknown"


# --- what the nodes saw of the ranks' processes --------------------------------------------------


def test_a_rank_that_nobody_told_to_end_is_no_consequence() -> None:
    own = killed(1, -15, time=20.0, told_to_end=False)
    followed = killed(0, -15, time=20.2, told_to_end=True)
    assert found(result(followed, own, lost(3, time=19.9))).rank == 1
    crashed = killed(2, -11, time=23.0, told_to_end=False)
    assert found(result(followed, own, crashed)).rank == 1
    assert found(result(followed, crashed)).rank == 2


def test_of_two_at_the_same_time_the_one_that_torchrun_blames() -> None:
    first, second = killed(0, -9, root_cause=False), killed(1, -9, root_cause=True)
    assert found(result(first, second)).rank == 1


LEFT = {"node": "n1", "rank": 1, "time": 10.0}


def test_a_rank_that_left_early_is_named_before_those_that_missed_it() -> None:
    failure = found(result(lost(2, time=9.99, ended=10.4), lost(0), left=[LEFT]))
    assert (failure.node, failure.rank, failure.exit_code) == ("n1", 1, 0)
    assert (failure.kind, failure.time) == ("hang", 10.0)
    # Not where somebody failed by himself, nor where all had gone before it.
    assert found(result(rank(2, time=30.0), left=[LEFT])).rank == 2
    codes = {"n2": 1}
    earlier = lost(2, time=5.0, ended=5.5)
    assert found(result(earlier, left=[LEFT], exit_codes=codes)).rank == 2
    assert found(result(killed(2, -15), left=[LEFT], exit_codes=codes)).rank == 2


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


def test_a_rank_that_has_left_its_group_and_goes_on() -> None:
    failure = found(result(lost(2, time=9.99, ended=10.4), left=[{**LEFT, "goes_on": True}]))
    assert (failure.node, failure.rank, failure.exit_code) == ("n1", 1, None)
    assert (failure.kind, failure.time) == ("hang", 10.0)
    assert "left its process group" in failure.cause


def test_ranks_that_have_all_left_their_group_keep_nobody_waiting() -> None:
    out = [
        {"node": "n1", "rank": rank, "finished": None, "waits_for": [], "left": 5.0 - rank}
        for rank in (0, 1)
    ]
    raw = {**result(exit_codes={}), "interrupted": True, "world_size": 3, "lingering": out}
    assert found(raw).rank == 1  # the one that left first
    assert find_first_failure_of_result(parsed({**raw, "world_size": 2})) is None


def test_a_rank_of_which_only_the_end_is_known() -> None:
    failure = found(result(lost(3), vanished=[LEFT], exit_codes={}))
    assert (failure.rank, failure.exit_code, failure.kind) == (1, None, "unknown")


def test_what_followed_from_ctrl_c_is_no_failure() -> None:
    codes = {"n1": 143, "n2": 1}
    told = rank(0, exception="KeyboardInterrupt", told_to_end=True)
    raw = result(told, exit_codes=codes, stopped=["n1"], tails={"n2": ["own fault"]})
    assert found({**raw, "interrupted": True}).cause == "own fault"
    everywhere = {**raw, "interrupted": True, "stopped": ["n1", "n2"]}
    assert find_first_failure_of_result(parsed(everywhere)) is None
    assert found({**raw, "interrupted": True, "ended_by": "time-limit"}) == found(raw)


ROOT = "/scratch/n1/stager-1000"


@pytest.mark.parametrize(
    ("message", "other"),
    [
        (f"no x in y ({ROOT}/envs/ab/y.py)", "no x in y (/tmp/stager-1000/envs/ab/y.py)"),
        (f"'{ROOT}/jobs/7.0.0/z' is gone", "'/scratch/n2/stager-1000/jobs/7.1.0/z' is gone"),
        ("rank 0: no answer from 10.0.0.1:4000", "rank 12: no answer from 10.0.0.2:51000"),
        ("bad block on n1, pid 4242", "bad block on n2, pid 7"),
        ("no peer [fe80::1]:29500", "no peer [fe80::2]:29501"),
        ("<Foo object at 0x7f01aa00> is no Bar", "<Foo object at 0x7f99bb00> is no Bar"),
    ],
)
def test_the_same_failure_in_two_places(message: str, other: str) -> None:
    assert make_comparable(record(rank(0, message=message))) == make_comparable(
        record(rank(2, message=other))
    )


@pytest.mark.parametrize(
    ("message", "other"),
    [
        ("index 5 is out of bounds", "index 7 is out of bounds"),
        ("no file /data/part-1.csv", "no file /data/part-2.csv"),
        ("version 1.2.3 is too old", "version 1.2.4 is too old"),
        ("tensor[3] has no gradient", "tensor[4] has no gradient"),
    ],
)
def test_other_failures_of_one_kind(message: str, other: str) -> None:
    assert make_comparable(record(rank(0, message=message))) != make_comparable(
        record(rank(2, message=other))
    )
