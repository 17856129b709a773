"""Measured values, and the order in which they are taken: A B A B, round after round.

Something that slows the machine down for a while then slows all of them, and the median of each
forgets it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def nothing() -> None:
    """Do nothing: the default before and after a step."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One measured value."""

    value: float
    """In the unit of what is measured: seconds, bytes, calls."""
    cpu: float | None = None
    """User and system seconds of all processes, where a time was measured."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that is measured in every round."""

    name: str
    """What its values are kept under, such as ``build/ours``."""
    measure: Callable[[], Value]
    """Does it and gives the value."""
    prepare: Callable[[], None] = nothing
    """Comes before it, and is not measured."""
    tidy: Callable[[], None] = nothing
    """Comes after it, and is not measured."""


@dataclass
class Samples:
    """All values measured so far, by name."""

    values: dict[str, list[Value]] = field(default_factory=dict)

    def add(self, name: str, value: Value) -> None:
        """Keep one more value."""
        self.values.setdefault(name, []).append(value)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a value of that name."""
        return bool(self.values.get(name))

    def of(self, name: str) -> tuple[float, ...]:
        """The values of a name, in the order in which they were measured."""
        return tuple(value.value for value in self.values.get(name, []))

    def middle(self, name: str) -> float:
        """The median of a name's values; there must be one."""
        return statistics.median(self.of(name))

    def to_json(self) -> dict[str, dict[str, object]]:
        """Every name's median, extremes and values."""
        return {name: _summary(values) for name, values in sorted(self.values.items()) if values}


def _summary(values: Sequence[Value]) -> dict[str, object]:
    plain = [value.value for value in values]
    cpu = [value.cpu for value in values if value.cpu is not None]
    return {
        "median": statistics.median(plain),
        "min": min(plain),
        "max": max(plain),
        "values": plain,
        **({"cpu_seconds": cpu} if cpu else {}),
    }


def interleave(
    steps: Sequence[Step],
    rounds: int,
    samples: Samples,
    say: Callable[[str], None],
    *,
    label: str = "round",
) -> None:
    """Measure every step once a round.

    Args:
        steps: in the order in which they are taken within a round.
        rounds: how many there are.
        samples: take the values.
        say: told each value as it comes.
        label: what a round is called in what is said.
    """
    for number in range(1, rounds + 1):
        for step in steps:
            step.prepare()
            value = step.measure()
            samples.add(step.name, value)
            say(f"  {label} {number} of {rounds}: {step.name} {value.value:,.3f}")
            step.tidy()
