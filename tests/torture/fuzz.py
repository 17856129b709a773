"""Hypothesis as a source of faults: many examples a round, the same ones for the same round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from .rounds import Round

EXAMPLES = 20
"""Faults in a round."""


def examples(round_: Round, strategy: SearchStrategy[Any], attempt: Callable[[Any], str]) -> None:
    """Call ``attempt`` with values of a strategy, and count what comes of each.

    Raises:
        Broken: of the smallest value that breaks a promise.
    """

    @seed(round_.rng.getrandbits(64))
    @settings(
        database=None,
        deadline=None,
        max_examples=EXAMPLES,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(strategy)
    def each(value: Any) -> None:
        try:
            outcome = attempt(value)
        except Exception as exc:
            exc.args = (*exc.args, f"for {value!r:.2000}")
            raise
        round_.counts[outcome] += 1

    each()
