"""Small real distributions for the tests, written byte for byte.

``make_wheel`` writes a correct wheel; the functions in ``DAMAGED`` write one that is wrong in
exactly one way. The bytes depend on the arguments alone, so digests are the same on every run.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

EPOCH = (2020, 1, 1, 0, 0, 0)
REGULAR = (stat.S_IFREG | 0o644) << 16
PROGRAM = (stat.S_IFREG | 0o755) << 16
Content = bytes | str


@dataclass(frozen=True, kw_only=True)
class Member:
    name: str
    data: bytes  # its bytes; a link's target for a link
    attributes: int = REGULAR  # the zip's: the file type and mode, shifted as Unix writers do
    method: int = zipfile.ZIP_DEFLATED  # how it is compressed


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A wheel before it becomes a file."""

    filename: str
    dist_info: str  # the name of its ``.dist-info`` directory
    members: tuple[Member, ...]  # everything but RECORD

    def with_members(self, *more: Member) -> Parts:
        return replace(self, members=(*self.members, *more))

    def record(self, algorithm: str = "sha256") -> list[list[str]]:
        """RECORD's rows for these members, true ones."""
        rows = [[m.name, _hash(m.data, algorithm), str(len(m.data))] for m in self.members]
        return [*rows, [f"{self.dist_info}/RECORD", "", ""]]

    def write(self, folder: Path, rows: Iterable[Iterable[str]] | bytes | None = None) -> Path:
        """Write the wheel, with a true RECORD or with the rows or bytes given."""
        if not isinstance(rows, bytes):
            table = io.StringIO()
            written = csv.writer(table, lineterminator="\n")
            written.writerows(self.record() if rows is None else rows)
            rows = table.getvalue().encode()
        record = Member(name=f"{self.dist_info}/RECORD", data=rows)
        return write_zip(folder / self.filename, (*self.members, record))


def parts(
    name: str,
    version: str = "1.0",
    *,
    files: Mapping[str, Content] | None = None,
    requires: Iterable[str] = (),
    entry_points: str = "",
    scripts: Mapping[str, Content] | None = None,
    data: Mapping[str, Content] | None = None,
    tag: str = "py3-none-any",
    metadata_extra: str = "",
    spelled: str | None = None,
) -> Parts:
    """A correct wheel's parts; ``data`` is by ``scheme/path``, ``spelled`` for file names."""
    stem = f"{spelled or escaped(name)}-{version}"
    info = f"{stem}.dist-info"
    if files is None:
        files = {f"{escaped(name)}/__init__.py": f"VERSION = {version!r}\n"}
    members = [Member(name=path, data=as_bytes(content)) for path, content in files.items()]
    for path, content in (data or {}).items():
        members.append(Member(name=f"{stem}.data/{path}", data=as_bytes(content)))
    for path, content in (scripts or {}).items():
        full = f"{stem}.data/scripts/{path}"
        members.append(Member(name=full, data=as_bytes(content), attributes=PROGRAM))
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    metadata = "\n".join([*lines, *metadata_extra.splitlines()]) + "\n"
    pure = "true" if tag.endswith("-none-any") else "false"
    about = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    members.append(Member(name=f"{info}/METADATA", data=metadata.encode()))
    members.append(Member(name=f"{info}/WHEEL", data=about.encode()))
    if entry_points:
        members.append(Member(name=f"{info}/entry_points.txt", data=entry_points.encode()))
    return Parts(filename=f"{stem}-{tag}.whl", dist_info=info, members=tuple(members))


def make_wheel(folder: Path, name: str, version: str = "1.0", **options: object) -> Path:
    return parts(name, version, **options).write(folder)  # type: ignore[arg-type]


