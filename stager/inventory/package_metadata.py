"""The METADATA of the packages in a bundle, read from it, bounded, and made safe to print."""

from __future__ import annotations

import io
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import zstandard
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from bundle.format.archive import BundleFile
from bundle.format.layer import Entry, Index, LayerError
from bundle.format.manifest import Layer
from bundle.regex import compile_lazily

from ..core.errors import escape_line_feeds
from ..layers.layer_file import decompress_index
from ..layers.wheel_members import UNREADABLE, read_beginning

HEADERS_LIMIT = 256 << 10  # bytes of a METADATA file that are read: its fields come first
TEXT_LIMIT = 200
_REQUIREMENT_LIMIT = 1000  # characters of a requirement; what is longer is none that anybody wrote
_LIST_LIMIT = 2000  # values that are kept of a field that may be repeated
_PATH = compile_lazily(r"lib/python3\.\d+/site-packages/[^/]+\.dist-info/METADATA")
_MEMBER = compile_lazily(r"[^/]+\.dist-info/METADATA")


class PackageMetadata(NamedTuple):
    """Fields of a METADATA file; empty ones where it has none."""

    name: str = ""
    version: str = ""
    expression: str = ""
    licence: str = ""
    classifiers: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


def clean(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return a foreign text in one line of visible characters, and no longer than a limit."""
    line = escape_line_feeds(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def parse_metadata(data: bytes) -> PackageMetadata:
    """Read the beginning of a METADATA file; what is not valid in it counts as absent."""
    headers = re.split(rb"\r?\n\r?\n", data[:HEADERS_LIMIT], maxsplit=1)[0]
    raw, _ = parse_email(headers)
    licensing = (text for text in raw.get("classifiers", ()) if text.startswith("License ::"))
    needed = (text for text in raw.get("requires_dist", ()) if len(text) <= _REQUIREMENT_LIMIT)
    return PackageMetadata(
        name=clean(raw.get("name", "")),
        version=clean(raw.get("version", "")),
        expression=clean(raw.get("license_expression", "")),
        licence=raw.get("license", "").strip(),
        classifiers=tuple(map(clean, licensing))[:_LIST_LIMIT],
        requires=tuple(needed)[:_LIST_LIMIT],
    )


def read_metadata(bundle: BundleFile, layer: Layer) -> PackageMetadata:
    """Return the metadata of the package in a wheel's layer."""
    index = bundle.index(layer, bundle.head(layer), decompress_index)
    entry = next((one for one in index.files if _PATH.fullmatch(one.path)), None)
    if entry is None:
        return PackageMetadata()
    with bundle.turn_into_damage(LayerError):
        return parse_metadata(b"".join(_read_beginning(bundle, layer, index, entry)))


def read_wheel_metadata(wheel: bytes) -> PackageMetadata:
    """Return the metadata of a package from its wheel; none if the wheel cannot be read."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            name = next(filter(_MEMBER.fullmatch, archive.namelist()))
            return parse_metadata(read_beginning(archive, name, HEADERS_LIMIT))
    except (*UNREADABLE, StopIteration):
        return PackageMetadata()


def _read_beginning(
    bundle: BundleFile, layer: Layer, index: Index, entry: Entry
) -> Iterator[bytes]:
    """Yield the first bytes of a file; read only the frames that contain them."""
    end = entry.offset + min(entry.size, HEADERS_LIMIT)
    place, position = bundle.offset(layer.member), 0
    for frame in index.frames:
        start, position = position, position + frame.unpacked_size
        if start < end and position > entry.offset:
            packed = bundle.frame(place, frame.size, frame.sha256)
            content = _decompress_beginning(packed, min(end, position) - start)
            yield content[max(0, entry.offset - start) :]
        place += frame.size


def _decompress_beginning(frame: bytes, size: int) -> bytes:
    content = b""
    try:
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            while len(content) < size and (piece := reader.read(size - len(content))):
                content += piece
    except zstandard.ZstdError as exc:
        raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
    if len(content) < size:
        raise LayerError("a frame does not hold as much as promised")
    return content


_NO_LICENCE = (
    *("", "unknown", "none", "n/a", "license", "dual license", "see license", "see license file"),
)
"""Texts in the field of a licence that name none, in lower case."""
_SPDX = {
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0",
    "apache-2.0 license": "Apache-2.0",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "boost software license 1.0 (bsl-1.0)": "BSL-1.0",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "CC0-1.0",
    "gnu affero general public license v3 or later (agplv3+)": "AGPL-3.0-or-later",
    "gnu general public license v2 or later (gplv2+)": "GPL-2.0-or-later",
    "gnu general public license v3 or later (gplv3+)": "GPL-3.0-or-later",
    "gnu lesser general public license v2 or later (lgplv2+)": "LGPL-2.0-or-later",
    "gnu lesser general public license v3 or later (lgplv3+)": "LGPL-3.0-or-later",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mit no attribution license (mit-0)": "MIT-0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "mpl 2.0": "MPL-2.0",
    "the mit license": "MIT",
    "the unlicense (unlicense)": "Unlicense",
}
"""Names that mean exactly one licence of SPDX. Many classifiers do not: "BSD License", or "Apache
Software License", leave the version open (PEP 639), and stay the names that they are."""

_HUB_ID = compile_lazily(r"[\w.+-]+")  # of a licence in a hub's card; a name of its own has spaces


class Licence(NamedTuple):
    """A licence as somebody has declared it."""

    names: tuple[str, ...] = ()  # one expression of SPDX, or the names that were given
    spdx: bool = False
    field: str = ""  # ``License-Expression``, ``License``, ``Classifier`` or ``card``

    @property
    def text(self) -> str:
        """The names in one line; empty for no licence."""
        return "; ".join(self.names)


def choose_licence(metadata: PackageMetadata) -> Licence:
    """Return the licence of a package; an expression of SPDX wins wherever it is."""
    lines = list(filter(str.strip, metadata.licence.splitlines()))
    is_name = len(lines) == 1 and len(lines[0]) <= TEXT_LIMIT
    classified = [text.rpartition(" :: ")[2] for text in metadata.classifiers]
    candidates = [
        _licence("License-Expression", [metadata.expression]),
        _licence("License", lines if is_name else []),
        _licence("Classifier", [name for name in classified if name != "OSI Approved"]),
        _licence("License", lines[:1]),
    ]
    candidates.sort(key=lambda one: (not one.names, not one.spdx))
    return candidates[0]


def parse_card_licence(text: str) -> Licence:
    """Return the licence, or the licences, that the card of a model or data set names."""
    names = text.split(", ")
    return _licence("card", names if all(map(_HUB_ID.fullmatch, names)) else [text])


def _licence(field: str, texts: Sequence[str]) -> Licence:
    cleaned = [name for name in map(clean, texts) if name.lower() not in _NO_LICENCE]
    exact = [_expression(name) for name in cleaned]
    names = tuple(dict.fromkeys(found or name for found, name in zip(exact, cleaned, strict=True)))
    return Licence(names=names, spdx=bool(names) and all(exact), field=field if names else "")


def _expression(name: str) -> str:
    try:
        return str(canonicalize_license_expression(_SPDX.get(name.lower(), name)))
    except (InvalidLicenseExpression, RecursionError):
        return ""


_EXTRAS_LIMIT = 50  # extras of one package that are looked at: more are nobody's but an attacker's


def find_dependencies(
    requires: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return the packages, of those that are there, that each needs, with extras asked for."""
    parsed = {name: tuple(_parse_requirements(texts)) for name, texts in requires.items()}
    extras: dict[str, set[str]] = defaultdict(lambda: {""})
    found: dict[str, set[str]] = defaultdict(set)
    pending = [(name, "") for name in parsed]
    for name, extra in pending:  # it grows
        for requirement in parsed[name]:
            needed = str(canonicalize_name(requirement.name))
            if needed in parsed and _applies(requirement, extra, environment):
                found[name].add(needed)
                known = extras[needed]
                more = sorted(requirement.extras - known)[: _EXTRAS_LIMIT - len(known)]
                known.update(more)
                pending += [(needed, one) for one in more]
    return {name: tuple(sorted(found[name] - {name})) for name in parsed}


def _parse_requirements(texts: Iterable[str]) -> Iterator[Requirement]:
    for text in texts:
        # Old metadata, or nonsense: the resolver could not read it either.
        with suppress(InvalidRequirement, RecursionError):
            yield Requirement(text)


def _applies(requirement: Requirement, extra: str, environment: Mapping[str, str]) -> bool:
    if requirement.marker is None:
        return not extra
    try:
        return requirement.marker.evaluate({**environment, "extra": extra})
    except (ValueError, RecursionError):  # a comparison that has no meaning
        return False
