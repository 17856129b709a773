"""Remarks for the user about the nodes of a relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...protocol.counts import counted, sized
from ...protocol.messages import Relayed
from .phase_answers import PhaseAnswers
from .relay_damage import damage_lines

_SLOW_SHARE = 3.0
"""A node is slow if its file took so many times as long as the others' ..."""
_SLOW_SECONDS = 6.0
"""... and so many seconds more: for as long a sound node may wait for a slow or silent parent,
until it takes another one."""
_MOST_REMARKS = 8
"""Lines of one kind."""


def remarks(answers: PhaseAnswers, size: int) -> tuple[str, ...]:
    """Return lines about nodes that were slow, damaged bytes, or could not connect to others."""
    apart = [
        f"{node} cannot connect to {other} ({why}), and took the file from another node"
        for node, others in answers.out_of_reach.items()
        for other, why in others.items()
        if node in answers.relayed and not answers.relayed[node].failure
    ]
    damage = damage_lines(answers.relayed)
    return (*_first(_slow(answers.relayed, size)), *_first(damage), *_first(apart))


def _slow(relayed: Mapping[str, Relayed], size: int) -> list[str]:
    lines = []
    seconds = {node: report.seconds for node, report in relayed.items() if not report.failure}
    ordered = sorted(seconds.values())
    for node, taken in seconds.items():
        usual = _median_of_others(ordered, taken)
        if usual is not None and taken > max(_SLOW_SHARE * usual, usual + _SLOW_SECONDS):
            rate, others = sized(int(size / taken)), sized(int(size / max(usual, 0.001)))
            lines.append(
                f"{node} is slow: it received {rate}/s, the median of the others is {others}/s"
            )
    return lines


def _median_of_others(ordered: Sequence[float], own: float) -> float | None:
    """Return the other values' median, ``own`` if that is not above it; None for no others."""
    count = len(ordered) - 1
    if not count:
        return None
    middle = count // 2
    if own <= ordered[middle]:
        return own
    return ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_REMARKS
    return lines if more <= 0 else [*lines[:_MOST_REMARKS], f"... and {counted(more, 'more line')}"]
