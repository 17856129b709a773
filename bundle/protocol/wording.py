"""The words of one kind of problem."""

from __future__ import annotations

import string
from dataclasses import dataclass

from .enumerations import FailureClass


@dataclass(frozen=True)
class Wording:
    """The words of a kind of problem, with its values in braces; ``{where}`` is its place."""

    what: str
    """The fault."""
    why: str = "{why}"
    """The finding; empty where the fault says it all."""
    fix: str = ""
    """The remedy."""
    failure_class: FailureClass = FailureClass.ENVIRONMENT
    """The class of a job's failure that begins with it."""
    meaning: str = ""
    """A longer explanation, for ``docs/troubleshooting.md``."""
    follows: bool = False
    """True if it follows from another node's problem."""

    @property
    def names(self) -> frozenset[str]:
        """The values that the words need."""
        parts = string.Formatter().parse(self.what + self.why + self.fix)
        return frozenset(name for _, name, _, _ in parts if name) - {"where"}
