"""``stager export`` and ``stager import``: from one offline root into another."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

from bundle.format.manifest import Manifest

from ..building.current_bundle import (
    Listener,
    current_bundle,
    lock_path,
    newest_bundle,
    offline_root,
)
from ..config.load import Config
from ..core.errors import BundleError
from ..core.files import CARRIED_SUFFIX, read_bytes
from ..core.store import Store
from ..inventory.provenance import find_lock, list_possible_locks
from ..lock.spec import read_spec
from ..pack import bundle_file
from ..pack.members import project_folder, refuse_in_project
from .exports import ExportResult, export, find_base_manifest
from .imports import ImportResult, import_file, refuse_used, write_project
from .tool import collect_tool


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export."""

    bundle: bundle_file.ChosenBundle | None = None
    """The bundle, where it is named; None for the project's, made current."""
    output: Path | None = None
    """The file to write; None for one in the current directory."""
    base: str = ""
    """The id of the bundle that the other side has, or its first digits; empty if not named."""
    since: datetime.datetime | None = None
    with_tool: bool = False
    offline: bool = False
    """True if nothing may be fetched for that."""


def export_project(config: Config, options: ExportOptions, listener: Listener) -> ExportResult:
    """Write a bundle, or what the other side lacks of it, to a file to carry."""
    if options.output is not None:
        refuse_in_project(options.output, project_folder(config), CARRIED_SUFFIX)
    chosen = options.bundle or current_bundle(config, listener)
    manifest = bundle_file.read_manifest(chosen.path, chosen.id)
    store = Store(offline_root(config))
    before = None if options.bundle is not None else read_bytes(_own_lock(config))
    base = find_base_manifest(store, manifest.name, options.base, options.since)
    output = options.output or Path(_default_name(manifest, base))
    with (
        store.lock(lambda: listener.note(f"waiting for another build in {store.root}")),
        store.scratch("export") as scratch,
    ):
        lock = _lock(config, chosen, before)
        tool = None
        if options.with_tool:
            listener.begin("tool")
            tool = collect_tool(
                read_spec(config),
                config,
                store,
                scratch,
                offline=options.offline,
                progress=listener.note,
            )
        listener.begin("export")
        return export(chosen, output.absolute(), store, lock=lock, base=base, tool=tool)


def _default_name(manifest: Manifest, base: Manifest | None) -> str:
    since = "" if base is None else f"-since-{base.id[:12]}"
    return f"{manifest.name}-{manifest.id[:12]}{since}{CARRIED_SUFFIX}"


def _own_lock(config: Config) -> Path:
    spec = read_spec(config)
    lock = lock_path(config, spec)
    return spec.pylock if spec.pylock is not None and not lock.exists() else lock


def _lock(config: Config, chosen: bundle_file.ChosenBundle, before: bytes | None) -> bytes:
    """Return a bundle's lock; ``before`` is None for a named one. The store's lock must be held."""
    if before is None:
        return read_bytes(find_lock(chosen, list_possible_locks(chosen.path, config)))
    if read_bytes(_own_lock(config)) != before or newest_bundle(config).id != chosen.id:
        raise BundleError(
            f"another command has built {config.name} just now, so its lock may not be that of "
            f"{chosen.path}",
            hint="run the command again",
        )
    return before


def import_bundle(
    config: Config,
    path: Path,
    listener: Listener,
    *,
    asked: str = "",
    project: Path | None = None,
    for_builds: bool = False,
) -> ImportResult:
    """Add the bundle of a carried file to the offline root; write its project out, if asked to.

    Args:
        config: the settings: they say what signature is needed, and where the offline root is.
        path: the carried file.
        listener: is told of the steps.
        asked: the id that the bundle must have, or its first digits; empty for any.
        project: a new folder for the project's code; None for none.
        for_builds: True to let builds take packages out of the bundle; so they may with a project.
    """
    store = Store(offline_root(config))
    if project is not None:
        refuse_used(project)
    with store.lock(lambda: listener.note(f"waiting for another build in {store.root}")):
        listener.begin("import")
        result = import_file(path, config, store, asked=asked)
        if for_builds or project is not None:
            bundle_file.allow_for_builds(store, result.bundle, result.id)
        if project is None:
            return result
        notes = write_project(result, store, project)
        return replace(result, project=project.absolute(), notes=tuple(notes))
