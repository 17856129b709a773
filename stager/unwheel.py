"""Turning one wheel into the files of a layer, through the ``installer`` library.

``installer`` decides what goes where (purelib, platlib, scripts, headers, data, entry points); this
module is its destination, and refuses a wheel that lies about itself before anything is published.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import marshal
import os
import posixpath
import stat
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import installer
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import Hash, RecordEntry, parse_record_file
from installer.sources import WheelContentElement, WheelFile
from installer.utils import Scheme, construct_record_file

from bundle.layer import LayerError, check_path

from .errors import WheelError
from .layerfile import LayerWriter
from .model import Target

RESERVED = (
    "pyvenv.cfg",
    "pkgs",
    "project",
    "assets",
    ".stager",
    "lib64",
    "bin/python",
    "bin/python3",
)
"""Names in an environment that no wheel may provide."""

_LAUNCHER = """\
#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/{python}" "$0" "$@"
' '''
"""
"""Found through its own place, so the environment can lie anywhere; sh runs the second line, Python
reads lines two and three as a string."""

_ENTRY_POINT = """\
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({attr}())
"""

_UNCHECKED_HASH = 0b01
"""The pyc flag word of PEP 552 for "has a source hash, never check it"."""


def add_wheel(writer: LayerWriter, wheel: Path, target: Target) -> None:
    """Add everything a wheel installs, with compiled bytecode, to a layer.

    Args:
        writer: the layer being made.
        wheel: the wheel file; its own digest has been checked before.
        target: whose directory names to use.

    Raises:
        WheelError: the file is no sound wheel; every fault found is in the context.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            _refuse_members(wheel, archive)
            source = _CheckedWheel(archive)
            source.check_names()
            destination = _LayerDestination(writer, source, target)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # __pycache__ members are skipped
                installer.install(source, destination, {"INSTALLER": b"stager\n"})
    except WheelError as exc:
        raise WheelError(
            f"{wheel.name}: {exc.message}",
            hint=exc.hint or "the wheel is damaged or unsafe; ask its publisher for a sound one",
            context=exc.context,
        ) from exc
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as exc:
        raise WheelError(
            f"{wheel.name}: the archive is damaged or cut short ({exc})",
            hint="delete it and run `stager build` again to download it afresh",
        ) from exc
    except (InstallerError, ValueError, KeyError) as exc:
        raise WheelError(
            f"{wheel.name}: not a valid wheel ({exc})",
            hint="ask its publisher for a sound one, or choose another version",
        ) from exc


class _CheckedWheel(WheelFile):
    """A wheel whose members are compared with RECORD while they are read, in one pass."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        super().__init__(archive)
        self.record: RecordEntry | None = None
        """RECORD's line for the member that is being read."""

    def check_names(self) -> None:
        """Compare the names in RECORD with those in the archive.

        Raises:
            WheelError: there is no RECORD, or the two lists differ.
        """
        if "RECORD" not in self.dist_info_filenames:
            raise WheelError("there is no RECORD in the wheel")
        try:
            self.validate_record(validate_contents=False)
        except InstallerError as exc:
            issues = getattr(exc, "issues", [str(exc)])
            raise WheelError("RECORD does not describe the wheel", context=issues) from exc
        listed = {line[0] for line in parse_record_file(self.read_dist_info("RECORD").splitlines())}
        absent = sorted(listed.difference(self._zipfile.namelist()))
        if absent:
            lines = [f"RECORD lists {name}, which is not in the wheel" for name in absent]
            raise WheelError("RECORD does not describe the wheel", context=lines)

    def get_contents(self) -> Iterator[WheelContentElement]:
        for element in super().get_contents():
            path, digest, size = element[0]
            self.record = RecordEntry.from_elements(path, digest, size) if digest else None
            yield element
        self.record = None


