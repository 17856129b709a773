"""Problems: one sentence for people, one object for JSON."""

from bundle.protocol.problem import NodeError, Problem

FULL = Problem("does not fit", "/tmp", "needs 2 GB, 1 GB is free", "name another directory")


def test_reads_as_one_sentence() -> None:
    assert str(FULL) == "/tmp: does not fit; needs 2 GB, 1 GB is free; name another directory"
    assert str(Problem("does not fit", "", "", "")) == "does not fit"


def test_json_round_trip() -> None:
    assert Problem.from_json(FULL.to_json()) == FULL


def test_the_error_carries_its_problem() -> None:
    error = NodeError(FULL)
    assert (error.problem, str(error)) == (FULL, str(FULL))
