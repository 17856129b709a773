"""Hypothesis as a source of faults: many examples a round, the same ones for the same round."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .rounds import REFUSED, SAME, Broken, Round, require

EXAMPLES = 20
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, -0.5, 1e308, "", "x", "..", "\0", "\n",
    "9" * 5000, "1." * 3000, "\x1b[2J", "\ud800", "n" * 5000, [], [[]], [None], ["x"], {},
    {"a": 1}, [1] * 50,
)  # fmt: skip
Change = tuple[int, Any, str]  # which place of a JSON value, what it gets, and how


def changes(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Change]:
    kinds = st.sampled_from(("set", "set", "set", "delete", "add", "repeat"))
    return st.tuples(st.integers(0, 10**6), values, kinds)


def changed(raw: Any, change: Change, name: str = "nosuch") -> Any:
    """Return a copy of a JSON value with a change in one place; an added value gets the name."""
    number, value, how = change
    result = copy.deepcopy(raw)
    places = _list_places(result)
    if not places:
        return result
    at, key = places[number % len(places)]
    if how == "delete":
        del at[key]
    elif how == "set":
        at[key] = value
    elif isinstance(at, dict):
        at[name] = value
    else:
        at.append(at[key] if how == "repeat" else value)
    return result


def _list_places(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in _list_places(value[key])]


def examples(
    round_: Round, strategy: st.SearchStrategy[Any], attempt: Callable[[Any], str]
) -> None:
    """Call ``attempt`` with values of a strategy, and count what comes of each."""

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


def reads(
    read: Callable[[], object], expected: type[Exception], text: object = "", most: int = 20_000
) -> str:
    """Hold that something is understood, or refused with a message that can be read."""
    try:
        read()
    except expected as exc:
        require(0 < len(str(exc).strip()) < most, "a message can be read", repr(exc)[:5000])
        return REFUSED
    except Exception as exc:
        trace = "".join(traceback.format_exception(exc)[-6:])
        raise Broken("no exception but the product's own errors", f"{trace}\n{text}") from exc
    return SAME
