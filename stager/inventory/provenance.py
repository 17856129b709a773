"""The source of each package in a bundle, by the digest of its wheel in the locks at hand."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from packaging.pylock import Package, Pylock, PylockUnsupportedVersionError, PylockValidationError

from bundle.format.archive import BundleFile
from bundle.format.layer import LINK_LIMIT, Entry, Index, LayerError, read_origin
from bundle.protocol.digest import Digest

from ..building.current_bundle import LOCK_NAME
from ..config import inline_script
from ..config.load import Config
from ..core import toml
from ..core.errors import StagerError
from ..layers.layer_file import decompress_index
from ..lock.indexes import strip_credentials
from ..pack.bundle_file import ChosenBundle, find_imported_lock, open_bundle
from .package_metadata import clean

_PREFIX = "assets/"  # where assets that are no repository of a hub lie in an environment


ContentFile = tuple[str, str]  # path and digest of a file of an asset; the digest may be empty


def list_asset_files(
    bundle: BundleFile, commits: Mapping[Digest, str]
) -> dict[Digest, tuple[ContentFile, ...]]:
    """Return the files of each asset by the id of its layer."""
    layers = [layer for layer in bundle.manifest.layers if layer.kind == "asset"]
    indexes = {one.id: bundle.index(one, bundle.head(one), decompress_index) for one in layers}
    # Of all assets: a file that two models share is stored once.
    files = {entry.path: entry for index in indexes.values() for entry in index.files}
    links = {link.path: link.target for index in indexes.values() for link in index.links}
    return {
        key: tuple(_contents(index, commits.get(key, ""), files, links))
        for key, index in indexes.items()
    }


def _contents(
    index: Index, commit: str, files: Mapping[str, Entry], links: Mapping[str, str]
) -> Iterator[ContentFile]:
    mark = f"/snapshots/{commit}/" if commit else _PREFIX
    paths = [entry.path for entry in index.files] + [link.path for link in index.links]
    for path in sorted(paths):
        _, found, name = path.partition(mark)
        entry = files.get(_follow_links(path, links)) if found else None
        if entry is not None:
            yield name, digest_or_empty(entry.sha256)


def digest_or_empty(text: str) -> str:
    """Return a text as a digest; empty where it is not one."""
    try:
        return Digest(text)
    except ValueError:
        return ""


def _follow_links(path: str, links: Mapping[str, str]) -> str:
    for _ in range(LINK_LIMIT):
        if path not in links:
            break
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), links[path]))
    return path


_URL = re.compile(
    r"(?:git\+)?(?:https?|ssh)://(?:[\w.~-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?"
    r"(?:/(?:[\w.~!$&()*+,;=:@/-]|%[0-9A-Fa-f]{2})*)?",
    re.ASCII,
)
"""A plain URL without credentials, query and fragment."""
_URL_LIMIT = 2000


class Provenance(NamedTuple):
    """The source of a package."""

    url: str = ""  # of the file or repository, without credentials; empty for a local file
    kind: str = ""  # ``wheel``, ``sdist``, ``vcs`` or ``folder``; empty if no lock says it
    sha256: str = ""  # of the file at the address; empty for a repository or a folder
    folder: str = ""  # that its wheel was built from, as the lock names it


class LockedSources:
    """The sources of packages, as locks name them."""

    def __init__(self, locks: Sequence[Path]) -> None:
        """Read locks, the preferred ones first; ignore one that is missing or unreadable."""
        self._wheels: dict[str, Provenance] = {}
        self._sdists: dict[tuple[str, str], Provenance] = {}
        for path in filter(Path.is_file, locks):
            with suppress(StagerError, PylockValidationError, PylockUnsupportedVersionError):
                data = toml.read(path)
                built = toml.get_table(data, "tool", "stager", "sources")
                for package in Pylock.from_dict(data).packages:
                    self._add(package, built)

    def find(self, name: str, version: str, sha256: str) -> Provenance:
        """Return the source of a wheel by its digest, else by the version of a locked sdist."""
        return self._wheels.get(sha256) or self._sdists.get((name, version)) or Provenance()

    def _add(self, package: Package, built: toml.Table) -> None:
        for sha256, found in _wheels(package, built):
            self._wheels.setdefault(sha256, found)
        sdist = package.sdist
        if sdist is not None and package.version is not None:
            found = _locate_file("sdist", sdist.url, sdist.hashes.get("sha256", ""))
            self._sdists.setdefault((str(package.name), str(package.version)), found)


def _wheels(package: Package, built: toml.Table) -> Iterator[tuple[str, Provenance]]:
    files = [(wheel.filename, wheel.url, wheel.hashes) for wheel in package.wheels or ()]
    if package.archive is not None:
        files.append(("", package.archive.url, package.archive.hashes))
    for name, url, hashes in files:
        sha256 = hashes.get("sha256", "")
        if name in built:
            yield sha256, _locate_source(str(built[name]))
        elif sha256:
            yield sha256, _locate_file("wheel", url, sha256)


def _locate_file(kind: str, url: str | None, sha256: str) -> Provenance:
    address = public_url(url or "")
    return Provenance(kind=kind, url=address, sha256=digest_or_empty(sha256) if address else "")


def _locate_source(label: str) -> Provenance:
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


_LOCK = re.compile(r"pylock(\.[^./]+)?\.toml")


def list_possible_locks(bundle: Path, config: Config | None) -> tuple[Path, ...]:
    """Return where locks may be: beside the bundle, as an import leaves it, and in the project."""
    beside = find_imported_lock(bundle)
    if config is None:
        return (beside,)
    names = [LOCK_NAME, "pylock.stager.toml"]
    if inline_script.is_script(config):
        names.insert(0, f"pylock.{inline_script.make_script_name(config.source)}.toml")
    names += [text for text in config.environment.requirements if _LOCK.fullmatch(Path(text).name)]
    return (beside, *(config.root / name for name in names))


def find_lock(chosen: ChosenBundle, locks: Sequence[Path]) -> Path | None:
    """Return the first lock that names every wheel of a bundle, which does not hold it itself."""
    with open_bundle(chosen.path, chosen.id) as bundle, bundle.turn_into_damage(LayerError):
        layers = [layer for layer in bundle.manifest.layers if layer.kind == "wheel"]
        digests = [read_origin(bundle.head(layer)).content for layer in layers]
    wheels = [(one.name, one.version, key) for one, key in zip(layers, digests, strict=True)]
    for path in filter(Path.is_file, locks):
        known = LockedSources((path,))
        if all(known.find(*wheel).kind for wheel in wheels):
            return path
    return None