def write_zip(path: Path, members: Iterable[Member]) -> Path:
    """Write members as they are given, whatever their names, types and order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.filterwarnings("ignore", message="Duplicate name")  # one of the damages is that
        for member in members:
            info = zipfile.ZipInfo(member.name, date_time=EPOCH)
            info.filename = member.name  # ZipInfo tidies names; a hostile one must stay as it is
            info.create_system = 3  # Unix, whose modes external_attr holds
            info.external_attr = member.attributes
            info.compress_type = member.method
            archive.writestr(info, member.data)
    return path


def without_compression(folder: Path) -> None:
    """Write each wheel anew: compressed bytes depend on the zlib at hand, and digests on them."""
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            members = [(info, archive.read(info)) for info in archive.infolist()]
        with zipfile.ZipFile(path, "w") as archive:
            for info, data in members:
                archive.writestr(info, data, zipfile.ZIP_STORED)


def escaped(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def as_bytes(content: Content) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _hash(data: bytes, algorithm: str = "sha256") -> str:
    digest = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=")
    return f"{algorithm}={digest.decode()}"


# --- wheels that are wrong in one way ------------------------------------------------------------


_BAD, _GHOST = parts("bad"), ["bad/ghost.py", _hash(b""), "0"]
_EXTRA = Member(name="bad/extra.py", data=b"X = 1\n")


def truncated(folder: Path) -> Path:
    """Cut in the middle: the zip's directory, at the end, is gone."""
    wheel = make_wheel(folder, "bad")
    os.truncate(wheel, wheel.stat().st_size // 2)
    return wheel


def _no_record(folder: Path) -> Path:
    return write_zip(folder / _BAD.filename, _BAD.members)


def _in_first_row(column: int, change: Callable[[str], str]) -> Callable[[Path], Path]:
    """A wheel whose RECORD says something else of its module."""

    def write(folder: Path) -> Path:
        rows = _BAD.record()
        rows[0][column] = change(rows[0][column])
        return _BAD.write(folder, rows)

    return write


def _with(name: str, data: bytes = b"X = 1\n", kind: int = stat.S_IFREG) -> Callable[..., Path]:
    """A wheel with one hostile member, which RECORD lists truly."""
    member = Member(name=name, data=data, attributes=(kind | 0o777) << 16)
    return lambda folder: _BAD.with_members(member).write(folder)


def _duplicated(folder: Path) -> Path:
    """Two members have the same name; RECORD is true of the second, which zip readers return."""
    first = replace(_BAD.members[0], data=b"VERSION = 'shadowed'\n")
    return replace(_BAD, members=(first, *_BAD.members)).write(folder, _BAD.record())


DAMAGED: Mapping[str, Callable[[Path], Path]] = {
    "truncated": truncated,
    "no-record": _no_record,
    "wrong-hash": _in_first_row(1, lambda _: _hash(b"something else")),
    "wrong-size": _in_first_row(2, lambda size: str(int(size) + 1)),
    "unlisted": lambda folder: _BAD.with_members(_EXTRA).write(folder, _BAD.record()),
    "missing": lambda folder: _BAD.write(folder, [_GHOST, *_BAD.record()]),
    "parent": _with("../escaped.py"),
    "inner-parent": _with("bad/../../escaped.py"),
    "absolute": _with("/tmp/escaped.py"),
    "symlink": _with("bad/link.py", b"/etc/passwd", stat.S_IFLNK),
    "device": _with("bad/null", b"", stat.S_IFCHR),
    "fifo": _with("bad/pipe", b"", stat.S_IFIFO),
    "duplicated": _duplicated,
    "wrong-dist-info": lambda folder: replace(parts("other"), filename=_BAD.filename).write(folder),
}


# --- a standard set ------------------------------------------------------------------------------


def standard_set(folder: Path) -> list[Path]:
    """Wheels for the ordinary cases, resolvable among themselves.

    ``alpha`` 1.0 needs ``beta>=1.1`` (1.0, 1.1 and 2.0 exist); ``My.Odd_Name`` needs normalizing;
    ``ns-one`` and ``ns-two`` share the namespace ``shared_ns``; ``pth-pkg`` installs a ``.pth``;
    ``cli-tool`` has console and GUI entry points; ``schemes`` fills every ``.data`` scheme.
    """
    return [
        make_wheel(folder, "alpha", requires=["beta>=1.1"]),
        *(make_wheel(folder, "beta", version) for version in ("1.0", "1.1", "2.0")),
        make_wheel(folder, "My.Odd_Name", spelled="My.Odd_Name"),
        make_wheel(folder, "ns-one", files={"shared_ns/one/__init__.py": "WHO = 'one'\n"}),
        make_wheel(folder, "ns-two", files={"shared_ns/two/__init__.py": "WHO = 'two'\n"}),
        make_wheel(
            folder,
            "pth-pkg",
            files={
                "pth_pkg.pth": "pth_extra\nimport os; os.environ['PTH_PKG_RAN'] = '1'\n",
                "pth_extra/from_pth.py": "VALUE = 'reached through a .pth'\n",
            },
        ),
        make_wheel(
            folder,
            "cli-tool",
            files={"cli_tool.py": "def main():\n    print('cli-tool ran')\n    return 0\n"},
            entry_points="[console_scripts]\ncli-tool = cli_tool:main\n\n"
            "[gui_scripts]\ncli-tool-gui = cli_tool:main\n",
        ),
        make_wheel(
            folder,
            "schemes",
            files={"schemes/__init__.py": ""},
            data={
                "purelib/schemes_pure.py": "WHERE = 'purelib'\n",
                "platlib/schemes_plat.py": "WHERE = 'platlib'\n",
                "headers/schemes.h": "#define SCHEMES 1\n",
                "data/share/schemes/note.txt": "a data file\n",
            },
            scripts={
                "schemes-script": "#!python\nimport sys\nprint('schemes', sys.prefix)\n",
                "schemes-shell": "#!/bin/sh\necho schemes-shell\n",
            },
        ),
    ]
