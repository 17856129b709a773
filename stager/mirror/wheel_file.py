"""A wheel as an index lists it: its digest, and what its METADATA says."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import parse_email
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, NormalizedName, parse_wheel_filename
from packaging.version import Version

from bundle.protocol.digest import Digest

from ..core.files import opened
from ..layers.wheel_members import UNREADABLE, beginning_of

_LARGEST_METADATA = 16 << 20
"""Bytes; no real package has a longer description."""
_MEMBER = re.compile(r"[^/]+\.dist-info/METADATA")


@dataclass(frozen=True, kw_only=True)
class ListedWheel:
    """A wheel of a mirror."""

    filename: str
    """The name of its file."""
    name: NormalizedName
    """The package's normalized name."""
    version: Version
    """The package's version."""
    sha256: Digest
    """The digest of its bytes."""
    size: int
    """Its length in bytes."""
    metadata: bytes
    """Its METADATA file."""
    requires_python: str
    """The versions of Python it is for; empty where it does not say."""

    @property
    def metadata_digest(self) -> Digest:
        """Return the digest of its METADATA file."""
        return Digest.of(self.metadata)


def listed_wheel(path: Path, sha256: Digest) -> ListedWheel:
    """Return what an index says of a wheel whose digest is known.

    Raises:
        ValueError: it is not a wheel, or is damaged.
    """
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
    return ListedWheel(
        filename=path.name,
        name=name,
        version=version,
        sha256=sha256,
        size=size,
        metadata=metadata,
        requires_python=_valid(raw.get("requires_python", "")),
    )


def _metadata(path: Path) -> bytes:
    """Return the METADATA file of a wheel; raise one of ``UNREADABLE``."""
    with opened(path) as handle, zipfile.ZipFile(handle) as archive:
        members = list(filter(_MEMBER.fullmatch, archive.namelist()))
        if len(members) != 1:
            raise ValueError("it has no METADATA file, or more than one")
        metadata = beginning_of(archive, members[0], _LARGEST_METADATA + 1)
    if len(metadata) > _LARGEST_METADATA:
        raise ValueError("its METADATA file is too large")
    return metadata


def _valid(specifier: str) -> str:
    """Return a version specifier; empty if it is not valid: an installer would refuse that."""
    try:
        return str(SpecifierSet(specifier))
    except InvalidSpecifier:
        return ""
