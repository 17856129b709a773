"""An archive of the evidence of a job, to be carried out of a site without a network."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from itertools import chain, count
from pathlib import Path
from typing import IO

from bundle.protocol.codec import encode
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import LogMode
from bundle.redaction.known_values import KnownValues, can_be_found, secrets_of_environment
from bundle.system import permissions

from ..config.load import load
from ..core.errors import StagerError
from ..core.files import expand_home, write_output
from ..diagnosis.diagnosis import diagnose
from ..logs.job_files import JobFiles, resolve_output
from ..redaction.redactor import Pseudonyms, Redactor
from . import LOG_BYTES
from .evidence import (
    SMALL,
    ArchiveContents,
    ArchiveItem,
    Describe,
    UnfitError,
    collect_contents,
    collect_versions,
    get_size,
    open_regular_file,
    read_small_file,
    redact_diagnosis,
    redact_file,
    write_readme,
)

_MIN_BYTES = 6  # the shortest value of settings that is looked for elsewhere, too
_BRACKETS = (b"[", b"{", b"(")


def _find_known(
    environment: Mapping[str, str], passed: Collection[str], settings: Iterable[bytes]
) -> Iterator[bytes]:
    """Yield the secrets of an environment, those in its other variables, and those of settings."""
    yield from secrets_of_environment(environment, passed)
    for value in environment.values():
        yield from _find_in_text(value.encode(errors="surrogateescape"))
    for text in settings:
        yield from (value for value in _find_in_text(text) if len(value) >= _MIN_BYTES)


def _find_in_text(text: bytes) -> Iterator[bytes]:
    for span, learned in Redactor().find_secrets(text):
        value = learned or text[span.start : span.end]
        if can_be_found(value) and not value.startswith(_BRACKETS):
            yield value


class ArchiveWriter:
    """An archive whose members wait in a temporary file until all are known."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the object
        self.members: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # what could not be written is not needed any more
            self._file.close()

    def add(self, name: str, pieces: Iterable[bytes]) -> int:
        """Add a member, and return its size in bytes."""
        start = self._file.seek(0, os.SEEK_END)
        for piece in pieces:
            self._file.write(piece)
        size = self._file.tell() - start
        self.members[name] = start, size
        return size

    def clear(self) -> None:
        """Forget all members."""
        self._file.seek(0)
        self._file.truncate()
        self.members.clear()

    def write(self, target: Path, top: str) -> int:
        """Write the archive, and return its size in bytes."""
        with write_output(target, permissions.make_opener(LogMode.PRIVATE)) as out:
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=out, mtime=0)
            form = tarfile.GNU_FORMAT
            with packed, tarfile.open(fileobj=packed, mode="w", format=form) as archive:
                for name, (start, size) in sorted(self.members.items()):
                    self._file.seek(start)
                    member = tarfile.TarInfo(f"{top}/{name}")
                    member.size, member.mode, member.mtime = size, 0o644, 0
                    archive.addfile(member, self._file)
            out.flush()
            return out.tell()


_NAME = "stager-support-"
_UNFIT = re.compile(r"[^\w.,@+=~ -]|[^\x20-\x7e]")
_MARK = re.compile(r"\[redacted: ([\w-]+)\]")


@dataclass(frozen=True, kw_only=True)
class SupportOptions:
    """The options of the archive."""

    output: Path | None = None  # its file, or the directory for it; None for this directory
    log_bytes: int = LOG_BYTES
    hide_names: bool = False  # replace users, machines and addresses by pseudonyms


@dataclass(frozen=True, kw_only=True)
class Supported:
    """An archive that was made."""

    ok: bool = True
    archive: Path
    size: int = field(metadata={"json": "bytes"})
    files: int
    redacted: dict[str, int]  # how many secrets were taken out, by kind
    left_out: tuple[str, ...] = field(metadata={"json": None})


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """A file that would go into the archive."""

    name: str
    bytes: int
    cut: bool


@dataclass(frozen=True, kw_only=True)
class SupportListing:
    """The result of ``stager support --list``."""

    ok: bool = True
    files: tuple[ListedFile, ...]
    left_out: tuple[str, ...]


def make_support_archive(
    files: JobFiles,
    options: SupportOptions,
    describe: Describe,
    environment: Mapping[str, str] = os.environ,
) -> Supported:
    """Make the archive."""
    gathering = _Gathering(collect_contents(files, Path.cwd()), options, environment)
    with ArchiveWriter() as archive:
        try:
            left_out = gathering.fill(archive, describe)
            if gathering.has_learned():  # what was added before may contain what was learned after
                left_out = gathering.fill(archive, describe)
        except OSError as exc:
            hint = "they are kept in $TMPDIR until the archive is written: it needs room"
            raise StagerError(f"cannot gather the files: {exc.strerror or exc}", hint=hint) from exc
        output = expand_home(options.output or Path())
        target = output / f"{gathering.top}.tar.gz" if output.is_dir() else output
        place = resolve_output(target.absolute(), files, "the archive")
        return Supported(
            archive=target.absolute(),
            size=archive.write(place, gathering.top),
            files=len(archive.members),
            redacted=dict(sorted(gathering.redactor.counts.items())),
            left_out=left_out,
        )


