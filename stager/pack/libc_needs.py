"""The C library that wheels need: what their tags promise, and what their files ask for.

A tag is what a publisher says. The dynamic loader reads the shared libraries themselves, and
refuses one that needs a version of glibc that is not there (``.gnu.version_r``). So both count, as
in ``auditwheel``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from packaging.utils import parse_wheel_filename

from bundle.format.layer import LayerError
from bundle.format.manifest import Layer
from bundle.protocol.counts import counted
from bundle.protocol.digest import Digest

from ..core import elf
from ..core.errors import WheelError
from ..core.files import opened, text_of
from ..core.store import Store
from ..core.values import Target, Wheel, libc_version
from ..layers.layer_file import StoredTar
from .stored_layers import damaged, stored_index

FILE_NAME = "shared-libraries.json"
_LIBRARY = re.compile(r"\.so(\.[^/]+)?$")
_SITE = re.compile(r"^lib/python[^/]+/site-packages/")
_NONE = (0, 0)


@dataclass(frozen=True, kw_only=True)
class LibcNeed:
    """Something in a bundle that needs a C library."""

    version: tuple[int, int]
    """The oldest version that it runs with; (0, 0) for any."""
    package: str
    """The package with its version, ``numpy 2.4.1``."""
    because: str
    """The file that needs it, or the tag that says so."""

    def __str__(self) -> str:
        return f"{self.package} ({self.because})"


@dataclass(frozen=True, kw_only=True)
class _Libraries:
    major: int = 0
    minor: int = 0
    """The oldest glibc with which all of them load; 0.0 for any."""
    file: str = ""
    """The one that needs it."""
    musl: str = ""
    """One that was linked with musl; empty for none."""

    @property
    def version(self) -> tuple[int, int]:
        return self.major, self.minor


def tag_need(wheel: Wheel, newest: tuple[int, int]) -> LibcNeed:
    """Return the oldest C library that a wheel runs with, by its best tag.

    A wheel tagged plainly ``linux_...`` was built here, against this machine's ``newest`` library.
    """
    versions = []
    for tag in parse_wheel_filename(wheel.path.name)[3]:
        version = newest if tag.platform.startswith("linux_") else libc_version(tag.platform)
        if version is not None:
            versions.append((version, tag.platform))
    version, platform = min(versions, default=(_NONE, ""))
    return LibcNeed(version=version, package=_named(wheel), because=platform)


def file_needs(
    wheels: Sequence[Wheel],
    layers: Sequence[Layer],
    store: Store,
    target: Target,
    note: Callable[[str], None],
) -> tuple[LibcNeed, ...]:
    """Return the file in each wheel that needs the newest C library.

    Each layer is read once, a few frames of it, and what was found is kept in the store. Programs
    do not count: that one cannot be started does not keep a module from being imported.

    Raises:
        WheelError: some need a newer glibc than the target has; all of them are named.
        BundleError: a layer in the store is damaged; it has been removed.
    """
    libc, newest = target.libc
    tags = {str(wheel.name): tag_need(wheel, newest) for wheel in wheels}
    promised = max((need.version for need in tags.values()), default=_NONE)
    native = [layer for layer in layers if layer.kind == "wheel" and any(tags[layer.name].version)]
    libraries = _remembered(native, store, target)
    for layer in native:
        stranger = _built_for_another(libraries[layer.id], libc)
        if stranger:
            note(f"{tags[layer.name].package}: {stranger}, and the nodes have {libc}")
    if libc != "glibc":
        return ()
    needs = [
        LibcNeed(version=own.version, package=tags[layer.name].package, because=own.file)
        for layer in native
        if (own := libraries[layer.id]).version > _NONE
    ]
    for need in needs:
        if promised < need.version <= newest:
            tag = tags[need.package.split()[0]]
            note(
                f"{need} needs {_glibc(need.version)}, though its tag is {tag.because}: nodes with "
                "an older one are refused"
            )
    _refuse_newer([need for need in needs if need.version > newest], target)
    return tuple(needs)


def _built_for_another(libraries: _Libraries, libc: str) -> str:
    if libc == "glibc":
        return f"{libraries.musl} was built for musl" if libraries.musl else ""
    return f"{libraries.file} was built for glibc" if libraries.file else ""


def _refuse_newer(needs: Sequence[LibcNeed], target: Target) -> None:
    if not needs:
        return
    newest = max(need.version for need in needs)
    platform = f"manylinux_{newest[0]}_{newest[1]}_{target.machine}"
    first = needs[0]
    raise WheelError(
        f"{counted(len(needs), 'package')} cannot be loaded on {target.platform}: the libraries "
        "inside need a newer glibc, whatever the tags of the wheels say",
        hint=f'if all nodes have it, set environment.platform = "{platform}"; else pin another '
        "version, or leave out a library that no rank loads: environment.prune = "
        f'["{first.package.split()[0]}:/{first.because}"]',
        context=[f"{need.package} needs {_glibc(need.version)} ({need.because})" for need in needs],
    )


def _glibc(version: tuple[int, int]) -> str:
    return f"glibc {version[0]}.{version[1]}"


def _named(wheel: Wheel) -> str:
    return f"{wheel.name} {wheel.version}"


def _remembered(
    layers: Sequence[Layer], store: Store, target: Target
) -> Mapping[Digest, _Libraries]:
    known = _read(store)
    missing = [layer for layer in layers if layer.id not in known]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda layer: _libraries(layer, store, target.machine), missing)
        new = {layer.id: libraries for layer, libraries in zip(missing, found, strict=True)}
    if new:
        kept = {key: value for key, value in known.items() if store.layer(key).exists()}
        _write(store, {**kept, **new})
    return {**known, **new}


def _read(store: Store) -> dict[Digest, _Libraries]:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        raw = json.loads(text_of(store.root / FILE_NAME))
        return {Digest(key): _Libraries(**value) for key, value in raw.items()}
    return {}


def _write(store: Store, known: Mapping[Digest, _Libraries]) -> None:
    raw = {key: vars(value) for key, value in known.items()}
    with store.publishing(store.root / FILE_NAME) as unfinished:
        unfinished.write_text(json.dumps(raw, sort_keys=True, indent=0), encoding="utf-8")


def _libraries(layer: Layer, store: Store, machine: str) -> _Libraries:
    index = stored_index(store, layer)
    newest, file, musl = _NONE, "", ""
    try:
        with opened(store.layer(layer.id)) as handle:
            tar = StoredTar(handle, layer.head_size, index)
            for entry in index.files:
                if not _LIBRARY.search(entry.path):
                    continue
                header = elf.parsed(partial(tar.file, entry))
                if header is None or header.machine != machine:
                    continue
                path = _SITE.sub("", entry.path)
                if header.for_musl:
                    musl = musl or path
                elif header.glibc > newest:
                    newest, file = header.glibc, path
    except (LayerError, OSError) as exc:
        raise damaged(store, layer, str(exc)) from exc
    return _Libraries(major=newest[0], minor=newest[1], file=file, musl=musl)
