"""Turning one wheel into the files of a layer: ``installer`` decides where each file goes."""

from __future__ import annotations

import base64
import binascii
import configparser
import contextlib
import csv
import errno
import importlib.util
import io
import os
import posixpath
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import installer
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import Hash, InvalidRecordEntry, RecordEntry, parse_record_file
from installer.sources import WheelContentElement, WheelFile
from installer.utils import Scheme, construct_record_file, parse_entrypoints

from bundle.environment.listing import HOOK, OWN_PYTHON
from bundle.format.layer import explain_excess
from bundle.regex import compile_lazily

from ..core.errors import WheelError
from ..core.values import Target
from .bytecode import CompiledModules, bytecode_path, compile_module, is_worth_compiling
from .layer_file import LayerWriter, Unread
from .prune import NOTE, encode_note, list_left_out
from .wheel_members import DAMAGED, LARGE, METHODS, ChangedMemberError, LargeMember, refuse_members

# --- The lines of a wheel's RECORD: what each member must be (the binary distribution format) ----

_MISMATCH = "does not have the size and hash that RECORD gives"


def _hash_name(record: RecordEntry | None) -> str:
    return record.hash_.name if record is not None and record.hash_ is not None else ""


def _decode_sha256(record: RecordEntry) -> bytes | None:
    value = record.hash_.value if record.hash_ is not None else ""
    try:
        raw = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except (binascii.Error, ValueError):
        return None
    return raw if record_hash(raw).value == value else None


def _describe_mismatch(record: RecordEntry) -> str:
    return f"{record.path} {_MISMATCH}"


def record_hash(sha256: bytes) -> Hash:
    """Return a raw sha256 as RECORD writes it."""
    return Hash("sha256", base64.urlsafe_b64encode(sha256).decode().rstrip("="))


# --- The programs in an environment's ``bin``: those of entry points, and scripts of wheels ------

_LAUNCHER = """\
#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/{python}" "$0" "$@"
' '''
"""
"""Finds Python relative to the script, so the environment can lie anywhere; sh runs line two,
Python reads lines two and three as a string."""

_STARTER = """\
#!/bin/sh
here="$(dirname -- "$(realpath -- "$0")")"
exec "$here/{python}" "$here/../{script}" "$@"
"""
"""Starts a script that lies elsewhere as it is."""

_ENTRY_POINT = """\
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({attr}())
"""

_NOT_BELOW = compile_lazily(  # means something else, or nothing, below lines for a shell
    rb"\A[ \t\f]*#[^\n]*?coding[:=][ \t]*(?![uU][tT][fF][-_]?8)|__doc__|^from __future__ ",
    re.MULTILINE,
)
_NO_FUNCTION = compile_lazily(r"[^\[#;=]+=\s*[\w.]+\s*(\[.*\])?\s*")  # a module alone


def _relocate_script(python: str, data: bytes, elsewhere: str) -> tuple[bytes, bool]:
    first, _, rest = data.partition(b"\n")
    if not first.startswith(b"#!python"):  # ``#!pythonw`` too
        return data, False
    if _NOT_BELOW.search(rest):
        return _STARTER.format(python=python, script=elsewhere).encode(), True
    return _LAUNCHER.format(python=python).encode() + rest, False


def _read_entry_point_names(text: str) -> set[str]:
    try:
        return {name for name, _, _, _ in parse_entrypoints(text)}
    except AssertionError as exc:
        raise WheelError(
            "an entry point names no function (module:function)",
            hint="ask its publisher for another version; its program could not start",
            context=[line.strip() for line in text.splitlines() if _NO_FUNCTION.fullmatch(line)],
        ) from exc


RESERVED = ("pyvenv.cfg", ".stager")  # names in an environment that no wheel may provide
SHARED = ("project", "assets", OWN_PYTHON)  # a wheel may add files to these directories
_PROGRAMS = compile_lazily(r"bin/python(\d+(\.\d+)*)?")  # the environment's own programs
_SCRIPTS = "libexec"  # the directory of scripts that cannot begin with lines for a shell

_WRITE_RECORD = (  # pip and uv do not compare a wheel with its RECORD
    "ask its publisher for a correct one; or, if you trust this one, let `wheel unpack` and `wheel "
    "pack` write its RECORD anew, and name the new file in environment.requirements"
)

_HASHES = ("sha256", "sha384", "sha512")  # "sha256 or better", says the format

_INVALID = (InstallerError, InvalidRecordEntry, configparser.Error, csv.Error, ValueError, KeyError)


def add_wheel(
    writer: LayerWriter,
    wheel: Path,
    target: Target,
    prune: Sequence[str] = (),
    modules: CompiledModules | None = None,
) -> None:
    """Add everything a wheel installs, with compiled bytecode, to a layer."""
    with _convert_errors(wheel), zipfile.ZipFile(wheel) as archive:
        source = _CheckedWheel(archive)
        refuse_members(wheel, archive, source.data_dir)
        source.check_names()
        source.left_out = list_left_out(archive, prune)
        metadata = {"INSTALLER": b"stager\n"}
        if source.left_out:
            metadata[NOTE] = encode_note(archive, source.left_out, prune)
        source.left_out |= source.find_shadowed_scripts()
        destination = _LayerDestination(writer, source, target, modules)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # __pycache__ members are skipped
            installer.install(source, destination, metadata)
        destination.refuse_faults()


