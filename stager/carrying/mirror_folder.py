"""The folder of a mirror: its wheels, and the pages of the index that lists them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from urllib.parse import quote

from packaging.metadata import parse_email
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, NormalizedName, parse_wheel_filename
from packaging.version import Version

from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest
from bundle.regex import compile_lazily

from ..core.errors import SpaceError, StagerError, WheelError
from ..core.files import open_regular, read_bytes, read_text, replace_file
from ..core.store import CHUNK
from ..core.values import Wheel
from ..layers.wheel_members import UNREADABLE, read_beginning

_LARGEST_METADATA = 16 << 20  # bytes; no real package has a longer description
_MEMBER = compile_lazily(r"[^/]+\.dist-info/METADATA")


@dataclass(frozen=True, kw_only=True)
class ListedWheel:
    """A wheel of a mirror."""

    filename: str
    name: NormalizedName
    version: Version
    sha256: Digest
    size: int
    metadata: bytes
    requires_python: str  # the versions of Python it is for; empty where it does not say


def describe_wheel(path: Path, sha256: Digest) -> ListedWheel:
    """Return what an index says of a wheel whose digest is known."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as exc:
        raise ValueError(f"{path.name}: this is not the name of a wheel: {exc}") from None
    try:
        metadata = _metadata(path)
        size = path.stat().st_size
    except UNREADABLE as exc:
        raise ValueError(f"{path.name}: it cannot be read as a wheel: {exc}") from None
    raw, _ = parse_email(metadata)
    specifier = SpecifierSet()  # an installer would refuse one that is not valid
    with contextlib.suppress(InvalidSpecifier):
        specifier = SpecifierSet(raw.get("requires_python", ""))
    return ListedWheel(
        filename=path.name,
        name=name,
        version=version,
        sha256=sha256,
        size=size,
        metadata=metadata,
        requires_python=str(specifier),
    )


def _metadata(path: Path) -> bytes:
    with open_regular(path) as handle, zipfile.ZipFile(handle) as archive:
        members = list(filter(_MEMBER.fullmatch, archive.namelist()))
        if len(members) != 1:
            raise ValueError("it has no METADATA file, or more than one")
        metadata = read_beginning(archive, members[0], _LARGEST_METADATA + 1)
    if len(metadata) > _LARGEST_METADATA:
        raise ValueError("its METADATA file is too large")
    return metadata


# --- The pages of a package index as text: HTML (PEP 503) and JSON (PEP 691), for the same wheels

# All links are relative. Both forms name the METADATA file beside each wheel (PEP 658), in the
# spelling of PEP 714 alone: pip 22.3 to 23.1, as in Debian 12, reads the older one and then finds
# no wheel whose name is not normalised.

_API = "1.1"  # the version of both forms: JSON then has sizes and versions (PEP 700)
_UP = "../../"  # the folder of the wheels, from a project's page


def make_pages(wheels: Iterable[ListedWheel]) -> Iterator[tuple[str, str]]:
    """Yield the path of each page below ``simple`` with its text, the list of projects last."""
    projects: dict[str, list[ListedWheel]] = {}
    for wheel in sorted(wheels, key=lambda wheel: (wheel.name, wheel.version, wheel.filename)):
        projects.setdefault(wheel.name, []).append(wheel)
    for name, listed in projects.items():
        yield f"{name}/index.html", _html(f"Links for {name}", map(_link, listed))
        versions = list(dict.fromkeys(str(wheel.version) for wheel in listed))
        page = {"name": name, "versions": versions, "files": list(map(_file, listed))}
        yield f"{name}/index.json", _json(page)
    links = (f'<a href="{name}/">{name}</a>' for name in projects)
    yield "index.html", _html("Simple index", links)
    yield "index.json", _json({"projects": [{"name": name} for name in projects]})


_HTML = """\
<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
<meta name="pypi:repository-version" content="{api}">
<title>{title}</title>
</head>
<body>
{links}</body>
</html>
"""


def _html(title: str, links: Iterable[str]) -> str:
    lines = "".join(f"{link}<br>\n" for link in links)
    return _HTML.format(api=_API, title=title, links=lines)


def _link(wheel: ListedWheel) -> str:
    attributes = {"data-core-metadata": f"sha256={Digest.of(wheel.metadata)}"}
    if wheel.requires_python:
        attributes["data-requires-python"] = wheel.requires_python
    written = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())
    href = escape(f"{_url(wheel)}#sha256={wheel.sha256}")
    return f'<a href="{href}"{written}>{escape(wheel.filename)}</a>'


def _file(wheel: ListedWheel) -> Mapping[str, object]:
    entry: dict[str, object] = {
        "filename": wheel.filename,
        "url": _url(wheel),
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size,
        "core-metadata": {"sha256": Digest.of(wheel.metadata)},
    }
    if wheel.requires_python:
        entry["requires-python"] = wheel.requires_python
    return entry


def _url(wheel: ListedWheel) -> str:
    return _UP + quote(wheel.filename)


def _json(page: Mapping[str, object]) -> str:
    return json.dumps({"meta": {"api-version": _API}, **page}, indent=1) + "\n"


# --- The folder of a mirror: wheels, their digests, and ``simple``, the index --------------------

# Each file appears by a rename, the wheels first and the index last: whatever interrupts that, the
# index names only what is there. No other file is touched.

