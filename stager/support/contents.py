"""The contents of the archive: the files, their names there, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..building.current_bundle import LOCK_NAME
from ..config.load import FILE_NAME, find
from ..core.errors import StagerError
from ..logs.job_files import JobFiles
from ..logs.job_record import KeptJob, kept_job
from ..pack.bundle_file import manifest_of
from .job_files import UnfitError, size_of, whole

SMALL = 64 << 20
"""Bytes of a file that is read as a whole."""


@dataclass(frozen=True, kw_only=True)
class ArchiveItem:
    """One file of the archive."""

    name: str
    """Its name there, below the top folder."""
    path: Path | None = None
    """The file; None for a text."""
    folder: Path | None = None
    """The directory that it must not lead out of."""
    text: bytes = b""
    """Its content, where it is no file."""
    size: int = 0
    """Its bytes before anything is taken out."""
    may_be_cut: bool = False
    """True where its middle may be left out."""


@dataclass(frozen=True, kw_only=True)
class ArchiveContents:
    """Everything that goes into the archive."""

    items: tuple[ArchiveItem, ...]
    """The files, settings first: they name secrets that others only use."""
    files: JobFiles
    """The job's files, without those that were left out."""
    left_out: tuple[str, ...]
    """A line for each file that was left out or not found, with the reason."""
    job: KeptJob
    """The job as the driver got it."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The job's nodes, in order, and those that only logs name."""
        of_logs = [log.node for log in self.files.logs if log.node]
        return tuple(dict.fromkeys([*self.job.nodes, *of_logs]))


def contents(files: JobFiles, here: Path) -> ArchiveContents:
    """Return a job's files; look for its project from ``here`` if its run directory is gone."""
    left_out: list[str] = []
    items = list(_of_driver(files, left_out))
    job = _job(files)
    logs = []
    for log in files.logs:
        name = log.path.name
        if not files.job_id:
            name = f"logs/{log.path.relative_to(files.folder).as_posix()}"
        item = _item(name, log.path, files.folder, left_out, may_be_cut=True)
        if item is not None:
            logs.append(log)
            items.append(item)
    settings = [*_project(job, here, left_out), *_manifest(job, left_out)]
    return ArchiveContents(
        items=(*settings, *items),
        files=JobFiles(folder=files.folder, job_id=files.job_id, logs=tuple(logs)),
        left_out=tuple(left_out),
        job=job,
    )


def _of_driver(files: JobFiles, left_out: list[str]) -> Iterator[ArchiveItem]:
    if not files.job_id:
        return
    for path in (files.job, files.wrapper, files.preflight, files.events, files.order):
        may_be_cut = path in (files.preflight, files.events, files.order)
        if not path.is_symlink() and not path.exists():
            left_out.append(f"{path.name}: not there")
        elif item := _item(path.name, path, files.folder, left_out, may_be_cut=may_be_cut):
            yield item


def _item(
    name: str, path: Path, folder: Path, left_out: list[str], *, may_be_cut: bool
) -> ArchiveItem | None:
    """Return a file as an item; None, and a line in ``left_out``, if it cannot be added."""
    try:
        size = size_of(path, folder)
    except UnfitError as exc:
        left_out.append(exc.message)
        return None
    return ArchiveItem(name=name, path=path, folder=folder, size=size, may_be_cut=may_be_cut)


def _job(files: JobFiles) -> KeptJob:
    if not files.job_id:
        return KeptJob()
    try:
        return kept_job(whole(files.job, files.folder, SMALL))
    except UnfitError:
        return KeptJob()


def _project(job: KeptJob, here: Path, left_out: list[str]) -> Iterator[ArchiveItem]:
    start = Path(job.run_dir) if job.run_dir and Path(job.run_dir).is_dir() else here
    try:
        settings = find(start)
    except (StagerError, OSError):
        settings = None
    if settings is None:
        left_out.append(f"{FILE_NAME}: not found from {start} upwards")
        return
    for path in (settings, settings.parent / LOCK_NAME):
        if not path.exists():
            left_out.append(f"{path.name}: not there")
        elif item := _item(path.name, path, path.parent, left_out, may_be_cut=False):
            yield item


def _manifest(job: KeptJob, left_out: list[str]) -> Iterator[ArchiveItem]:
    if not job.bundle:
        return
    try:
        data = manifest_of(Path(job.bundle)).to_bytes()
    except (StagerError, OSError) as exc:
        left_out.append(f"manifest.json: {exc}")
        return
    yield ArchiveItem(name="manifest.json", text=data, size=len(data))
