"""The evidence in a support archive: files of a job, and the pages about them."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bundle.protocol.messages import FrameVariables, ProbeAnswer

from .. import __version__
from ..building.current_bundle import LOCK_NAME
from ..config.load import FILE_NAME, find
from ..core.errors import StagerError
from ..core.processes import Runner, run
from ..diagnosis.failure import Diagnosis
from ..logs import job_record
from ..logs.job_files import JobFiles, KeptJob, parse_kept_job
from ..pack.bundle_file import read_manifest
from ..redaction.redactor import HELD, Redactor
from ..slurm.messages import query_output

_CHUNK = 1 << 20


class UnfitError(StagerError):
    """A file that cannot go into the archive; the message says why."""


def open_regular_file(path: Path, folder: Path) -> BinaryIO:
    """Open a regular file below a directory; a link is followed if it does not lead out of it."""
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise UnfitError(f"{path.name}: a link that points outside {folder}")
        # A pipe would block, a device may do anything: neither is opened to be read.
        handle = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise UnfitError(f"{path.name}: {exc.strerror or exc}") from exc
    except RuntimeError as exc:  # links in a circle, before Python 3.13
        raise UnfitError(f"{path.name}: a broken link") from exc
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UnfitError(f"{path.name}: not a regular file")
    return os.fdopen(handle, "rb")


def read_small_file(path: Path, folder: Path, limit: int) -> bytes:
    """Return the content of a small file."""
    with open_regular_file(path, folder) as handle:
        data = handle.read(limit + 1)
    if len(data) > limit:
        raise UnfitError(f"{path.name}: it has more than {limit} bytes")
    return data


def get_size(path: Path, folder: Path) -> int:
    """Return the size of a file in bytes."""
    with open_regular_file(path, folder) as handle:
        return os.fstat(handle.fileno()).st_size


def redact_file(handle: BinaryIO, size: int, limit: int, redactor: Redactor) -> Iterator[bytes]:
    """Yield a file without secrets, even one that the cut divides; of a long one both ends."""
    if size <= limit:
        yield from redactor.redact_stream(read_range(handle, 0, size))
        return
    start, end = limit // 2, size - (limit - limit // 2)
    notice = f"\n[stager support: {end - start} bytes left out here]\n"
    yield from redactor.redact_stream(read_range(handle, 0, min(size, start + HELD)), end=start)
    yield notice.encode()
    begin = max(0, end - HELD)
    yield from redactor.redact_stream(read_range(handle, begin, size), start=end - begin)


def read_range(handle: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Yield a part of a file in pieces; it ends early where the file does."""
    at = start
    while at < end:
        handle.seek(at)
        piece = handle.read(min(_CHUNK, end - at))
        if not piece:
            return
        yield piece
        at += len(piece)


SMALL = 64 << 20  # bytes of a file that is read as a whole


class ArchiveItem(NamedTuple):
    """One file of the archive."""

    name: str
    size: int
    path: Path | None = None
    folder: Path = Path()  # the directory that it must not lead out of
    text: bytes = b""
    may_be_cut: bool = False

    def is_cut(self, limit: int) -> bool:
        """Return whether its middle is left out where logs may have so many bytes."""
        return self.may_be_cut and self.size > limit


class ArchiveContents(NamedTuple):
    """Everything that goes into the archive."""

    items: tuple[ArchiveItem, ...]
    """The files, settings first: they name secrets that others only use."""
    files: JobFiles
    left_out: tuple[str, ...]  # a line for each file that was left out or not found
    job: KeptJob

    @property
    def nodes(self) -> tuple[str, ...]:
        """The job's nodes, in order, and those that only logs name."""
        of_logs = [log.node for log in self.files.logs if log.node]
        return tuple(dict.fromkeys([*self.job.nodes, *of_logs]))


def collect_contents(files: JobFiles, here: Path) -> ArchiveContents:
    """Return a job's files; look for its project from ``here`` if its run directory is gone."""
    left_out: list[str] = []
    long = (files.preflight, files.events, files.order)
    stacks = [files.stacks] if files.stacks.exists() else []  # most jobs are never silent
    of_driver = (files.job, files.wrapper, *long, *stacks) if files.job_id else ()
    items = [
        item
        for path in of_driver
        if (item := _make_item(path.name, path, files.folder, left_out, may_be_cut=path in long))
    ]
    job = KeptJob()
    if files.job_id:
        with suppress(UnfitError):
            job = parse_kept_job(read_small_file(files.job, files.folder, SMALL))
    logs = []
    for log in files.logs:
        name = log.path.name
        if not files.job_id:
            name = f"logs/{log.path.relative_to(files.folder).as_posix()}"
        if item := _make_item(name, log.path, files.folder, left_out, may_be_cut=True):
            logs.append(log)
            items.append(item)
    settings = [*_list_settings(job, here, left_out), *_list_manifest(job, left_out)]
    return ArchiveContents(
        items=(*settings, *items),
        files=JobFiles(folder=files.folder, job_id=files.job_id, logs=tuple(logs)),
        left_out=tuple(left_out),
        job=job,
    )