MARK = "stager-mirror.txt"
SUMS = "SHA256SUMS"
INDEX = "simple"
_METADATA = ".metadata"  # the ending of a wheel's METADATA file, after the wheel's name (PEP 658)
_TEXT = f"""\
`stager mirror` keeps this folder: wheels, and an index of them. It may be copied as a whole.

    sha256sum -c {SUMS}
    pip install --index-url file:///PATH/OF/THIS/FOLDER/{INDEX} NAME
    uv pip install --default-index file:///PATH/OF/THIS/FOLDER/{INDEX} NAME
"""
_PARTIAL = compile_lazily(r"\..+\.[0-9a-f]{8}\.part")  # left by a killed process; see replace_file
_SUM = compile_lazily(r"([0-9a-f]{64}) [ *]([^/]+)")


def read_record(root: Path) -> dict[str, Digest]:
    """Return what each wheel must be, by file name."""
    path = root / SUMS
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as exc:
        raise _make_record_error(path, str(exc)) from exc
    found = list(map(_SUM.fullmatch, lines))
    bad = [f"line {number}" for number, match in enumerate(found, 1) if match is None]
    if bad:
        raise _make_record_error(path, ", ".join(bad))
    return {match[2]: Digest(match[1]) for match in found if match is not None}


def _make_record_error(path: Path, what: str) -> StagerError:
    return StagerError(
        f"{path} is damaged: {what}",
        hint="take it from another copy of the mirror; or remove it, to trust the wheels there",
    )


def write_record(root: Path, digests: Mapping[str, Digest]) -> None:
    """Write what each wheel must be."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    _write_changed(root / SUMS, "".join(lines))


def put_wheel(root: Path, wheel: Wheel) -> None:
    """Copy a wheel into the folder, in place of one that is there."""
    place = root / wheel.path.name
    state = hashlib.sha256()
    with (
        convert_write_error(place),
        replace_file(place) as target,
        open_regular(wheel.path) as source,
    ):
        while chunk := source.read(CHUNK):
            state.update(chunk)
            target.write(chunk)
        if state.hexdigest() != wheel.sha256:
            raise WheelError(
                f"{wheel.path} is damaged, or was changed just now",
                hint="remove it, and run the command again",
            )


def publish_index(root: Path, wheels: Collection[ListedWheel]) -> None:
    """Write the index of these wheels, and remove from it what is no longer there."""
    write_record(root, {wheel.filename: wheel.sha256 for wheel in wheels})
    index = root / INDEX
    metadata = {f"{wheel.filename}{_METADATA}": wheel.metadata for wheel in wheels}
    written = dict(make_pages(wheels))
    for name, data in metadata.items():
        _write_changed(root / name, data)
    for path, text in written.items():
        _write_changed(index / path, text)
    with convert_write_error(index):
        projects = [page.parent for page in index.glob("*/index.json")]
        _remove(path for path in projects if f"{path.name}/index.json" not in written)
        others = root.glob(f"*.whl{_METADATA}")
        _remove(path for path in others if path.name not in metadata)


def _write_changed(path: Path, content: str | bytes) -> None:
    """Write a file unless it has this content already: a USB stick is slow, and wears out."""
    data = content.encode() if isinstance(content, str) else content
    with convert_write_error(path):
        with contextlib.suppress(FileNotFoundError):
            if read_bytes(path) == data:
                return
        path.parent.mkdir(exist_ok=True, parents=True)
        with replace_file(path) as target:
            target.write(data)


@contextlib.contextmanager
def lock_mirror(root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Make the folder if need be, and hold it alone until the block ends."""
    refuse_other(root)
    handle = -1
    try:
        with convert_write_error(root):
            root.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(root / MARK, flags, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            _begin(root, handle)
        yield
    finally:
        if handle >= 0:
            os.close(handle)  # never removed: a lock on a removed file keeps nobody out


def refuse_other(root: Path) -> None:
    """Refuse a directory that is used for something else."""
    try:
        names = set(os.listdir(root))  # noqa: PTH208 - the names alone
    except FileNotFoundError:
        return
    except OSError as exc:
        raise StagerError(
            f"{root} cannot be used for a mirror: {exc.strerror or exc}",
            hint="name a directory that can be read and written, or a new one",
        ) from exc
    if names and MARK not in names:
        raise StagerError(
            f"{root} is not a mirror and is not empty: nothing was written there",
            hint=f"name a new or an empty directory; a mirror has a file named {MARK}",
        )


def _begin(root: Path, handle: int) -> None:
    _remove(path for path in root.rglob(".*.part") if _PARTIAL.fullmatch(path.name))
    if os.fstat(handle).st_size:
        return
    with replace_file(root / ".gitignore") as ignored:  # a project around it does not ship it
        ignored.write(b"*\n")
    os.write(handle, _TEXT.encode())


@contextlib.contextmanager
def convert_write_error(path: Path) -> Iterator[None]:
    """Turn a failure to write below a mirror into an error that says what to do."""
    try:
        yield
    except OSError as exc:
        place = exc.filename or path
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"no space left while writing {path}",
                hint="free some space there and run the command again: what is complete stays",
            ) from exc
        raise StagerError(
            f"the mirror cannot be written: {place}: {exc.strerror or exc}",
            hint="make the directory writable, or name another one",
        ) from exc


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
