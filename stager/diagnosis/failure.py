"""The values of a diagnosis: the first failure, its evidence, and its consequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from bundle.protocol.enumerations import FailureClass
from bundle.protocol.problem import Problem

from ..catalogue.catalogue import CatalogueMatch


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A line of a log that shows what happened."""

    path: Path = field(metadata={"json": "file"})
    """The file."""
    number: int = field(metadata={"json": "line"})
    """The line's number, from 1."""
    text: str
    """The line."""


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The failure that the others follow from."""

    node: str
    """The node it happened on; empty if unknown."""
    rank: int | None = None
    """The rank; None for the failure of a node, or of no known rank."""
    exit_code: int | None = None
    """The rank's exit status, negative for a signal; None where no rank had started."""
    kind: FailureClass = field(metadata={"json": "class"})
    """Its class."""
    cause: str
    """The cause, in one line."""
    hint: str
    """Advice: what to do about it."""
    lines: tuple[str, ...] = ()
    """The last lines that belong to it."""
    meaning: str = ""
    """The same in words, where the catalogue has them."""
    time: float | None = None
    """The time, in seconds since the epoch; None if unknown."""
    entry: str = field(default="", metadata={"json": None})
    """The catalogue's entry that explains it; empty for none."""
    problem: Problem | None = field(default=None, metadata={"json": None})
    """The far side's problem that it is; None for a failure of another kind."""

    def explained_by(self, known: CatalogueMatch) -> FirstFailure:
        """Return it with the class, the meaning and the advice that the catalogue knows."""
        entry = known.entry
        meaning, hint = entry.explain(known.groups)
        return replace(
            self, kind=entry.kind, meaning=meaning, hint=hint or self.hint, entry=entry.name
        )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The outcome of a job, and its reason."""

    job_id: str
    """The job; empty where files have no number."""
    folder: Path
    """The directory of its files."""
    ok: bool | None
    """Whether the job ended well; None if unknown."""
    first: FirstFailure | None
    """The first failure; None where nothing failed."""
    evidence: tuple[Evidence, ...] = ()
    """The lines that show it, in order."""
    same_failure: tuple[int, ...] = ()
    """Ranks that failed by themselves with the same error."""
    consequences: tuple[int, ...] = ()
    """Ranks that failed because of it."""
    missing: tuple[int, ...] = ()
    """For a hang: ranks that did not reach the collective that the others waited in."""
    interrupted: bool = False
    """Whether its user ended it."""
    read: int = 0
    """The number of files read."""
    before_launch: bool = False
    """Whether it failed before any rank was started, though ranks were to be started."""
    command: str = ""
    """The command that failed before it had a job; empty where there was one."""
