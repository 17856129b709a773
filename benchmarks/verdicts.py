"""The verdicts: each row's values against its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .rounds import Samples
from .rows import Row

State = Literal["met", "missed", "information", "not judged", "not measured"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a row."""

    row: Row
    state: State
    ours: float | None = None
    """Median of our values."""
    peer: float | None = None
    """Median of the peer's."""
    figure: float | None = None
    """What the target is compared with: the ratio of the medians, or ours where no peer is."""


def judge(rows: Sequence[Row], samples: Samples, *, judged: bool = True) -> list[Verdict]:
    """Hold each row's values against its target.

    Args:
        rows: what was asked for.
        samples: what was measured.
        judged: whether targets count; not for another environment than the reference.
    """
    return [_verdict(row, samples, judged) for row in rows]


def _verdict(row: Row, samples: Samples, judged: bool) -> Verdict:
    if row.ours not in samples or (row.peer and row.peer not in samples):
        return Verdict(row=row, state="not measured")
    ours = samples.middle(row.ours)
    peer = samples.middle(row.peer) if row.peer else None
    figure = ours if peer is None else _ratio(ours, peer)
    state = _state(row, figure, judged)
    return Verdict(row=row, state=state, ours=ours, peer=peer, figure=figure)


def _ratio(ours: float, peer: float) -> float:
    """Divide; nothing against nothing is nothing, something against nothing beyond any target."""
    if peer:
        return ours / peer
    return float("inf") if ours else 0.0


def _state(row: Row, figure: float, judged: bool) -> State:
    if row.target is None:
        return "information"
    if not judged:
        return "not judged"
    return "met" if figure <= row.target + row.slack else "missed"


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """1 where a target is missed, or could not be measured though it was asked for; else 0."""
    failed = [v for v in verdicts if v.state == "missed"]
    unknown = [v for v in verdicts if v.state == "not measured" and v.row.target is not None]
    return 1 if failed or unknown else 0
