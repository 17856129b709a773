"""Agreement of a job's nodes about names and the time. Pure functions of the nodes' answers.

The answers are JSON values: the addresses that each node finds (:mod:`bundle.checks.reachability`),
and its clock.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..protocol.problem import Problem, ProblemCode
from ..system import network

SKEW_LIMIT = 2.0
"""Seconds by which clocks may differ before it is a problem: time limits and logs rely on them."""


class ClockReading(NamedTuple):
    """A node's clock, and the driver's around it; seconds since the epoch."""

    sent: float
    """The time of the driver's request, by the driver's clock."""
    clock: float
    """The time by the node's clock."""
    received: float
    """The time when the driver had the answer, by the driver's clock."""


class Offset(NamedTuple):
    """The time by which a clock is ahead of the driver's."""

    seconds: float
    """The best estimate; negative for behind."""
    uncertainty: float
    """Seconds by which the estimate may be wrong."""


def disagreements(answers: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, list[Problem]]:
    """Return the problems with the nodes' resolution of each other's names.

    A node disagrees with the others if none of its addresses for a name, or only some of them
    besides others, are among those that most nodes find; a node may find more of them, or fewer.

    Returns:
        The problems of each node that has any.
    """
    names = list(dict.fromkeys(name for resolved in answers.values() for name in resolved))
    expected = {name: _expected(name, answers) for name in names}
    all_problems = {}
    for node, resolved in answers.items():
        problems = [
            *_unknown_names(node, resolved),
            *_loopback_names(node, resolved),
            *_differing_names(node, resolved, expected),
        ]
        if problems:
            all_problems[node] = problems
    return all_problems


def _unknown_names(node: str, resolved: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    unknown = [name for name, addresses in resolved.items() if not addresses]
    if unknown:
        yield Problem(ProblemCode.NAMES_UNRESOLVED, node, {"names": _some(unknown)})


def _loopback_names(node: str, resolved: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    firsts = {name: addresses[0] for name, addresses in resolved.items() if addresses}
    inward = [f"{name} is {first}" for name, first in firsts.items() if network.is_loopback(first)]
    if inward:
        yield Problem(ProblemCode.NAMES_LEAD_BACK, node, {"names": _some(inward)})


def _differing_names(
    node: str, resolved: Mapping[str, Sequence[str]], expected: Mapping[str, Collection[str]]
) -> Iterator[Problem]:
    differing = []
    for name, addresses in resolved.items():
        usable = _usable(addresses)
        if not _agree(usable, expected[name]):
            differing.append(f"{name} is {_some(usable)}, not {_some(sorted(expected[name]))}")
    if differing:
        yield Problem(ProblemCode.NAMES_DIFFER, node, {"names": _some(differing)})


def offset(clock: ClockReading) -> Offset:
    """Estimate a clock's offset: it was read between the driver's two times."""
    middle = (clock.sent + clock.received) / 2
    return Offset(clock.clock - middle, abs(clock.received - clock.sent) / 2)


def skewed(
    clocks: Mapping[str, ClockReading], limit: float = SKEW_LIMIT
) -> dict[str, list[Problem]]:
    """Find the nodes whose clocks are certainly more than ``limit`` seconds from most clocks.

    The driver's clock has one vote as well, and decides between two equal halves.

    Returns:
        The problems of each node that has any.
    """
    offsets = {node: offset(clock) for node, clock in clocks.items()}
    votes = sorted([Offset(0.0, 0.0), *offsets.values()])
    middle = votes[(len(votes) - 1) // 2], votes[len(votes) // 2]
    median = min(middle, key=lambda vote: abs(vote.seconds))
    problems = {}
    for node, offset_here in offsets.items():
        skew = offset_here.seconds - median.seconds
        uncertainty = offset_here.uncertainty + median.uncertainty
        if abs(skew) - uncertainty > limit:
            values = {
                "seconds": f"{abs(skew):.1f}",
                "side": "ahead of" if skew > 0 else "behind",
                "uncertainty": f"{uncertainty:.1f}",
            }
            problems[node] = [Problem(ProblemCode.CLOCK_WRONG, node, values)]
    return problems


def _usable(addresses: Iterable[str]) -> list[str]:
    """Leave out loopback and link-local addresses, which mean another host on each node."""
    usable = []
    for address in addresses:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if not network.is_loopback(address) and not parsed.is_link_local:
            usable.append(address)
    return usable


def _expected(name: str, answers: Mapping[str, Mapping[str, Sequence[str]]]) -> frozenset[str]:
    """Return the addresses of a name that most nodes find; its own node decides a tie."""
    by_node = {node: frozenset(_usable(names.get(name, ()))) for node, names in answers.items()}
    counts = Counter(addresses for addresses in by_node.values() if addresses)
    if not counts:
        return frozenset()
    return max(counts, key=lambda addresses: (counts[addresses], by_node.get(name) == addresses))


def _agree(mine: Collection[str], expected: Collection[str]) -> bool:
    return not mine or set(mine) <= set(expected) or set(expected) <= set(mine)


def _some(items: Iterable[str], most: int = 4) -> str:
    listed = list(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
