"""The source of each package in a bundle, by the locks that are at hand.

A bundle does not say where its wheels came from; its lock does. A wheel is known by its digest, so
a lock that was made again since then says nothing false of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from packaging.pylock import (
    Package,
    Pylock,
    PylockUnsupportedVersionError,
    PylockValidationError,
)

from ..core import toml
from ..core.errors import StagerError
from ..lock.indexes import strip_credentials
from .asset_contents import digest_or_empty
from .package_metadata import clean

_URL = re.compile(
    r"(?:git\+)?(?:https?|ssh)://(?:[\w.~-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?"
    r"(?:/(?:[\w.~!$&()*+,;=:@/-]|%[0-9A-Fa-f]{2})*)?",
    re.ASCII,
)
"""A plain URL without credentials, query and fragment."""
_URL_LIMIT = 2000


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The source of a package."""

    url: str = ""
    """The address of the file or repository, without credentials; empty for a local file."""
    kind: str = ""
    """``wheel``, ``sdist``, ``vcs`` or ``folder``; empty if no lock at hand says it."""
    sha256: str = ""
    """Digest of the file at the address; empty for a repository or a folder."""
    folder: str = ""
    """The folder that its wheel was built from, as the lock names it; empty for all others."""


class LockedSources:
    """The sources of packages, as locks name them."""

    def __init__(self, locks: Sequence[Path]) -> None:
        """Read locks, the preferred ones first; ignore one that is missing or unreadable."""
        self._wheels: dict[str, Provenance] = {}
        self._sdists: dict[tuple[str, str], Provenance] = {}
        for path in locks:
            if path.is_file():
                self._read(path)

    def of(self, name: str, version: str, sha256: str) -> Provenance:
        """Return the source of a wheel by its digest, else by the version of a locked sdist."""
        known = self._wheels.get(sha256) or self._sdists.get((name, version))
        return known or Provenance()

    def _read(self, path: Path) -> None:
        try:
            data = toml.read(path)
            built = _built(data)
            for package in Pylock.from_dict(data).packages:
                self._add(package, built)
        except (StagerError, PylockValidationError, PylockUnsupportedVersionError):
            return

    def _add(self, package: Package, built: Mapping[str, str]) -> None:
        for sha256, found in _wheels(package, built):
            self._wheels.setdefault(sha256, found)
        sdist = package.sdist
        if sdist is not None and package.version is not None:
            found = _of_file("sdist", sdist.url, sdist.hashes.get("sha256", ""))
            self._sdists.setdefault((str(package.name), str(package.version)), found)


def _wheels(package: Package, built: Mapping[str, str]) -> Iterator[tuple[str, Provenance]]:
    files = [(wheel.filename, wheel.url, wheel.hashes) for wheel in package.wheels or ()]
    if package.archive is not None:
        files.append(("", package.archive.url, package.archive.hashes))
    for name, url, hashes in files:
        sha256 = hashes.get("sha256", "")
        if name in built:
            yield sha256, _of_source(built[name])
        elif sha256:
            yield sha256, _of_file("wheel", url, sha256)


def _built(data: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the source of each wheel that was built for the lock, by file name."""
    found: Any = data
    for key in ("tool", "stager", "sources"):
        found = found.get(key) if isinstance(found, dict) else None
    return {name: str(source) for name, source in found.items()} if isinstance(found, dict) else {}


def _of_file(kind: str, url: str | None, sha256: str) -> Provenance:
    address = public_url(url or "")
    return Provenance(kind=kind, url=address, sha256=digest_or_empty(sha256) if address else "")


def _of_source(label: str) -> Provenance:
    if "://" not in label:
        # Where it lay on the machine of the build is nobody else's business.
        place = PurePosixPath(label)
        return Provenance(kind="folder", folder=clean(place.name if place.is_absolute() else label))
    is_vcs = "+" in label.partition("://")[0]
    return Provenance(kind="vcs" if is_vcs else "sdist", url=public_url(label))


def public_url(url: str) -> str:
    """Return a URL without credentials, query and fragment; empty if it is not one for others."""
    try:
        plain = strip_credentials(url) if "://" in url else ""
        host = urlsplit(plain).netloc.rpartition("@")[2]  # ${USER}:${PASSWORD}@ is left so far
    except ValueError:
        return ""
    scheme, _, rest = plain.partition("://")
    plain = f"{scheme}://{host}{rest[rest.find('/') :] if '/' in rest else ''}"
    return plain if len(plain) <= _URL_LIMIT and _URL.fullmatch(plain) else ""
