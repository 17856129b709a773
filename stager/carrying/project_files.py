"""The code of a project, written out of its bundle, to be edited where the bundle was imported."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle.environment.unpack import Fresh, WriteSettings, write_layers
from bundle.format.archive import BundleFile
from bundle.format.layer import Entry, Index, LayerError, check_links

from ..building.current_bundle import LOCK_NAME, lock_path, offline_root
from ..config import inline_script
from ..config.load import Config, find, load
from ..core.errors import ConfigError, StagerError
from ..core.files import bytes_of, output_file
from ..core.store import Store, remove
from ..layers.layer_file import content_of, decompress_index
from ..lock.pylock import read_lock
from ..lock.spec import read_spec
from ..pack import bundle_file
from .imports import ImportResult

_WRITTEN = ("project", "assets")
"""Folders of an environment: what is in them is written to the project's folder."""
_ALL = "all"
_STILL_RUNS = "the bundle was imported, and runs; to edit the project, bring its folder itself"


def refuse_used(folder: Path) -> None:
    """Refuse a folder that has something in it.

    Raises:
        ConfigError: it has, or it is none, or a link.
    """
    if folder.is_symlink():  # what is written takes its place by a rename
        raise ConfigError(
            f"--project {folder}: it is a symbolic link",
            hint="name the directory itself, or a new one",
        )
    try:
        used = any(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as exc:
        raise ConfigError(
            f"--project {folder}: {exc.strerror or exc}", hint="name a new directory"
        ) from exc
    if used:
        raise ConfigError(
            f"--project {folder}: there are files in it already", hint="name a new directory"
        )


@dataclass(frozen=True, kw_only=True)
class _Written:
    folder: Path
    """Its folder."""
    name: str
    """Its name."""
    lock: bytes
    """The lock that its bundle was made from."""
    root: Path
    """The offline root that has the bundle."""


def write_project(imported: ImportResult, store: Store, folder: Path) -> list[str]:
    """Write the files of a project, its assets and its lock into a new folder.

    Returns:
        What a person should know, to build it there.

    Raises:
        BundleError: the bundle is damaged; nothing is left.
        StagerError: the folder cannot be written.
    """
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        with bundle_file.opened(imported.bundle, imported.id) as bundle:
            _unpack(bundle, partial)
        if folder.is_dir():
            folder.rmdir()
        (partial / _ALL).rename(folder)
    except OSError as exc:
        raise StagerError(
            f"--project {folder} cannot be written: {exc.strerror or exc}",
            hint=f"name another directory; the bundle itself is in {store.root} now",
        ) from exc
    finally:
        remove(partial)
    return _with_lock(
        _Written(folder=folder, name=imported.name, lock=bytes_of(imported.lock), root=store.root)
    )


def _unpack(bundle: BundleFile, place: Path) -> None:
    final = place / _ALL
    final.mkdir()
    for name in _WRITTEN:
        (place / name).symlink_to(_ALL)
    fresh = list(_layers(bundle))
    refuse_clashes([index for _, index, _ in fresh])
    for _, index, entries in fresh:
        for path in [entry.path for entry in entries] + [link.path for link in index.links]:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
    settings = WriteSettings(decompress=content_of, processes=1, compare=True)
    write_layers(bundle, str(place), fresh, settings)
    for _, index, _ in fresh:
        for link in index.links:
            (place / link.path).symlink_to(link.target)


def refuse_clashes(indexes: Sequence[Index]) -> None:
    """Refuse content that cannot lie in one folder, or whose links lead out of it together.

    In an environment the project and each asset have places of their own; each layer alone, and all
    together, were judged by these.

    Raises:
        StagerError: two files would have one path, or a link leads outside.
    """
    files: dict[str, Entry] = {}
    links: dict[str, str] = {}
    for index in indexes:
        for link in index.links:
            path = _in_folder(link.path)
            if path in files or links.setdefault(path, link.target) != link.target:
                raise _clash(path)
        for entry in index.files:
            path = _in_folder(entry.path)
            other = files.setdefault(path, entry)
            if path in links or (other.size, other.sha256) != (entry.size, entry.sha256):
                raise _clash(path)
    try:
        check_links({f"{_ALL}/{path}": target for path, target in links.items()})
    except LayerError as exc:
        raise StagerError(
            f"the project's links lead out of its folder: {exc}", hint=_STILL_RUNS
        ) from exc


def _in_folder(path: str) -> str:
    """Return a path in the project's folder, for one in an environment."""
    return path.partition("/")[2]


def _clash(path: str) -> StagerError:
    return StagerError(
        f"two different files of the bundle would be {path} in the project's folder: one lay in "
        "the project, the other elsewhere (assets.paths, project.path)",
        hint=_STILL_RUNS,
    )


def _layers(bundle: BundleFile) -> Iterator[Fresh]:
    """Yield the layers to write: not those of models and data sets, which a lock names."""
    for layer in bundle.manifest.layers:
        if layer.kind == "project" or (layer.kind == "asset" and not layer.version):
            index = bundle.index(layer, bundle.head(layer), decompress_index)
            paths = [*(entry.path for entry in index.files), *(link.path for link in index.links)]
            if all(path.partition("/")[0] in _WRITTEN for path in paths):
                # Bytecode was added when the layer was made.
                yield layer, index, [one for one in index.files if not one.path.endswith(".pyc")]


def _with_lock(written: _Written) -> list[str]:
    """Write the lock where a build looks for it; return warnings about that build."""
    folder, name = written.folder, written.name
    settings = find(folder)
    if settings is not None and settings.parent == folder:
        try:
            return list(_beside_settings(written, load(folder)))
        except StagerError as exc:
            if not os.path.lexists(folder / LOCK_NAME):
                _write(folder / LOCK_NAME, written.lock)
            return [f"a build in {folder} would fail: {exc.message}", *exc.context]
    scripts = [path for path in folder.glob("*.py") if inline_script.name_of(path) == name]
    if inline_script.named_in(list(map(str, scripts))) is not None:
        _write(folder / f"pylock.{name}.toml", written.lock)
        return []
    _write(folder / LOCK_NAME, written.lock)
    return [
        f"there is no stager.toml in {folder}: the project's settings lay outside of project.path, "
        "and are not in the bundle; write one before you build"
    ]


def _write(place: Path, lock: bytes) -> None:
    """Write a lock; a link that the bundle has there is replaced, not followed."""
    with output_file(place, hint="write the lock there by hand") as handle:
        handle.write(lock)


def _beside_settings(written: _Written, config: Config) -> Iterator[str]:
    spec = read_spec(config)
    place = lock_path(config, spec)
    _write(place, written.lock)
    lock = read_lock(place, spec.target)
    here, there = spec.target.platform, lock.target.platform
    if here != there:
        yield (
            f"the packages are for {there}, this machine is {here}: to build here, set "
            f'environment.platform = "{there}" in {config.source}'
        )
    elif not lock.is_current(spec):
        yield f"{place} does not fit {config.source}: a build makes another lock, from an index"
    if offline_root(config) != written.root:
        yield (
            f"{config.source} names another offline root, {offline_root(config)}, which does not "
            f"have the packages: to build here, set OFFLINE_ROOT={written.root}"
        )