def _make_item(
    name: str, path: Path, folder: Path, left_out: list[str], *, may_be_cut: bool
) -> ArchiveItem | None:
    try:
        size = get_size(path, folder)
    except UnfitError as exc:
        left_out.append(exc.message if os.path.lexists(path) else f"{path.name}: not there")
        return None
    return ArchiveItem(name, size, path, folder, may_be_cut=may_be_cut)


def _list_settings(job: KeptJob, here: Path, left_out: list[str]) -> Iterator[ArchiveItem]:
    start = Path(job.run_dir) if job.run_dir and Path(job.run_dir).is_dir() else here
    settings = None
    with suppress(StagerError, OSError):
        settings = find(start)
    if settings is None:
        left_out.append(f"{FILE_NAME}: not found from {start} upwards")
        return
    for path in (settings, settings.parent / LOCK_NAME):
        if item := _make_item(path.name, path, path.parent, left_out, may_be_cut=False):
            yield item


def _list_manifest(job: KeptJob, left_out: list[str]) -> list[ArchiveItem]:
    try:
        data = read_manifest(Path(job.bundle)).to_bytes() if job.bundle else b""
    except (StagerError, OSError) as exc:
        left_out.append(f"manifest.json: {exc}")
        return []
    return [ArchiveItem("manifest.json", len(data), text=data)] if data else []


def collect_versions(files: JobFiles | None, runner: Runner = run) -> dict[str, object]:
    """Return the versions of software here and, unless ``files`` is None, on the job's nodes."""
    nodes = _list_packages(files) if files is not None and files.job_id else {}
    torch = sorted({str(packages["torch"]) for packages in nodes.values() if packages.get("torch")})
    slurm = query_output(["sinfo", "--version"], runner).strip()
    return {
        "schema": 1,
        "stager": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "slurm": slurm or None,
        "torch": torch[0] if len(torch) == 1 else torch or None,
        "nodes": nodes,
    }


def _list_packages(files: JobFiles) -> dict[str, dict[str, object]]:
    events = (record.event for record in job_record.read_records(files.events))
    answers = (event for event in events if isinstance(event, ProbeAnswer))
    return {answer.node: {"python": answer.python, **answer.packages} for answer in answers}


def redact_diagnosis(diagnosis: Diagnosis, redactor: Redactor) -> Diagnosis:
    """Return a diagnosis without secrets, while its lines are whole: a cut might divide one."""

    def many(lines: Sequence[str]) -> tuple[str, ...]:
        # As one text: a key has several lines.
        return tuple(redactor.words("\n".join(lines)).split("\n")) if lines else ()

    lines = [line.text.replace("\n", " ") for line in diagnosis.evidence]
    evidence = tuple(
        replace(line, text=text) for line, text in zip(diagnosis.evidence, many(lines), strict=True)
    )
    first = diagnosis.first
    if first is not None:
        first = replace(
            first,
            cause=redactor.words(first.cause),
            hint=redactor.words(first.hint),
            meaning=redactor.words(first.meaning),
            lines=many(first.lines),
            variables=tuple(_redact_frame(frame, redactor) for frame in first.variables),
        )
    restarts = tuple(
        replace(again, failed=replace(again.failed, cause=redactor.words(again.failed.cause)))
        for again in diagnosis.restarts
        if again.failed is not None
    )
    return replace(diagnosis, first=first, evidence=evidence, restarts=restarts)


def _redact_frame(frame: FrameVariables, redactor: Redactor) -> FrameVariables:
    values = (
        # With its name before it, which may tell what it is.
        replace(one, text=redactor.words(f"{one.name}={one.text}").partition("=")[2])
        for one in frame.values
    )
    return replace(frame, place=redactor.words(frame.place), values=tuple(values))


def write_readme(
    what: str,
    members: Mapping[str, tuple[int, str]],
    left_out: Sequence[str],
    counts: Mapping[str, int],
) -> bytes:
    """Return the page that lists the archive's members, with their bytes and a remark."""
    total = sum(counts.values())
    lines = [
        f"The evidence of {what}, gathered by stager {__version__}",
        "",
        "LOOK THROUGH IT BEFORE YOU SEND IT. What has the name or the looks of a secret was taken",
        "out, but a secret without either cannot be told from any other word.",
        "",
        "What is in it:",
        *(f"  {size:>12,} bytes  {name}{note}" for name, (size, note) in sorted(members.items())),
        "",
        f"What was taken out: {total or 'nothing'}",
        *(f"  {count:>12,} x {kind}" for kind, count in sorted(counts.items())),
    ]
    if total:
        lines += ["", "In place of each stands [redacted: KIND], or a stand-in for a name."]
    if left_out:
        lines += ["", "What was not found, or left out:", *(f"  {reason}" for reason in left_out)]
    lines += ["", "Unpacked, `stager diagnose FOLDER` and `stager logs FOLDER` read it."]
    return "\n".join(lines).encode(errors="surrogateescape") + b"\n"


Describe = Callable[[Diagnosis], str]  # returns a diagnosis in words
