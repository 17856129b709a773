"""Compiled code in the offline root: one file for what a job has added, by the kind of node.

Each is ``<kind>/<SHA-256 of the file>.code``, a stream of :mod:`bundle.results.stream`, with its
description beside it. The directory belongs to one user, and nobody else may write to it: compiled
code is run by that user's ranks.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ..format.archive import compute_file_digest
from ..format.manifest import Manifest
from ..launch.compiled_code import select_code, unpack_code
from ..node import removal
from ..protocol.codec import AnyText, DecodeError, decode, encode
from ..protocol.digest import Digest, canonical_json
from ..results.selection import Selection
from ..results.stream import send_selection
from ..system.files import read_file

_COMPILING = ("torch", "triton", "pytorch-triton")  # the packages that make such code
_CODE, _DESCRIPTION = ".code", ".json"
_KERNELS = (".so", ".cubin", ".hsaco")
_SAMPLES = 8  # paths by which a node sees that it has all of it
_DESCRIPTION_BYTES = 1 << 20
_KIND, _DIGEST = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredCode:
    """What one job has compiled on one kind of node."""

    kind: str
    """The kind of node, see :class:`~bundle.protocol.messages.CodeFacts`."""
    machine: AnyText
    """The kind in words."""
    software: str
    """Digest of what it depends on in a bundle."""
    job_id: str
    bundle_id: str
    command: str
    """Digest of the command that its ranks ran."""
    files: int = 0
    bytes: int = 0
    kernels: int = 0
    """Compiled functions: shared objects and GPU binaries."""
    paths: tuple[AnyText, ...] = ()
    """Some of its directories."""
    first_step: float | None = None
    """Seconds to the first step of that job, if it had no compiled code; None if it had, or where
    that is unknown."""
    path: str = ""
    """The file."""


def compute_software_digest(manifest: Manifest) -> Digest | None:
    """Return the digest of what compiled code depends on in a bundle; None without torch."""
    layers = {layer.name: layer.id for layer in manifest.layers if layer.name in _COMPILING}
    if "torch" not in layers:
        return None
    return Digest.of(canonical_json([manifest.requires.python, layers]))


def list_stored_code(store: str) -> list[StoredCode]:
    """Return what is in a store that is safe to use, the least recently used first."""
    found: list[tuple[float, StoredCode]] = []
    with suppress(OSError):
        for kind in filter(_KIND.fullmatch, os.listdir(store)):
            for name in os.listdir(os.path.join(store, kind)):
                if name.endswith(_CODE) and _DIGEST.fullmatch(name[: -len(_CODE)]):
                    path = os.path.join(store, kind, name)
                    with suppress(OSError, ValueError, DecodeError, RecursionError):
                        found.append((os.lstat(path).st_mtime, _read_description(store, path)))
    return [code for _, code in sorted(found, key=lambda pair: pair[0])]


def _read_description(store: str, path: str) -> StoredCode:
    beside = path[: -len(_CODE)] + _DESCRIPTION
    for each in (store, os.path.dirname(path), path, beside):
        status = os.lstat(each)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or stat.S_ISLNK(status.st_mode):
            raise PermissionError(each)
    with open(beside, encoding="utf-8") as file:
        code = decode(StoredCode, json.loads(file.read(_DESCRIPTION_BYTES)), strict=False)
    return replace(code, kind=os.path.basename(os.path.dirname(path)), path=path)


def write_shipment(stored: Sequence[StoredCode], path: str) -> None:
    """Write what several jobs have compiled as one stream.

    Raises:
        ValueError: a file was damaged, and has been removed.
        NodeError: what is in it cannot be unpacked.
        OSError: it cannot be read, or the stream not written.
    """
    with make_scratch(os.path.dirname(path)) as scratch:
        together = os.path.join(scratch, "together")
        os.mkdir(together)
        for number, code in enumerate(stored):
            _check_digest(code)
            unpack_code(code.path, os.path.join(scratch, str(number)), together, "the offline root")
        with open(path, "wb") as stream:
            send_selection(select_code(together), together, stream)


def read_files(code: StoredCode) -> dict[str, bytes]:
    """Return the content of a file and its description, by their paths in the store; OSError."""
    names = (code.path, code.path[: -len(_CODE)] + _DESCRIPTION)
    return {f"{code.kind}/{os.path.basename(name)}": read_file(name) for name in names}


def write_files(store: str, files: Mapping[str, bytes]) -> int:
    """Write what :func:`read_files` has returned elsewhere; return the number of files of code.

    Raises:
        ValueError: it has other names, or another content than its name says.
        OSError: the store cannot be written.
    """
    count = 0
    for name, data in files.items():
        kind, _, file = name.partition("/")
        stem, ending = os.path.splitext(file)
        is_named = _KIND.fullmatch(kind) and _DIGEST.fullmatch(stem)
        if not is_named or ending not in (_CODE, _DESCRIPTION):
            raise ValueError(f"{name!r} is no name of compiled code")
        if ending == _CODE and Digest.of(data) != stem:
            raise ValueError(f"{name} does not have the content that its name says")
        os.makedirs(os.path.join(store, kind), mode=0o700, exist_ok=True)
        with make_scratch(store) as scratch:
            new = os.path.join(scratch, "new")
            with open(new, "wb", opener=_open_private) as stream:
                stream.write(data)
            os.replace(new, os.path.join(store, kind, file))
        count += ending == _CODE
    return count


def mark_as_used(stored: Sequence[StoredCode]) -> None:
    """Make these the most recently used."""
    for code in stored:
        with suppress(OSError):  # of a file system that is mounted for reading
            os.utime(code.path)


def _check_digest(code: StoredCode) -> None:
    if os.path.basename(code.path) == compute_file_digest(code.path) + _CODE:
        return
    remove_stored_code(code.path)
    raise ValueError(f"{code.path} was damaged, and has been removed")


def remove_stored_code(path: str) -> None:
    """Remove a file with its description."""
    for each in (path, path[: -len(_CODE)] + _DESCRIPTION):
        with suppress(FileNotFoundError):
            os.unlink(each)


def add_code(
    store: str, folder: str, code: StoredCode, limit: int, since: float = 0.0
) -> StoredCode:
    """Keep the compiled code in a directory, of after a time; return its description.

    What was not used for longest is removed where all is more than ``limit`` bytes.

    Raises:
        NodeError: the directory cannot be read.
        OSError: the store cannot be written, or somebody else may write to it.
    """
    selection = select_code(folder, since)
    code = _describe(selection, code)
    with make_scratch(store) as scratch:
        new = os.path.join(scratch, "new")
        with open(new, "wb", opener=_open_private) as stream:
            send_selection(selection, folder, stream)
        place = os.path.join(store, code.kind)
        os.makedirs(place, mode=0o700, exist_ok=True)
        path = os.path.join(place, compute_file_digest(new) + _CODE)
        beside = os.path.join(scratch, "description")
        with open(beside, "w", encoding="utf-8", opener=_open_private) as file:
            json.dump(encode(code, omit=("path",)), file)
        os.replace(beside, path[: -len(_CODE)] + _DESCRIPTION)
        os.replace(new, path)
    _remove_beyond(store, limit)
    return replace(code, path=path)


def _describe(selection: Selection, code: StoredCode) -> StoredCode:
    files = [entry for entry in selection.entries if stat.S_ISREG(entry.mode)]
    # Those with long names are named after keys, others have only two characters of one.
    folders = sorted({os.path.dirname(entry.name) for entry in files}, key=len, reverse=True)
    return replace(
        code,
        files=len(files),
        bytes=sum(entry.size for entry in files),
        kernels=sum(entry.name.endswith(_KERNELS) for entry in files),
        paths=tuple(folders[:_SAMPLES]),
    )


def _remove_beyond(store: str, limit: int) -> None:
    total = 0
    for code in reversed(list_stored_code(store)):
        total += code.bytes
        if total > limit:
            remove_stored_code(code.path)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextmanager
def make_scratch(folder: str) -> Iterator[str]:
    """Make a directory in another one, which is made if need be, and remove it after the block."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=".new-", dir=folder)
    try:
        yield scratch
    finally:
        removal.delete_as_far_as_possible(scratch)
