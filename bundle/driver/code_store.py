"""Compiled code in the offline root: one file for what a job has added, by the kind of node.

Each is ``<kind>/<SHA-256 of the file>.code``, a stream of :mod:`bundle.results.stream`, with its
description beside it. Only its user, whose ranks run it, may write to the directory.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from ..format.archive import compute_file_digest
from ..format.manifest import Manifest
from ..launch.compiled_code import receive_code, select_code
from ..node import removal
from ..protocol.codec import AnyText, decode, encode
from ..protocol.dataclass import dataclass
from ..protocol.digest import Digest, canonical_json
from ..protocol.problem import NodeError
from ..results.selection import Selection
from ..results.stream import StreamEnd, send_selection
from ..system.files import compute_digest, read_file

_COMPILER_PACKAGES = ("torch", "triton", "pytorch-triton")
_CODE, _DESCRIPTION = ".code", ".json"
_KERNELS = (".so", ".cubin", ".hsaco")
_SAMPLES = 8  # paths by which a node sees that it has all of it
_DESCRIPTION_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SCRATCH = ".new-"
_ABANDONED_SECONDS = 86400.0


@dataclass(frozen=True)
class StoredCode:
    """What one job has compiled on one kind of node."""

    kind: str  # the kind of node, see :class:`~bundle.protocol.messages.CodeFacts`
    machine: AnyText  # the kind in words
    software: str  # see :func:`compute_software_digest`
    job_id: AnyText
    bundle_id: str
    command: str  # digest of the command that its ranks ran
    files: int = 0
    bytes: int = 0
    kernels: int = 0  # compiled functions: shared objects and GPU binaries
    paths: tuple[AnyText, ...] = ()  # some of its directories
    first_step: float | None = None  # seconds to it without compiled code; None if unknown
    path: str = ""  # the file


def compute_software_digest(manifest: Manifest) -> Digest | None:
    """Return the digest of a project's name and its compilers in a bundle; None without torch."""
    layers = {layer.name: layer.id for layer in manifest.layers if layer.name in _COMPILER_PACKAGES}
    if "torch" not in layers:
        return None
    return Digest.of(canonical_json([manifest.name, manifest.requires.python, layers]))


def list_stored_code(store: str, software: str | None = None) -> list[StoredCode]:
    """Return what is in a store and safe to use, the least recently used first."""
    found: list[tuple[float, StoredCode]] = []
    for kind in filter(_DIGEST.fullmatch, _list_names(store)):
        for name in _list_names(os.path.join(store, kind)):
            if name.endswith(_CODE) and _DIGEST.fullmatch(name[: -len(_CODE)]):
                with suppress(OSError, ValueError, RecursionError):
                    path = os.path.join(store, kind, name)
                    code = _read_description(store, path)
                    if software in (None, code.software):
                        found.append((os.lstat(path).st_mtime, code))
    return [code for _, code in sorted(found, key=lambda pair: pair[0])]


def _list_names(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _describing(path: str) -> str:
    return path[: -len(_CODE)] + _DESCRIPTION


def _read_description(store: str, path: str) -> StoredCode:
    folder = os.path.dirname(path)
    for each in (store, folder, path, _describing(path)):
        _require_own(os.lstat(each), each)
    text = read_file(_describing(path), _DESCRIPTION_BYTES)
    code = decode(StoredCode, json.loads(text), strict=False)
    return replace(code, kind=os.path.basename(folder), path=path)


def _require_own(status: os.stat_result, path: str) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} belongs to another user, or others may write to it")


def write_shipment(stored: Sequence[StoredCode], path: str) -> list[str]:
    """Write several jobs' code as one stream; return why some is left out; ValueError if all is."""
    left_out = []
    with make_scratch(os.path.dirname(path)) as scratch:
        together = os.path.join(scratch, "together")
        for code in stored:
            try:
                _unpack(code, os.path.join(scratch, "one"), together)
            except (NodeError, OSError, ValueError) as exc:
                left_out.append(str(exc))
        if len(left_out) == len(stored):
            raise ValueError(left_out[0])
        _write_stream(select_code(together), together, path)
    return left_out


def _unpack(code: StoredCode, scratch: str, folder: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(code.path, flags), "rb") as stream:
        _require_own(os.fstat(stream.fileno()), code.path)
        if os.path.basename(code.path) != compute_digest(stream.fileno()) + _CODE:
            remove_stored_code(code.path)
            raise ValueError(f"{code.path} was damaged, and has been removed")
        stream.seek(0)
        receive_code(stream, scratch, folder, "the offline root")


