"""Ranks that waited for others in vain, and the ranks that did not come."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bundle.protocol.enumerations import FailureClass

from .failure import FirstFailure
from .phrases import ranks_in_words
from .rank_verdict import LINES
from .scan import Hit

LOG_TELLS = (
    "its log shows what it did last; look for code that only some ranks run, and for different "
    "numbers of batches"
)
"""The hint for a rank that others waited for."""


def absent(waiting: Sequence[Hit], nodes: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that others waited for: those they name, else those without a hit."""
    return _named(waiting) or _behind(waiting) or _without_hit(waiting, nodes)


def _named(waiting: Sequence[Hit]) -> tuple[int, ...]:
    named: set[int] = set()
    for hit in waiting:
        named.update(map(int, re.findall(r"\d+", hit.groups.get("ranks", ""))))
    return tuple(sorted(named))


def _without_hit(waiting: Sequence[Hit], nodes: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that report no wait; empty if no waiting rank is known."""
    waited = {hit.rank for hit in waiting if hit.rank is not None}
    return tuple(sorted(nodes.keys() - waited)) if waited else ()


def hang(waited: Hit, missing: Sequence[int], nodes: Mapping[int, str]) -> FirstFailure:
    """Return the failure of the ranks that others waited for."""
    ranks = ranks_in_words(missing) or "some rank"
    meaning, _ = waited.entry.explain(waited.groups)
    return FirstFailure(
        node=nodes.get(missing[0], "") if missing else "",
        rank=missing[0] if len(missing) == 1 else None,
        kind=FailureClass.HANG,
        cause=f"{ranks} did not reach a collective that the other ranks were waiting in",
        hint=LOG_TELLS,
        lines=waited.trace[-LINES:] or (waited.text,),
        time=waited.time,
        meaning=meaning,
        entry=waited.entry.name,
    )


def _behind(waiting: Sequence[Hit]) -> tuple[int, ...]:
    """Return the ranks whose watchdogs name an earlier collective than those of other ranks.

    Collectives are counted for each group of ranks. A rank with several numbers has several groups,
    and where groups are not named nothing can be said of them.
    """
    for numbers in _collectives(waiting).values():
        lowest = min(numbers.values())
        if lowest < max(numbers.values()):
            return tuple(sorted(rank for rank, number in numbers.items() if number == lowest))
    return ()


def _collectives(waiting: Sequence[Hit]) -> dict[str, dict[int, int]]:
    """Return the number of the collective that each rank waits in, by group of ranks."""
    by_group: dict[str, dict[int, int]] = {}
    ambiguous: set[str] = set()
    for hit in waiting:
        rank, number = _rank_of(hit), hit.groups.get("seq")
        if rank is None or not number:
            continue
        group = hit.groups.get("group", "")
        known = by_group.setdefault(group, {}).setdefault(rank, int(number))
        if known != int(number):
            ambiguous.add(group)
    if "" in ambiguous:
        del by_group[""]
    return by_group


def _rank_of(hit: Hit) -> int | None:
    if hit.rank is not None:
        return hit.rank
    named = hit.groups.get("at")
    return int(named) if named else None
