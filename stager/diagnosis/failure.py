"""The values of a diagnosis: the first failure, its evidence, and its consequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.protocol.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A line of a log that shows what happened."""

    path: Path
    """The file."""
    number: int
    """The line's number, from 1."""
    text: str
    """The line."""

    def to_json(self) -> dict[str, Any]:
        """The fields, for ``--json``."""
        return {"file": str(self.path), "line": self.number, "text": self.text}


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The failure that the others follow from."""

    node: str
    """The node it happened on; empty if unknown."""
    rank: int | None
    """The rank; None for the failure of a node, or of no known rank."""
    exit_code: int | None
    """The rank's exit status, negative for a signal; None where no rank had started."""
    kind: str
    """Its class, one of the words that ``--json`` documents."""
    cause: str
    """The cause, in one line."""
    hint: str
    """Advice: what to do about it."""
    lines: tuple[str, ...]
    """The last lines that belong to it."""
    meaning: str = ""
    """The same in words, where the catalogue has them."""
    time: float | None = None
    """The time, in seconds since the epoch; None if unknown."""
    entry: str = ""
    """The catalogue's entry that explains it; empty for none."""
    problem: Problem | None = None
    """The far side's problem that it is; None for a failure of another kind."""

    def to_json(self) -> dict[str, Any]:
        """The fields under the names that scripts rely on."""
        return {
            "node": self.node,
            "rank": self.rank,
            "exit_code": self.exit_code,
            "class": self.kind,
            "cause": self.cause,
            "hint": self.hint,
            "lines": list(self.lines),
            "meaning": self.meaning,
            "time": self.time,
        }


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

    def to_json(self) -> dict[str, Any]:
        """The object of ``stager diagnose --json``."""
        return {
            "ok": self.ok,
            "job_id": self.job_id,
            "log_dir": str(self.folder),
            "first_failure": None if self.first is None else self.first.to_json(),
            "entry": "" if self.first is None else self.first.entry,
            "evidence": [line.to_json() for line in self.evidence],
            "alike": list(self.same_failure),
            "consequences": list(self.consequences),
            "missing_ranks": list(self.missing),
            "files_read": self.read,
            "before_launch": self.before_launch,
        }
