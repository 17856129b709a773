"""The packages that the user has asked for, and the modules that must import for them."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bundle.format.manifest import Layer

from ..config.load import Config
from ..core.store import Store
from ..layers.layer_file import top_modules
from ..lock.pylock import Lock
from ..lock.spec import Spec
from ..pack.bundle import stored_index

REPORTED = ("torch", "transformers", "datasets", "numpy")
"""Packages whose versions a probe always reports where they are present."""


def requested_of(spec: Spec, lock: Lock) -> tuple[str, ...]:
    """Return the user's requirements; all packages of a lock without requirements."""
    requested = [*spec.requirements]
    if spec.pylock is not None:
        requested = [file.name for file in lock.files]
    if spec.uv_lock is not None:
        locked = {file.name for file in lock.files}
        requested += [name for name in spec.uv_lock.direct() if name in locked]
    for wheel, _ in lock.sources:
        requested.append(parse_wheel_filename(wheel)[0])
    return tuple(requested)


def reported_of(requested: Sequence[str], layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return the packages whose versions a probe reports."""
    present = {layer.name for layer in layers if layer.kind == "wheel"}
    names = [canonicalize_name(Requirement(text).name) for text in requested]
    return tuple(name for name in dict.fromkeys([*REPORTED, *names]) if name in present)


def imports_of(
    config: Config, requested: Sequence[str], layers: Sequence[Layer], store: Store
) -> tuple[str, ...]:
    """Return the modules that must import: as set, else those of the requested packages."""
    if config.environment.imports:
        return config.environment.imports
    names = {canonicalize_name(Requirement(text).name) for text in requested}
    modules: list[str] = []
    for layer in layers:
        if layer.kind == "wheel" and layer.name in names:
            modules += top_modules(layer.name, stored_index(store, layer))
    # setuptools refuses to be imported after another package has imported distutils, as pip does.
    return tuple(sorted(dict.fromkeys(modules), key=lambda module: module != "setuptools"))
