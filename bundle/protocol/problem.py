"""A problem on a node, in a form that travels as JSON and reads as one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a node from running the job."""

    what: str
    """The fault: ``the environment does not fit``."""
    where: str
    """The directory, host, interface or module it concerns."""
    why: str
    """The finding, with numbers: ``needs 1.4 GB, 0.2 GB are free``."""
    fix: str
    """The remedy: a thing that the user can do."""

    def __str__(self) -> str:
        fault = f"{self.where}: {self.what}" if self.where else self.what
        return "; ".join(filter(None, (fault, self.why, self.fix)))

    def to_json(self) -> dict[str, str]:
        """Return the four fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, str]) -> Problem:
        """Read :meth:`to_json`'s output; raises KeyError if a field is missing."""
        return cls(what=raw["what"], where=raw["where"], why=raw["why"], fix=raw["fix"])


class NodeError(Exception):
    """The one expected failure of the far side.

    Attributes:
        problem: what went wrong, where, why, and what to do about it.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem
