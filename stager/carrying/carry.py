"""``stager export`` and ``stager import``: from one offline root into another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ..building.bundle_copy import refuse_in_project
from ..building.current_bundle import Listener, current_bundle, lock_path, offline_root
from ..config.load import Config
from ..core.store import Store
from ..core.suffixes import CARRIED_SUFFIX
from ..lock.spec import read_spec
from ..pack import existing
from .exports import Base, ExportResult, base_manifest, export
from .imports import ImportResult, import_file
from .project_files import refuse_used, write_project
from .tool import carried_tool


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export."""

    output: Path | None = None
    """The file to write; None for one in the current directory."""
    base: Base = field(default_factory=Base)
    """The bundle that the other side has."""
    with_tool: bool = False
    """True if stager itself comes along."""
    offline: bool = False
    """True if nothing may be fetched for that."""


def export_project(config: Config, options: ExportOptions, listener: Listener) -> ExportResult:
    """Write the project's bundle, or what the other side lacks of it, to a file to carry.

    Raises:
        StagerError: there is no bundle, the base is not known, or the file cannot be written.
    """
    if options.output is not None:
        refuse_in_project(options.output, config.project.path, CARRIED_SUFFIX)
    chosen = current_bundle(config, listener)
    store = Store(offline_root(config))
    spec = read_spec(config)
    base = base_manifest(store, config.name, options.base)
    output = options.output or _named(existing.manifest_of(chosen.path, chosen.id).id, config)
    with (
        store.lock(lambda: listener.note(f"waiting for another build in {store.root}")),
        store.scratch("export") as scratch,
    ):
        tool = None
        if options.with_tool:
            listener.begin("tool")
            tool = carried_tool(
                spec,
                config,
                store,
                scratch,
                offline=options.offline,
                progress=listener.note,
            )
        listener.begin("export")
        lock = lock_path(config, spec)
        if spec.pylock is not None and not lock.exists():
            lock = spec.pylock
        return export(chosen, output.absolute(), store, lock=lock, base=base, tool=tool)


def _named(key: str, config: Config) -> Path:
    """Return the file that an export is written to where none is named."""
    return Path(f"{config.name}-{key[:12]}{CARRIED_SUFFIX}")


def import_bundle(
    config: Config, path: Path, listener: Listener, *, asked: str = "", project: Path | None = None
) -> ImportResult:
    """Add the bundle of a carried file to the offline root; write its project out, if asked to.

    Args:
        config: the settings that name the offline root.
        path: the carried file.
        listener: told the progress.
        asked: the id that the bundle must have, or its first digits; empty for any.
        project: a new folder for the project's code; None for none.

    Raises:
        StagerError: see :func:`stager.carrying.imports.import_file` and
            :func:`stager.carrying.project_files.write_project`.
    """
    store = Store(offline_root(config))
    if project is not None:
        refuse_used(project)
    with store.lock(lambda: listener.note(f"waiting for another build in {store.root}")):
        listener.begin("import")
        result = import_file(path, config, store, asked=asked)
        if project is None:
            return result
        notes = write_project(result, store, project)
        return replace(result, project=project.absolute(), notes=tuple(notes))