def list_support_files(files: JobFiles, log_bytes: int) -> SupportListing:
    """Return what would go in; nothing is written, and no log is read."""
    found = collect_contents(files, Path.cwd())
    listed = (
        ListedFile(name=item.name, bytes=item.size, cut=item.is_cut(log_bytes))
        for item in sorted(found.items, key=lambda item: item.name)
    )
    return SupportListing(files=tuple(listed), left_out=found.left_out)


class _Gathering:
    def __init__(
        self,
        found: ArchiveContents,
        options: SupportOptions,
        environment: Mapping[str, str],
    ) -> None:
        self._found, self._options = found, options
        self.redactor = Redactor()
        self._pseudonyms: Pseudonyms | None = None
        self.top = ""
        passed, texts = set(found.job.launch.pass_env), []
        for item in found.items:
            is_settings = item.path is not None and item.path.suffix == ".toml"
            if is_settings or item.path == found.files.job:
                texts.append(_read_item(item))
            with suppress(StagerError, OSError):
                if item.path is not None and is_settings:
                    passed.update(load(item.path).launch.pass_env)
        self._known = list(_find_known(environment, passed, texts))
        names = [environment.get("USER"), environment.get("LOGNAME")]
        names.append(Path(environment.get("HOME", "")).name)
        self._users = [name for name in dict.fromkeys(names) if name]

    def has_learned(self) -> bool:
        return bool(self.redactor.learned or (self._pseudonyms and self._pseudonyms.learned))

    def fill(self, archive: ArchiveWriter, describe: Describe) -> tuple[str, ...]:
        archive.clear()
        files = self._found.files
        self.redactor = self._renew_redactor()
        folder = files.job_id or self._make_safe_name(files.folder.resolve().name) or "logs"
        self.top = _NAME + folder
        left_out, members = list(self._found.left_out), dict[str, tuple[int, str]]()
        for item in self._found.items:
            try:
                name = self._choose_name(item.name, archive)
                size = archive.add(name, self._read_pieces(item))
            except UnfitError as exc:  # it has changed since it was looked at
                left_out.append(exc.message)
                continue
            note = f" (of {item.size:,}; the middle was left out)"
            members[name] = size, note if item.is_cut(self._options.log_bytes) else ""
        for name, data in self._list_pages(describe, left_out):
            members[name] = archive.add(name, [data]), ""
        reasons = tuple(self.redactor.words(line) for line in left_out)
        what = f"job {files.job_id}" if files.job_id else "a job"
        archive.add("README.txt", [write_readme(what, members, reasons, self.redactor.counts)])
        return reasons

    def _renew_redactor(self) -> Redactor:
        """Return a redactor that has counted nothing, and knows what the last one has learned."""
        self._known += [value for value in self.redactor.known.values if value not in self._known]
        if self._options.hide_names:
            if self._pseudonyms is not None:
                self._users = [*dict.fromkeys([*self._users, *self._pseudonyms.met()])]
            self._pseudonyms = Pseudonyms(self._users, [*self._found.nodes, socket.gethostname()])
        return Redactor(KnownValues(self._known), self._pseudonyms)

    def _choose_name(self, name: str, archive: ArchiveWriter) -> str:
        """Return a member's name without secrets, but with the parts that ``stager`` reads."""
        mark = f".{self._found.files.job_id}."
        if mark != ".." and mark in name:
            before, _, after = name.partition(mark)
            safe = self._make_safe_name(before) + mark + self._make_safe_name(after)
        else:
            safe = "/".join(self._make_safe_name(part) for part in name.split("/"))
        names = (f"{safe}-{number}" for number in count(2))
        return next(name for name in chain([safe], names) if name not in archive.members)

    def _make_safe_name(self, part: str) -> str:
        shown = _MARK.sub(r"redacted-\1", self.redactor.words(part))
        return _UNFIT.sub("_", shown)

    def _read_pieces(self, item: ArchiveItem) -> Iterator[bytes]:
        if item.path is None:
            yield from self.redactor.redact_stream([item.text])
            return
        limit = self._options.log_bytes if item.may_be_cut else SMALL
        with open_regular_file(item.path, item.folder) as handle:
            size = os.fstat(handle.fileno()).st_size
            yield from redact_file(handle, size, limit, self.redactor)

    def _list_pages(self, describe: Describe, left_out: list[str]) -> Iterator[tuple[str, bytes]]:
        files = self._found.files
        is_readable = _can_read_driver_files(files)
        if is_readable:
            try:
                clean = redact_diagnosis(diagnose(files), self.redactor)
            except StagerError as exc:
                left_out.append(f"diagnosis: {exc.message}")
            else:
                yield "diagnosis.json", self._encode_page({"schema": 1, **encode(clean)})
                yield "diagnosis.txt", self.redactor.words(describe(clean)).encode() + b"\n"
        yield "versions.json", self._encode_page(collect_versions(files if is_readable else None))

    def _encode_page(self, value: Mapping[str, object]) -> bytes:
        return self.redactor.text(json.dumps(value, indent=2).encode() + b"\n")


def _read_item(item: ArchiveItem) -> bytes:
    try:
        return read_small_file(item.path, item.folder, SMALL) if item.path else item.text
    except UnfitError:
        return b""


def _can_read_driver_files(files: JobFiles) -> bool:
    paths = (files.events, files.order, files.preflight, files.job) if files.job_id else ()
    try:
        for path in filter(os.path.lexists, paths):
            get_size(path, files.folder)
    except UnfitError:
        return False
    return True
