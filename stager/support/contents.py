"""The contents of the archive: the files, their names there, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..building.current_bundle import LOCK_NAME
from ..config.load import FILE_NAME, find
from ..core.errors import StagerError
from ..logs.files import JobFiles
from ..pack.existing import manifest_of
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
    job: Mapping[str, Any] = field(default_factory=dict)
    """The job as the driver got it; empty where that is not known."""

    @property
    def launch(self) -> Mapping[str, Any]:
        """The launch settings of the job."""
        launch = self.job.get("launch")
        return launch if isinstance(launch, dict) else {}

    @property
    def nodes(self) -> tuple[str, ...]:
        """The job's nodes, in order, and those that only logs name."""
        of_logs = [log.node for log in self.files.logs if log.node]
        return tuple(dict.fromkeys([*_texts(self.job.get("nodes")), *of_logs]))

    @property
    def passed(self) -> frozenset[str]:
        """Names of variables that the owner of the job declared secret."""
        return frozenset(_texts(self.launch.get("pass_env")))


def contents(files: JobFiles, here: Path) -> ArchiveContents:
    """Return all that belongs to a job.

    Args:
        files: the job's files.
        here: the folder to look for the project in, where the job names none that exists.
    """
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
    """Yield the files that the driver has written besides logs, the job first."""
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
    """Return a file as an item; None, and a line about it, where it cannot go in."""
    try:
        size = size_of(path, folder)
    except UnfitError as exc:
        left_out.append(exc.message)
        return None
    return ArchiveItem(name=name, path=path, folder=folder, size=size, may_be_cut=may_be_cut)


def _job(files: JobFiles) -> Mapping[str, Any]:
    """Return the job, from whatever version of stager."""
    if not files.job_id:
        return {}
    try:
        job = json.loads(whole(files.job, files.folder, SMALL))
    except (UnfitError, ValueError, RecursionError):
        return {}
    return job if isinstance(job, dict) else {}


def _project(job: Mapping[str, Any], here: Path, left_out: list[str]) -> Iterator[ArchiveItem]:
    """Yield the project's settings and lock."""
    run_dir = job.get("run_dir")
    start = Path(run_dir) if isinstance(run_dir, str) and Path(run_dir).is_dir() else here
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


def _manifest(job: Mapping[str, Any], left_out: list[str]) -> Iterator[ArchiveItem]:
    """Yield the manifest of the job's bundle, if that still exists."""
    bundle = job.get("bundle")
    if not isinstance(bundle, str):
        return
    try:
        data = manifest_of(Path(bundle)).to_bytes()
    except (StagerError, OSError) as exc:
        left_out.append(f"manifest.json: {exc}")
        return
    yield ArchiveItem(name="manifest.json", text=data, size=len(data))


def _texts(value: object) -> list[str]:
    """Return the texts in a list; nothing for any other value."""
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, str)]
