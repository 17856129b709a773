"""A fault of an environment: a path that is not as it was built."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One thing in an environment that is not as it was built."""

    path: str
    """Relative to the environment."""
    why: str
    """The state of it, and the state that it should have."""


def shown(path: str) -> str:
    """Return a path as it may stand in a message."""
    return path if path.isprintable() else ascii(path)


def reason(exc: Exception) -> str:
    """Return why a file of an environment cannot be read."""
    if isinstance(exc, FileNotFoundError):
        return "it is missing"
    return str(getattr(exc, "strerror", None) or exc)
