"""The requirements in the metadata of packages that are not met in an environment."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from bundle.format.layer import LayerError
from bundle.format.manifest import Layer, Manifest

from ..core.files import opened
from ..core.store import Store
from ..core.values import Target
from ..layers.layer_file import StoredTar
from .stored_layers import damaged, stored_index

_USER = "environment.requirements"
_METADATA = re.compile(r"lib/python[^/]+/site-packages/([^/]+\.dist-info)/METADATA")


def write_metadata(manifest: Manifest, store: Store, site: Path) -> None:
    """Write the metadata of a bundle's packages into a directory, and nothing else of them.

    It is read from the layers, so nothing has to run, or to be for this machine.

    Raises:
        BundleError: a layer in the store is damaged; it has been removed.
    """
    for layer in manifest.layers:
        if layer.kind == "wheel":
            _write(layer, store, site)


def _write(layer: Layer, store: Store, site: Path) -> None:
    index = stored_index(store, layer)
    try:
        with opened(store.layer(layer.id)) as handle:
            tar = StoredTar(handle, layer.head_size, index)
            for entry in index.files:
                match = _METADATA.fullmatch(entry.path)
                if match:
                    folder = site / match[1]
                    folder.mkdir(parents=True)
                    (folder / "METADATA").write_bytes(tar.file(entry, 0, entry.size))
    except LayerError as exc:
        raise damaged(store, layer, str(exc)) from exc


def unmet(
    site: Path,
    requirements: Iterable[str],
    target: Target,
    overridden: Collection[str] = (),
) -> list[str]:
    """Return every requirement that is not met in a site-packages directory.

    Extras count if something requests them: the user, or a package that is itself needed.

    Args:
        site: the directory.
        requirements: the user's requirements.
        target: decides the markers.
        overridden: packages that the user takes against what other packages ask for; what these
            ask for, and what is asked of them, does not count.
    """
    installed, faults = _installed(site)
    wanted = [Requirement(text) for text in requirements]
    pending = [(_USER, requirement) for requirement in wanted if _applies(requirement, "", target)]
    pending += [(name, Requirement(name)) for name in sorted(installed)]
    seen: set[tuple[NormalizedName, str]] = set()
    while pending:
        parent, requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        distribution = installed.get(name)
        if not {name, parent} & {*overridden}:
            faults += _faults(parent, requirement, distribution)
        if distribution is None:
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                pending += [(name, needed) for needed in _needs(distribution, extra, target)]
    return sorted(set(faults))


def _faults(
    parent: str, requirement: Requirement, distribution: importlib.metadata.Distribution | None
) -> Iterator[str]:
    name = canonicalize_name(requirement.name)
    if distribution is None:
        yield f"{name} is missing; {parent} needs it"
    elif not _has_version(distribution, requirement):
        needed = f"{requirement.name}{requirement.specifier}"
        yield f"{name} is {distribution.version}; {parent} needs {needed}"


def _has_version(distribution: importlib.metadata.Distribution, requirement: Requirement) -> bool:
    return requirement.specifier.contains(distribution.version, prereleases=True)


def _installed(
    site: Path,
) -> tuple[dict[NormalizedName, importlib.metadata.Distribution], list[str]]:
    """Return the distributions by name; a fault if one has metadata without name or version."""
    distributions = list(importlib.metadata.distributions(path=[str(site)]))
    installed = {}
    for distribution in distributions:
        if distribution.name and distribution.version:
            installed[canonicalize_name(distribution.name)] = distribution
    faults = []
    if len(installed) < len(distributions):
        faults.append("a package has metadata without name and version")
    return installed, faults


def _needs(
    distribution: importlib.metadata.Distribution, extra: str, target: Target
) -> Iterable[Requirement]:
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # old metadata; the resolver could not read it either
        if _applies(requirement, extra, target):
            yield requirement


def _applies(requirement: Requirement, extra: str, target: Target) -> bool:
    if requirement.marker is None:
        return not extra
    environment = cast("dict[str, str]", dict(target.environment()))
    return requirement.marker.evaluate({**environment, "extra": extra})
