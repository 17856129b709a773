"""The result of ``stager diagnose``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .failure import Diagnosis, Evidence, FirstFailure


@dataclass(frozen=True, kw_only=True)
class DiagnosisResult:
    """The result of ``stager diagnose``, under the names that scripts rely on."""

    ok: bool | None
    """True if the job ended well; None if unknown."""
    job_id: str
    """The job; empty where files have no number."""
    log_dir: Path
    """The directory of its files."""
    first_failure: FirstFailure | None
    """The first failure; None where nothing failed."""
    entry: str
    """The catalogue's entry that explains it; empty for none."""
    evidence: tuple[Evidence, ...]
    """The lines that show it, in order."""
    alike: tuple[int, ...]
    """Ranks that failed by themselves with the same error."""
    consequences: tuple[int, ...]
    """Ranks that failed because of it."""
    missing_ranks: tuple[int, ...]
    """For a hang: ranks that did not reach the collective that the others waited in."""
    files_read: int
    """Number of files read."""
    before_launch: bool
    """True if it failed before any rank was started, though ranks were to be started."""


def diagnosis_result(diagnosis: Diagnosis) -> DiagnosisResult:
    """Return the result of ``stager diagnose``."""
    first = diagnosis.first
    return DiagnosisResult(
        ok=diagnosis.ok,
        job_id=diagnosis.job_id,
        log_dir=diagnosis.folder,
        first_failure=first,
        entry="" if first is None else first.entry,
        evidence=diagnosis.evidence,
        alike=diagnosis.same_failure,
        consequences=diagnosis.consequences,
        missing_ranks=diagnosis.missing,
        files_read=diagnosis.read,
        before_launch=diagnosis.before_launch,
    )