def _write_stream(selection: Selection, folder: str, path: str) -> None:
    with open(path, "wb", opener=_open_private) as stream:
        end: StreamEnd = send_selection(selection, folder, stream)
    if end.gaps or end.changed:
        raise ValueError(f"{folder} was changed while it was read, or not all could be read")


def mark_as_used(stored: Sequence[StoredCode]) -> None:
    """Make these the most recently used."""
    for code in stored:
        with suppress(OSError):  # of a file system that is mounted for reading
            os.utime(code.path)


def add_code(store: str, folder: str, code: StoredCode, limit: int) -> StoredCode:
    """Keep a directory's compiled code, and remove the oldest; ValueError beyond the limit."""
    selection = select_code(folder)
    files = [entry for entry in selection.entries if stat.S_ISREG(entry.mode)]
    # A long path has a whole key in it, others only the first two characters of one.
    folders = sorted({os.path.dirname(entry.name) for entry in files}, key=len, reverse=True)
    code = replace(
        code,
        files=len(files),
        bytes=sum(entry.size for entry in files),
        kernels=sum(entry.name.endswith(_KERNELS) for entry in files),
        paths=tuple(folders[:_SAMPLES]),
    )
    if code.bytes > limit:
        raise ValueError("it is more than launch.compile-cache-limit")
    with make_scratch(store) as scratch:
        new, beside = os.path.join(scratch, "new"), os.path.join(scratch, "description")
        _write_stream(selection, folder, new)
        with open(beside, "w", encoding="utf-8", opener=_open_private) as file:
            json.dump(encode(code, omit=("path",)), file)
        place = os.path.join(store, code.kind)
        _make_own_folder(place)
        path = os.path.join(place, compute_file_digest(new) + _CODE)
        os.replace(beside, _describing(path))
        os.replace(new, path)
    _tidy(store, limit)
    return replace(code, path=path)


def read_files(code: StoredCode) -> dict[str, bytes]:
    """Return the content of a file and its description, by their names; OSError."""
    names = (code.path, _describing(code.path))
    return {os.path.basename(name): read_file(name) for name in names}


def check_files(files: Mapping[str, bytes]) -> None:
    """Check what :func:`read_files` has returned elsewhere; ValueError."""
    for name, data in files.items():
        stem, ending = os.path.splitext(name)
        if not _DIGEST.fullmatch(stem) or ending not in (_CODE, _DESCRIPTION):
            raise ValueError(f"{name!r} is not the name of a file of compiled code")
        if ending == _CODE and (Digest.of(data) != stem or _describing(name) not in files):
            raise ValueError(f"{name} does not have the content that its name says")
        if ending == _DESCRIPTION:
            _read_kind(name, data)


def _read_kind(name: str, data: bytes) -> Digest:
    try:
        return Digest(decode(StoredCode, json.loads(data), strict=False).kind)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{name} describes no compiled code") from exc


def write_files(store: str, files: Mapping[str, bytes]) -> None:
    """Write what :func:`check_files` accepts into a store; OSError."""
    for name, data in files.items():
        with make_scratch(store) as scratch:
            beside = os.path.splitext(name)[0] + _DESCRIPTION
            place = os.path.join(store, _read_kind(beside, files[beside]))
            _make_own_folder(place)
            new = os.path.join(scratch, "new")
            with open(new, "wb", opener=_open_private) as stream:
                stream.write(data)
            os.replace(new, os.path.join(place, name))


def remove_stored_code(path: str) -> None:
    """Remove a file with its description."""
    for each in (path, _describing(path)):
        with suppress(FileNotFoundError):
            os.unlink(each)


def _tidy(store: str, limit: int) -> None:
    total = 0
    for code in reversed(list_stored_code(store)):
        if total + code.bytes > limit:
            remove_stored_code(code.path)
        else:
            total += code.bytes
    before = time.time() - _ABANDONED_SECONDS
    for name in _list_names(store):
        path = os.path.join(store, name)
        with suppress(OSError):
            if name.startswith(_SCRATCH) and os.lstat(path).st_mtime < before:
                removal.delete_as_far_as_possible(path)


@contextmanager
def make_scratch(folder: str) -> Iterator[str]:
    """Make a directory in another one of this user, which is made as well; remove it at the end."""
    _make_own_folder(folder)
    scratch = tempfile.mkdtemp(prefix=_SCRATCH, dir=folder)
    try:
        yield scratch
    finally:
        removal.delete_as_far_as_possible(scratch)


def _make_own_folder(path: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _require_own(os.lstat(path), path)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_CREAT | os.O_CLOEXEC, 0o600)
