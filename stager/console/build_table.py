"""The rows of the table that says what a build did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bundle.protocol.counts import counted, sized

if TYPE_CHECKING:
    from ..building.build import BuildResult
    from ..lock.pylock import PackageChanges

_MOST_NAMES = 8
"""Names in one row; more are counted."""


def build_rows(result: BuildResult) -> list[tuple[str, str, str, str]]:
    """Return the rows: the step, what it did, bytes, and time; empty texts where it has none."""
    took = {phase: f"{seconds:.1f} s" for phase, seconds in result.seconds.items()}
    made = f"{result.layers_built} made, {result.layers_reused} reused"
    proved = "nothing is missing offline" if result.proved else "not proved"
    rows = [
        ("packages", _changed(result.changes), "", took.get("lock", "")),
        ("wheels", counted(result.packages, "package"), "", took.get("wheels", "")),
        ("layers", made, f"{sized(result.changes.bytes)} new to nodes", took.get("layers", "")),
        ("bundle", counted(result.files, "file"), sized(result.bundle_bytes), took["bundle"]),
        ("proof", proved, "", took.get("proof", "")),
        ("total", "", "", f"{sum(result.seconds.values()):.1f} s"),
    ]
    if result.output is not None:
        rows.insert(-1, ("copy", str(result.output), sized(result.bundle_bytes), ""))
    return rows


def _changed(changes: PackageChanges) -> str:
    updated = [f"{one.name} {one.old} -> {one.new}" for one in changes.changed]
    added = [f"{one.name} {one.new}" for one in changes.added]
    removed = [one.name for one in changes.removed]
    parts = [
        f"{word} {_names(names)}"
        for word, names in (
            ("added", added),
            ("removed", removed),
            ("changed", updated),
        )
        if names
    ]
    return "; ".join(parts) or "none changed"


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