@contextlib.contextmanager
def _convert_errors(wheel: Path) -> Iterator[None]:
    try:
        yield
    except WheelError as exc:
        raise WheelError(
            f"{wheel.name}: {exc.message}",
            hint=exc.hint or "the wheel is damaged or unsafe; ask its publisher for a correct one",
            context=exc.context,
        ) from exc
    except (*DAMAGED, OSError) as exc:
        # A place before the file's beginning, what bz2 cannot read, a disk that cannot be read.
        if isinstance(exc, OSError) and exc.errno not in (errno.EINVAL, None, errno.EIO):
            raise
        raise WheelError(
            f"{wheel.name}: the archive is damaged or cut short ({exc})",
            hint=f"remove {wheel} and run `stager build` again to download it again",
        ) from exc
    except _INVALID as exc:
        reason = str(exc) or type(exc).__name__
        raise WheelError(
            f"{wheel.name}: not a valid wheel ({reason})",
            hint="ask its publisher for an intact one, or choose another version",
        ) from exc


class _CheckedWheel(WheelFile):
    """A wheel that remembers RECORD's line for the member being read, to compare it in one pass."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        super().__init__(archive)
        self.record: RecordEntry | None = None  # RECORD's line for the member being read
        self.large: LargeMember | None = None  # the member being read, if it can be read later
        self.left_out: frozenset[str] = frozenset()  # members that are not to be installed

    def check_names(self) -> None:
        if "RECORD" not in self.dist_info_filenames:
            raise WheelError("there is no RECORD in the wheel")
        lines = self.read_dist_info("RECORD").splitlines()
        listed = {line[0] for line in parse_record_file(lines)}
        missing = sorted(listed.difference(self._zipfile.namelist()))
        faults = [f"{name} is in RECORD but not in the wheel" for name in missing]
        try:
            self.validate_record(validate_contents=False)
        except InstallerError as exc:
            issues = getattr(exc, "issues", [str(exc)])
            faults += [issue.removeprefix(f"In {self._zipfile.filename}, ") for issue in issues]
        if faults:
            raise WheelError(
                "RECORD does not describe the wheel", hint=_WRITE_RECORD, context=faults
            )

    def find_shadowed_scripts(self) -> frozenset[str]:
        """Return the scripts that an entry point of the same name replaces, as with pip and uv."""
        if "entry_points.txt" not in self.dist_info_filenames:
            return frozenset()
        names = _read_entry_point_names(self.read_dist_info("entry_points.txt"))
        return frozenset(f"{self.data_dir}/scripts/{name}" for name in names)

    def get_contents(self) -> Iterator[WheelContentElement]:
        for element in super().get_contents():
            path, digest, size = element[0]
            if path in self.left_out:
                continue
            self.record = RecordEntry.from_elements(path, digest, size) if digest else None
            self.large = self._large(self.record)
            yield element
        self.record = self.large = None

    def _large(self, record: RecordEntry | None) -> LargeMember | None:
        if record is None or _hash_name(record) != "sha256":
            return None
        info, digest = self._zipfile.getinfo(record.path), _decode_sha256(record)
        if info.file_size < LARGE or info.compress_type not in METHODS or digest is None:
            return None
        wheel = Path(self._zipfile.filename or "")
        return LargeMember(wheel=wheel, member=info, size=info.file_size, sha256=digest)


class _LayerDestination(WheelDestination):
    def __init__(
        self,
        writer: LayerWriter,
        source: _CheckedWheel,
        target: Target,
        modules: CompiledModules | None,
    ) -> None:
        self._writer = writer
        self._source = source
        self._modules = modules
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
        self._pending: list[tuple[Scheme, str, bytes]] = []
        self._compiled: list[tuple[Scheme, RecordEntry]] = []
        self._faults: list[str] = []

    def refuse_faults(self) -> None:
        hint = _WRITE_RECORD * all(fault.endswith(_MISMATCH) for fault in self._faults)
        if len(self._faults) == 1:
            raise WheelError(self._faults[0], hint=hint)
        if self._faults:
            many = f"{len(self._faults)} members cannot be trusted"
            raise WheelError(many, hint=hint, context=self._faults)

    def write_script(self, name: str, module: str, attr: str, section: str) -> RecordEntry:
        """Write the program of one entry point (``console`` or ``gui``: the same on Linux)."""
        if "/" in name:
            self._faults.append(f"the entry point {name!r} has a slash in its name")
            return RecordEntry(name, None, None)
        first = attr.partition(".")[0]
        code = _ENTRY_POINT.format(module=module, attr=attr, first=first)
        data = (_LAUNCHER.format(python=self._python) + code).encode()
        return self._add(Scheme("scripts"), name, io.BytesIO(data), executable=True)

    def write_file(
        self, scheme: Scheme, path: str | os.PathLike[str], stream: BinaryIO, is_executable: bool
    ) -> RecordEntry:
        path = os.fspath(path)
        record, self._source.record = self._source.record, None
        algorithm = _hash_name(record)
        if algorithm and algorithm not in _HASHES:
            fault = f"{path}: RECORD has only its {algorithm}, which is not a secure hash"
            self._faults.append(fault)
            return RecordEntry(path, None, None)
        # A file is read as a whole only to change it, to compile it or to compute another hash.
        if scheme == "scripts" or path.endswith(".py") or algorithm in _HASHES[1:]:
            return self._add_whole(scheme, path, stream.read(), record, is_executable)
        if record is not None and self._source.large is not None:
            return self._add_large(scheme, path, record, executable=is_executable)
        return self._add(scheme, path, stream, executable=is_executable, record=record)

    def _add_whole(
        self, scheme: Scheme, path: str, data: bytes, record: RecordEntry | None, executable: bool
    ) -> RecordEntry:
        if record is not None and not record.validate(data):
            self._faults.append(_describe_mismatch(record))
        if scheme == "scripts":
            return self._add_script(path, data)
        entry = self._add(scheme, path, io.BytesIO(data), executable=executable)
        if entry.hash_ is not None:
            self._add_bytecode(scheme, path, data)
        return entry

    def finalize_installation(self, scheme: Scheme, record_file_path: str, records: object) -> None:
        """Write the installed RECORD, bytecode included, so that other tools can read it."""
        if not isinstance(records, list):
            raise WheelError("installer returned no list of records")
        for module_scheme, path, digest in self._pending:
            if self._modules is not None:
                self._keep_bytecode(module_scheme, path, self._modules.take(path, digest))
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
        content: BinaryIO | Unread,
        *,
        executable: bool,
        record: RecordEntry | None = None,
    ) -> RecordEntry:
        try:
            full = self._path(scheme, path)
            size, digest = self._writer.add(full, content, executable=executable)
        except WheelError as exc:
            self._faults.append(exc.message)
            return RecordEntry(path, None, None)
        entry = RecordEntry(path, record_hash(digest), size)
        if record is not None and (record.hash_, record.size) != (entry.hash_, entry.size):
            self._faults.append(_describe_mismatch(record))
        return entry

    def _add_large(
        self, scheme: Scheme, path: str, record: RecordEntry, *, executable: bool
    ) -> RecordEntry:
        member = self._source.large
        if member is None or record.size not in (None, member.size):
            self._faults.append(_describe_mismatch(record))
            return RecordEntry(path, None, None)

        def chunks(length: int) -> Iterator[bytes | bytearray]:
            with _convert_errors(member.wheel):
                try:
                    yield from member.chunks(length)
                except ChangedMemberError:
                    raise WheelError(_describe_mismatch(record)) from None

        content = Unread(member.size, member.sha256, chunks, member.dense)
        return self._add(scheme, path, content, executable=executable)

    def _path(self, scheme: Scheme, path: str) -> str:
        full = posixpath.join(self._places[scheme], path)
        site = self._places["purelib"]
        for link, target in (("lib64/", "lib/"), ("pkgs/", f"{site}/")):
            if full.startswith(link):
                full = target + full.removeprefix(link)
        top = full.partition("/")[0]
        if top in RESERVED or full in (*SHARED, "lib64", "pkgs"):
            raise WheelError(f"it would overwrite {top} of the environment with {path}")
        if _PROGRAMS.fullmatch(full) or full.startswith(posixpath.join(site, HOOK)):
            raise WheelError(f"{path} would overwrite a part of the environment itself")
        return full

    def _add_script(self, path: str, data: bytes) -> RecordEntry:
        elsewhere = posixpath.join(_SCRIPTS, path)
        program, is_elsewhere = _relocate_script(self._python, data, elsewhere)
        if is_elsewhere:
            entry = self._add(Scheme("data"), elsewhere, io.BytesIO(data), executable=False)
            self._compiled.append((Scheme("data"), entry))
        return self._add(Scheme("scripts"), path, io.BytesIO(program), executable=True)

    def _add_bytecode(self, scheme: Scheme, path: str, source: bytes) -> None:
        is_module = path.endswith(".py") and scheme in ("purelib", "platlib")
        if not is_module or not is_worth_compiling(path):
            return
        if self._modules is not None and path in self._modules:
            self._pending.append((scheme, path, importlib.util.source_hash(source)))
        elif self._target.is_host_python:
            self._keep_bytecode(scheme, path, compile_module(source, path))

    def _keep_bytecode(self, scheme: Scheme, path: str, bytecode: bytes | None) -> None:
        if bytecode is None:
            return
        cached = bytecode_path(path, self._target)
        if explain_excess(self._path(scheme, cached)):
            return  # Python does not write it either if its name is too long for a file system
        self._writer.add(self._path(scheme, cached), io.BytesIO(bytecode))
        self._compiled.append((scheme, RecordEntry(cached, None, None)))
