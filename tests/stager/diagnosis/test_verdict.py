"""The one order of candidates, whatever their evidence is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bundle.protocol.enumerations import FailureClass
from stager.diagnosis.failure import FirstFailure
from stager.diagnosis.verdict import Candidate, Role, blamed


def candidate(name: str, role: Role = Role.CAUSE, **changed: Any) -> Candidate:
    failure = FirstFailure(node=name, kind=FailureClass.UNKNOWN, cause="", hint="")
    return Candidate(role=role, failure=lambda: failure, **changed)


def name_of_blamed(*candidates: Candidate) -> str:
    first = blamed(candidates)
    assert first is not None
    return first.failure().node


def test_without_candidates_nothing_failed() -> None:
    assert blamed([]) is None


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
