"""Marks of bundles that a batch script names, which stay until the script is of no use any more.

A script that was printed or submitted holds the path of its bundle, and may wait in the queue for
days while the project goes on. So no rebuild removes such a bundle, and ``clean`` leaves it alone.
A mark is an empty file beside the bundle: ``NAME.pkgs.tar.script`` for what was printed, and
``NAME.pkgs.tar.job-4711`` for a job, until its end has been seen. Each counts for 30 days.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..core.errors import StagerError
from ..core.files import BUNDLE_SUFFIX
from ..core.store import Store

DAYS = 30
"""Days for which a mark counts: no more is known of what was printed, or of a job that is lost."""
_SECONDS = DAYS * 86400.0
_OF_SCRIPT = ".script"
_OF_JOB = ".job-"


def mark(store: Store, bundle: Path, job_id: str = "") -> bool:
    """Mark a bundle for a script (no job id: one that was printed); return whether it stays."""
    if bundle.parent != store.root / "bundles":
        return True
    try:
        with store.publishing(_mark(bundle, job_id)) as partial:
            partial.touch()
    except (StagerError, OSError):
        return False
    return True


def unmark(bundle: Path, job_id: str) -> None:
    """Remove the mark of a job that is over."""
    with suppress(OSError):
        _mark(bundle, job_id).unlink()


def is_marked(bundle: Path, now: float, *, by_jobs: bool = False) -> bool:
    """Return whether a batch script names a bundle; ``by_jobs`` ignores printed scripts."""
    marks = marks_in(bundle.parent, bundle.name, by_jobs=by_jobs)
    return any(_age(path, now) < _SECONDS for path in marks)


def marked(store: Store, now: float, *, by_jobs: bool = False) -> list[Path]:
    """Return the bundles that batch scripts name; see :func:`is_marked`."""
    bundles = sorted((store.root / "bundles").glob(f"*{BUNDLE_SUFFIX}"))
    return [path for path in bundles if is_marked(path, now, by_jobs=by_jobs)]


def marks_in(
    folder: Path, bundle: str = f"*{BUNDLE_SUFFIX}", *, by_jobs: bool = False
) -> Iterator[Path]:
    """Yield the marks in a directory with bundles, by default those of all."""
    for ending in (f"{_OF_JOB}*",) if by_jobs else (_OF_SCRIPT, f"{_OF_JOB}*"):
        yield from folder.glob(f"{bundle}{ending}")


def _mark(bundle: Path, job_id: str) -> Path:
    return bundle.with_name(bundle.name + (f"{_OF_JOB}{job_id}" if job_id else _OF_SCRIPT))


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:  # it was removed just now
        return _SECONDS
