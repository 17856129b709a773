"""The result of ``stager clean``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bundle.protocol.reports import CleanAnswer, NodeCleanup

from ..jobs.outcome import Outcome
from .clean import UnusedItem


@dataclass(frozen=True, kw_only=True)
class CleanedItem:
    """Something that was removed, or would be."""

    place: str
    """The node, or ``offline root``."""
    path: Path
    """Its path there."""
    bytes: int
    """Bytes that it took up."""
    kind: str
    """``environment``; in the offline root see :class:`stager.cleanup.clean.UnusedItem`."""
    why: str
    """The reason why nobody needs it."""


@dataclass(frozen=True, kw_only=True)
class CleanResult:
    """The result of ``stager clean``."""

    ok: bool
    """True unless a node could not be cleaned."""
    dry_run: bool
    """True if nothing was removed."""
    nodes_skipped: str | None
    """The reason why the nodes cannot be cleaned from here; None where they can be."""
    items: tuple[CleanedItem, ...]
    """What was removed, or would be."""
    bytes: int
    """Bytes that became free, or would."""
    outcome: Outcome | None = field(default=None, metadata={"json": None})
    """The job that cleaned the nodes; None where there was none."""


@dataclass(frozen=True, kw_only=True)
class CleanNodeResult:
    """The result of ``stager clean-node``."""

    ok: bool
    """True unless something could not be removed."""
    dry_run: bool
    """True if nothing was removed."""
    roots: tuple[NodeCleanup, ...]
    """The node roots that were found."""
    bytes: int
    """Bytes that became free, or would."""


def removed_on_node(answer: CleanAnswer) -> Iterator[CleanedItem]:
    """Yield what a node removed, or would remove."""
    for root in answer.roots:
        environments = [(f"envs/{name}", size) for name, size in root.removed]
        for name, size in [*environments, *root.left_overs]:
            yield CleanedItem(
                place=answer.node,
                path=Path(root.root) / name,
                bytes=size,
                kind="environment",
                why="not in use",
            )


def keeps(answer: CleanAnswer, bundle_id: str) -> bool:
    """Return whether a node still has the environment of a bundle."""
    return any(name.endswith(bundle_id) for root in answer.roots for name, _ in root.kept)


def removed_in_store(item: UnusedItem) -> CleanedItem:
    """Return an item of the offline root that was removed, or would be."""
    return CleanedItem(
        place="offline root", path=item.path, bytes=item.size, kind=item.kind, why=item.why
    )
