"""The METADATA of the packages in a bundle, read without unpacking it.

A package's author decides what is in it: only its first bytes are read, only a few fields are
looked at, and each of them is bounded and made safe to print.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard
from packaging.metadata import parse_email

from bundle.format.archive import BundleFile
from bundle.format.layer import Entry, Index, LayerError
from bundle.format.manifest import Layer

from ..core.errors import in_one_line
from ..layers.layer_file import decompress_index
from ..layers.wheel_members import UNREADABLE, beginning_of

HEADERS_LIMIT = 256 << 10
"""Bytes of a METADATA file that are read: its fields come first, a description follows them."""
TEXT_LIMIT = 200
"""Characters that are kept of a licence or a name."""
_REQUIREMENT_LIMIT = 1000
"""Characters of a requirement; what is longer is none that anybody wrote."""
_LIST_LIMIT = 2000
"""Values that are kept of a field that may be repeated."""
_PATH = re.compile(r"lib/python3\.\d+/site-packages/[^/]+\.dist-info/METADATA")
_MEMBER = re.compile(r"[^/]+\.dist-info/METADATA")


@dataclass(frozen=True, kw_only=True)
class PackageMetadata:
    """Fields of a METADATA file; empty ones where it has none."""

    name: str = ""
    """``Name``."""
    version: str = ""
    """``Version``."""
    expression: str = ""
    """``License-Expression``."""
    licence: str = ""
    """``License``: a name, or the text of a licence."""
    classifiers: tuple[str, ...] = ()
    """Each ``Classifier`` that begins with ``License ::``."""
    requires: tuple[str, ...] = ()
    """Each ``Requires-Dist``."""


def clean(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return a foreign text in one line of visible characters, and no longer than a limit."""
    short = " ".join(text[: 4 * limit].split())
    line = in_one_line(short)
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


def metadata_of(bundle: BundleFile, layer: Layer) -> PackageMetadata:
    """Return the metadata of the package in a wheel's layer.

    Raises:
        NodeError: the layer is damaged.
    """
    index = bundle.index(layer, bundle.head(layer), decompress_index)
    entry = next((one for one in index.files if _PATH.fullmatch(one.path)), None)
    if entry is None:
        return PackageMetadata()
    with bundle.refusing(LayerError):
        return parse_metadata(b"".join(_beginning(bundle, layer, index, entry)))


def metadata_of_wheel(wheel: bytes) -> PackageMetadata:
    """Return the metadata of a package from its wheel; none if the wheel cannot be read."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            name = next(filter(_MEMBER.fullmatch, archive.namelist()))
            return parse_metadata(beginning_of(archive, name, HEADERS_LIMIT))
    except (*UNREADABLE, StopIteration):
        return PackageMetadata()


def _beginning(bundle: BundleFile, layer: Layer, index: Index, entry: Entry) -> Iterator[bytes]:
    """Yield the first bytes of a file; read only the frames that contain them."""
    end = entry.offset + min(entry.size, HEADERS_LIMIT)
    place, position = bundle.frames_start(layer), 0
    for frame in index.frames:
        start, position = position, position + frame.unpacked_size
        if start < end and position > entry.offset:
            packed = bundle.frame(place, frame.size, frame.sha256)
            content = _decompressed(packed, min(end, position) - start)
            yield content[max(0, entry.offset - start) :]
        place += frame.size


def _decompressed(frame: bytes, size: int) -> bytes:
    """Decompress at most ``size`` bytes, whatever length the frame claims to have."""
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