class _LayerDestination(WheelDestination):
    """Where ``installer`` writes: into a layer, under the directory names of the target."""

    def __init__(self, writer: LayerWriter, source: _CheckedWheel, target: Target) -> None:
        self._writer = writer
        self._source = source
        self._python = f"python{target.python}"
        self._target = target
        site = f"lib/{self._python}/site-packages"
        self._places = {
            "purelib": site,
            "platlib": site,
            "scripts": "bin",
            "headers": f"include/site/{self._python}/{source.distribution}",
            "data": "",
        }
        self._compiled: list[tuple[Scheme, RecordEntry]] = []

    def write_script(self, name: str, module: str, attr: str, section: str) -> RecordEntry:
        """Write the program of one entry point (``console`` or ``gui``: the same on Linux)."""
        if "/" in name:
            raise WheelError(f"the entry point {name!r} has a slash in its name")
        code = _ENTRY_POINT.format(module=module, attr=attr, first=attr.split(".", maxsplit=1)[0])
        data = (_LAUNCHER.format(python=self._python) + code).encode()
        return self._add(Scheme("scripts"), name, io.BytesIO(data), executable=True)

    def write_file(
        self, scheme: Scheme, path: str | os.PathLike[str], stream: BinaryIO, is_executable: bool
    ) -> RecordEntry:
        """Write one member, compare it with RECORD, and compile it if it is a module."""
        path = os.fspath(path)
        record, self._source.record = self._source.record, None
        rewritten = False
        if scheme == "scripts" or path.endswith(".py"):
            data = stream.read()
            if record is not None and not record.validate(data):
                raise _mismatch(record)
            record = None
            if scheme == "scripts":
                data, rewritten = self._relocate(data)
            elif scheme in ("purelib", "platlib"):
                self._add_bytecode(scheme, path, data)
            stream = io.BytesIO(data)
        executable = is_executable or rewritten or scheme == "scripts"
        entry = self._add(scheme, path, stream, executable=executable, record=record)
        return entry

    def finalize_installation(
        self,
        scheme: Scheme,
        record_file_path: str,
        records: object,
    ) -> None:
        """Write the installed RECORD, bytecode included, so that other tools can read it."""
        if not isinstance(records, list):
            raise WheelError("installer gave no list of records")
        site = self._places["purelib"]
        prefixes = {
            name: None if place == site else posixpath.relpath(place or ".", site) + "/"
            for name, place in self._places.items()
        }
        lines = construct_record_file([*records, *self._compiled], prefixes.__getitem__)
        self._writer.add(self._path(scheme, record_file_path), lines)

    def _add(
        self,
        scheme: Scheme,
        path: str,
        stream: BinaryIO,
        *,
        executable: bool,
        record: RecordEntry | None = None,
    ) -> RecordEntry:
        added = self._writer.add(self._path(scheme, path), stream, executable=executable)
        found = RecordEntry(path, _record_hash(added.sha256), added.size)
        if record is not None:
            same_size = record.size is None or record.size == found.size
            if not same_size or record.hash_ is None or record.hash_.name != "sha256":
                raise _mismatch(record)
            if found.hash_ is None or record.hash_.value != found.hash_.value:
                raise _mismatch(record)
        return found

    def _path(self, scheme: Scheme, path: str) -> str:
        full = posixpath.join(self._places[scheme], path)
        for name in RESERVED:
            if full == name or full.startswith(f"{name}/"):
                raise WheelError(f"it would overwrite {name} of the environment with {path}")
        if full.startswith("bin/python"):
            raise WheelError(f"it would overwrite the environment's interpreter with {path}")
        return full

    def _relocate(self, data: bytes) -> tuple[bytes, bool]:
        """Replace a script's ``#!python`` line by one that finds the environment it lies in."""
        first, _, rest = data.partition(b"\n")
        if not first.startswith((b"#!python", b"#!pythonw")):
            return data, False
        return _LAUNCHER.format(python=self._python).encode() + rest, True

    def _add_bytecode(self, scheme: Scheme, path: str, source: bytes) -> None:
        bytecode = compile_module(source, path) if self._target.is_host_python else None
        if bytecode is None:
            return
        cached = bytecode_path(path, self._target)
        self._writer.add(self._path(scheme, cached), io.BytesIO(bytecode))
        self._compiled.append((scheme, RecordEntry(cached, None, None)))


def bytecode_path(path: str, target: Target) -> str:
    """Where the interpreter of a target looks for a module's bytecode (PEP 3147)."""
    folder, name = posixpath.split(path)
    tag = f"cpython-{target.python.replace('.', '')}"
    return posixpath.join(folder, "__pycache__", f"{name.removesuffix('.py')}.{tag}.pyc")


def compile_module(source: bytes, path: str) -> bytes | None:
    """The content of an *unchecked hash-based* pyc (PEP 552), or None for what does not compile.

    Such a pyc is used whatever the times on the node are; a stale time would recompile every module
    in every rank. The path inside is replaced by the real one when the module is imported.
    """
    _intern_characters()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(source, path, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # templates and Python 2 files; pip leaves these alone too
    header = importlib.util.MAGIC_NUMBER + struct.pack("<I", _UNCHECKED_HASH)
    return header + importlib.util.source_hash(source) + marshal.dumps(code)


@functools.cache
def _intern_characters() -> None:
    """Make marshal's output independent of what this process compiled before.

    Python up to 3.11 shares one object for each one-character string, and marshal writes it another
    way once anything has interned it. So all are interned, at once and for good.
    """
    for code in range(256):
        sys.intern(chr(code))


def _refuse_members(wheel: Path, archive: zipfile.ZipFile) -> None:
    """Look at every member before any is read, and report all that are wrong at once."""
    faults, seen = [], set()
    for member in archive.infolist():
        name = member.filename.rstrip("/") if member.is_dir() else member.filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        try:
            check_path(name)
        except LayerError as exc:
            faults.append(str(exc))
        if "\\" in member.filename:
            faults.append(f"backslash in {member.filename!r}")
        if member.filename in seen:
            faults.append(f"{member.filename} is there twice")
        seen.add(member.filename)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            what = "symbolic link" if kind == stat.S_IFLNK else "device or special file"
            faults.append(f"{member.filename} is a {what}")
        if member.flag_bits & 0x1:
            faults.append(f"{member.filename} is encrypted")
    if faults:
        raise WheelError(
            "the archive has members that no wheel may have",
            hint=f"do not use this file; remove {wheel}",
            context=faults,
        )


def _mismatch(record: RecordEntry) -> WheelError:
    return WheelError(f"{record.path} does not have the size and hash that RECORD gives")


def _record_hash(sha256: bytes) -> Hash:
    return Hash("sha256", base64.urlsafe_b64encode(sha256).decode().rstrip("="))
