"""The difference between a project's new bundle, or its files, and the bundle before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bundle.format.manifest import Layer, Manifest

from ..core.errors import StagerError
from ..core.store import Store
from ..core.values import Target
from ..layers.source import LayerSource, layer_id
from ..layers.tree import folders_of
from ..lock.pylock import PackageChanges, PackageFile, compare
from ..pack import bundle_file
from ..pack.bundle import stored_index

_MOST_NAMED = 3
"""Names of one kind in a message."""


def before(store: Store, project: Path) -> Manifest | None:
    """Return the manifest of the bundle that a project's last build made, if it can be read."""
    newest = bundle_file.newest(store, project)
    if newest is None:
        return None
    try:
        return bundle_file.manifest_of(newest.path)
    except StagerError:
        return None


def changes(old: Manifest | None, new: Manifest) -> PackageChanges:
    """Compare a bundle with the one before; without one, all packages are added.

    Returns:
        The changes; their bytes are those of all layers that the earlier bundle does not have, the
        project's among them, as they are sent.
    """
    earlier = old.layers if old is not None else ()
    there = {layer.id for layer in earlier}
    return replace(
        compare(_packages(earlier), _packages(new.layers)),
        bytes=sum(layer.size for layer in new.layers if layer.id not in there),
    )


def changed_files(old: Manifest, trees: Sequence[LayerSource], store: Store, target: Target) -> str:
    """Return the files of a project that differ from those in its bundle, in words.

    Args:
        old: the manifest of the bundle.
        trees: the sources of the layers that are not wheels, as they are now.
        store: the offline root, which has the layers of the bundle.
        target: what the bundle is for.

    Returns:
        The files, in parentheses; empty if no file of the project differs, or it is not known.
    """
    there = {layer.id for layer in old.layers}
    was = _shipped(old, store)
    now = was
    for source in trees:
        if source.kind == "project" and source.tree is not None and was:
            paths = [file.path for file in source.tree.files]
            now = dict(zip(paths, source.contents, strict=True))
    added, gone = now.keys() - was.keys(), was.keys() - now.keys()
    assets = [one for one in trees if one.kind == "asset" and layer_id(one, target) not in there]
    edited = [asset.name for asset in assets]
    edited += [path for path in now.keys() & was.keys() if now[path] != was[path]]
    new = _merge_new_folders(added, folders_of(was))
    kinds = (("new", new), ("changed", edited), ("removed", gone))
    named = [f"{kind}: {', '.join(sorted(names)[:_MOST_NAMED])}" for kind, names in kinds if names]
    more = sum(max(0, len(names) - _MOST_NAMED) for _, names in kinds)
    if more:
        named.append(f"and {more} more")
    if new and not (edited or gone or any(path.endswith(".py") for path in added)):
        named.append("if a run wrote that, name it in project.outputs, or it is sent to the nodes")
    return f" ({'; '.join(named)})" if named else ""


def _shipped(old: Manifest, store: Store) -> dict[str, str]:
    """Return the digests of the project's files in a bundle; empty if its layer is damaged."""
    with suppress(StagerError):
        for layer in old.layers:
            if layer.kind == "project":
                files = stored_index(store, layer).files
                paths = {file.path.partition("/")[2]: file.sha256 for file in files}
                return {path: digest for path, digest in paths.items() if path[-4:] != ".pyc"}
    return {}


def _merge_new_folders(paths: Iterable[str], known: Collection[str]) -> list[str]:
    """Return new paths, with one entry for each new folder."""
    merged = set()
    for path in paths:
        folders = [f"{folder}/" for folder in sorted(folders_of([path])) if folder not in known]
        merged.add(folders[0] if folders else path)
    return list(merged)


def _packages(layers: Sequence[Layer]) -> list[PackageFile]:
    return [
        PackageFile(name=layer.name, version=layer.version, content=layer.version, bytes=layer.size)
        for layer in layers
        if layer.kind == "wheel"
    ]
