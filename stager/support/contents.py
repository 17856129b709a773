"""What goes into the archive: which files there are, under which names, and what is left out."""

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
from .evidence import UnfitError, size_of, whole

SMALL = 64 << 20
"""Bytes of a file that is read as a whole."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One file of the archive."""

    name: str
    """Its name there, below the top folder."""
    path: Path | None = None
    """Where it is read from; None for one that is here."""
    folder: Path | None = None
    """The directory that it must not lead out of."""
    text: bytes = b""
    """Its content, where it is no file."""
    size: int = 0
    """Its bytes, as it is."""
    may_be_cut: bool = False
    """Whether its middle may be left out."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that goes in."""

    items: tuple[Item, ...]
    """The files, settings first: they tell secrets that others only use."""
    files: JobFiles
    """The job's files, without those that were left out."""
    left_out: tuple[str, ...]
    """What was left out or not found, and why."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The job as the driver was told it; empty where that is not known."""

    @property
    def launch(self) -> Mapping[str, Any]:
        """How its ranks were started."""
        found = self.job.get("launch")
        return found if isinstance(found, dict) else {}

    @property
    def nodes(self) -> tuple[str, ...]:
        """The job's nodes, in order, and those that only logs tell of."""
        told = self.job.get("nodes")
        listed = [one for one in told if isinstance(one, str)] if isinstance(told, list) else []
        return tuple(dict.fromkeys([*listed, *(log.node for log in self.files.logs if log.node)]))

    @property
    def passed(self) -> frozenset[str]:
        """Names of variables that are secret because the job's owner said so."""
        told = self.launch.get("pass_env")
        return frozenset(filter(_is_text, told)) if isinstance(told, list) else frozenset()


def contents(files: JobFiles, here: Path) -> Contents:
    """Look for all that belongs to a job.

    Args:
        files: the job's files.
        here: where the project is looked for if the job does not tell, or it is gone.
    """
    left_out: list[str] = []
    items = list(_own(files, left_out))
    job = _job(files)
    logs = []
    for log in files.logs:
        name = log.path.name
        if not files.job_id:
            name = f"logs/{log.path.relative_to(files.folder).as_posix()}"
        if item := _item(name, log.path, files.folder, left_out, may_be_cut=True):
            logs.append(log)
            items.append(item)
    settings = [*_project(job, here, left_out), *_manifest(job, left_out)]
    return Contents(
        items=(*settings, *items),
        files=JobFiles(folder=files.folder, job_id=files.job_id, logs=tuple(logs)),
        left_out=tuple(left_out),
        job=job,
    )


def _own(files: JobFiles, left_out: list[str]) -> Iterator[Item]:
    """What the driver has written besides logs, the job first."""
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
) -> Item | None:
    try:
        size = size_of(path, folder)
    except UnfitError as exc:
        left_out.append(exc.message)
        return None
    return Item(name=name, path=path, folder=folder, size=size, may_be_cut=may_be_cut)


def _job(files: JobFiles) -> Mapping[str, Any]:
    """The job, from whatever version of stager."""
    if not files.job_id:
        return {}
    try:
        found = json.loads(whole(files.job, files.folder, SMALL))
    except (UnfitError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _project(job: Mapping[str, Any], here: Path, left_out: list[str]) -> Iterator[Item]:
    """The project's settings and lock."""
    told = job.get("run_dir")
    start = Path(told) if isinstance(told, str) and Path(told).is_dir() else here
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


def _manifest(job: Mapping[str, Any], left_out: list[str]) -> Iterator[Item]:
    """What is in the job's bundle, if that is still there."""
    told = job.get("bundle")
    if not isinstance(told, str):
        return
    try:
        data = manifest_of(Path(told)).to_bytes()
    except (StagerError, OSError) as exc:
        left_out.append(f"manifest.json: {exc}")
        return
    yield Item(name="manifest.json", text=data, size=len(data))


def _is_text(value: object) -> bool:
    return isinstance(value, str)
