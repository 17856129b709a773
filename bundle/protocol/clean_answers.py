"""A node's report on the environments that it has removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .answers import Answer
from .codec import REQUIRED, WRITTEN
from .problem import Problem


@dataclass(frozen=True)
class NodeCleanup:
    """The result of cleaning one node root; in a dry run, the plan."""

    root: str
    """The node root."""
    removed: tuple[tuple[str, int], ...] = field(default=(), metadata=REQUIRED)
    """Environments: the bundle's id, and the bytes that became free."""
    kept: tuple[tuple[str, str], ...] = field(default=(), metadata=REQUIRED)
    """Everything that stays: the bundle's id or the path in the root, and the reason."""
    left_overs: tuple[tuple[str, int], ...] = field(default=(), metadata=REQUIRED)
    """Everything else that was removed: its path in the root, and the bytes that became free."""
    problems: tuple[Problem, ...] = field(default=(), metadata=REQUIRED)
    """The failures to remove something."""
    gone: bool = field(default=False, metadata=REQUIRED)
    """True if nothing was left and the root itself was removed."""
    freed: int = field(default=0, metadata=REQUIRED)
    """Bytes that became free, without files that other environments share."""


@dataclass(frozen=True)
class CleanAnswer(Answer):
    """The node roots of one node after a cleaning."""

    event: ClassVar[str] = "clean"

    roots: tuple[NodeCleanup, ...] = field(default=(), metadata=WRITTEN)
    """Each node root of this user."""
