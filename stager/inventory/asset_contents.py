"""The files of models, data sets and other assets in a bundle, with their digests."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bundle.format.archive import BundleFile
from bundle.format.layer import LINK_LIMIT, Entry, Index
from bundle.protocol.digest import Digest

from ..layers.layer_file import decompress_index

_PREFIX = "assets/"
"""Where assets that are no repository of a hub lie in an environment."""


@dataclass(frozen=True, kw_only=True)
class ContentFile:
    """A file of an asset."""

    path: str
    """Its path in the repository, or in the project."""
    size: int
    """Length in bytes."""
    sha256: str
    """Digest of its bytes; empty if the index has none that could be true."""


def asset_contents(
    bundle: BundleFile, commits: Mapping[Digest, str]
) -> dict[Digest, tuple[ContentFile, ...]]:
    """Return the files of each asset by the id of its layer.

    Raises:
        NodeError: a layer is damaged.
    """
    layers = [layer for layer in bundle.manifest.layers if layer.kind == "asset"]
    indexes = {
        layer.id: bundle.index(layer, bundle.head(layer), decompress_index) for layer in layers
    }
    files, links = _merged(list(indexes.values()))
    return {
        key: tuple(_contents(index, commits.get(key, ""), files, links))
        for key, index in indexes.items()
    }


def _merged(indexes: Sequence[Index]) -> tuple[dict[str, Entry], dict[str, str]]:
    """Merge the files and links of all assets: a file that two models share is stored once."""
    files = {entry.path: entry for index in indexes for entry in index.files}
    links = {link.path: link.target for index in indexes for link in index.links}
    return files, links


def _contents(
    index: Index, commit: str, files: Mapping[str, Entry], links: Mapping[str, str]
) -> Iterator[ContentFile]:
    """Yield the files of a commit's snapshot; all files if the commit is empty."""
    mark = f"/snapshots/{commit}/" if commit else _PREFIX
    paths = [entry.path for entry in index.files] + [link.path for link in index.links]
    for path in sorted(paths):
        _, found, name = path.partition(mark)
        entry = files.get(_followed(path, links)) if found else None
        if entry is not None:
            yield ContentFile(path=name, size=entry.size, sha256=digest_or_empty(entry.sha256))


def digest_or_empty(text: str) -> str:
    """Return a text as a digest; empty where it is not one."""
    try:
        return Digest(text)
    except ValueError:
        return ""


def _followed(path: str, links: Mapping[str, str]) -> str:
    for _ in range(LINK_LIMIT):
        if path not in links:
            break
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), links[path]))
    return path
