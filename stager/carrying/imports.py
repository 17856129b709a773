"""Taking a bundle out of a carried file, with the bundle it is based on, into the offline root."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from bundle.driver.code_store import check_files, write_files
from bundle.environment.unpack import Fresh, write_layers
from bundle.format.archive import END, BundleFile
from bundle.format.layer import Index, LayerError, check_links
from bundle.format.manifest import MANIFEST_NAME
from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.problem import NodeError

from ..building.current_bundle import LOCK_NAME, Listener, lock_path, offline_root
from ..config import inline_script
from ..config.load import Config, find, load
from ..core.errors import BundleError, ConfigError, StagerError
from ..core.files import BUNDLE_SUFFIX, open_regular, read_bytes, write_output
from ..core.store import Store, convert_store_errors, remove
from ..inventory.provenance import find_lock
from ..layers.layer_file import decompress_frame, decompress_index
from ..lock.pylock import read_lock
from ..lock.spec import read_spec
from ..pack import bundle_file
from ..pack.bundle import bundle_path
from ..pack.bundle_file import ChosenBundle, is_sealed, seal
from ..pack.members import InspectedSignature, MemberError, make_reader, write_member
from ..pack.node_program import find_compiled_program
from ..trust import decide, inspect_signature, locate_signature
from .exports import CARRIED_LOCK, CODE, SIGNATURE_NAME, CarriedFile, list_shared_members


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """The result of ``stager import``."""

    bundle: Path
    id: str
    name: str
    bytes: int
    layers: int
    layers_here: int
    lock: Path
    already_here: bool  # true if the bundle was here; its lock and signature are the file's now
    signature: InspectedSignature | None  # its signature; null if there is none
    project: Path | None = None  # the folder with the project's code, if that was asked for
    notes: tuple[str, ...] = ()  # what a person should know before they build it there


def import_bundle(
    config: Config,
    path: Path,
    listener: Listener,
    *,
    asked: str = "",
    project: Path | None = None,
    for_builds: bool = False,
) -> ImportResult:
    """Add the bundle of a carried file to the offline root; write its project out, if asked to."""
    store = Store(offline_root(config))
    if project is not None:
        _refuse_used(project)
    with store.lock(lambda: listener.note(f"waiting for another build in {store.root}")):
        listener.begin("import")
        with _open(path) as handle:
            carried = CarriedFile(path, handle)
            key = carried.manifest.id
            if not key.startswith(asked):
                raise BundleError(
                    f"{path} does not carry the bundle that was asked for: its id is {key}, "
                    f"expected {asked}",
                    hint="name the right file, or leave out --id",
                )
            result = _take(carried, config, store)
        if for_builds or project is not None:
            bundle_file.allow_for_builds(store, result.bundle, result.id)
        if project is None:
            return result
        notes = _write_project(result, store, project)
        return replace(result, project=project.absolute(), notes=tuple(notes))


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as exc:
        raise BundleError(
            f"{path} cannot be read: {exc.strerror or exc}", hint="name the exported file"
        ) from exc


def read_compiled_code(path: Path) -> dict[str, bytes]:
    """Return the compiled code of a carried file; BundleError if it is damaged, or has none."""
    with _open(path) as handle:
        parts = CarriedFile(path, handle).parts()
        code = {name[len(CODE) :]: data for name, data in parts if name.startswith(CODE)}
    if not code:
        raise BundleError(
            f"{path} carries no compiled code", hint="`stager export --with-code` adds it"
        )
    try:
        check_files(code)
    except ValueError as exc:
        raise BundleError(f"{path}: {exc}", hint="import it without --with-code") from exc
    return code


def import_compiled_code(config: Config, code: Mapping[str, bytes]) -> None:
    """Let this user's jobs use compiled code; StagerError if it cannot be written."""
    folder = Store(offline_root(config)).compiled_code
    with convert_store_errors(folder):
        write_files(str(folder), code)


def _take(carried: CarriedFile, config: Config, store: Store) -> ImportResult:
    manifest = carried.manifest
    final = bundle_path(store, manifest)
    lock = bundle_file.find_imported_lock(final)
    here = is_sealed(store, final, manifest)
    beside = dict(carried.parts())
    signature = beside.get(SIGNATURE_NAME)
    if config.trust.require:
        text = None if signature is None else signature.decode("ascii", "replace")
        what, place = f"the bundle in {carried.path}", f"{SIGNATURE_NAME} in that file"
        decide(config, text, manifest.id, what=what, place=place)
    if not here:
        store.require_space(manifest.size, "the bundle")
    with store.publish(lock) as partial:  # first: it tells an import from a build's bundle
        partial.write_bytes(beside[CARRIED_LOCK])
        if here:
            _refuse_other_lock(carried, final, partial)
    if not here:
        with contextlib.ExitStack() as undo:
            undo.callback(lock.unlink, missing_ok=True)
            _write_bundle(carried, store, final)
            undo.callback(final.unlink, missing_ok=True)
            _refuse_other_lock(carried, final, lock)
            undo.pop_all()
        seal(store, final, manifest)  # only now it counts as checked
    if signature is not None:
        with store.publish(locate_signature(final)) as partial:
            partial.write_bytes(signature)
    bundle_file.remember_import(store, manifest.name, final)
    # As a build does: whoever may only read this offline root could not make them.
    find_compiled_program(bundle_file.node_program(final, store, manifest.id), store)
    layers = sum(layer.member not in carried.label.left_out for layer in manifest.layers)
    return ImportResult(
        bundle=final,
        id=manifest.id,
        name=manifest.name,
        bytes=manifest.size,
        layers=layers,
        layers_here=len(manifest.layers) - layers,
        lock=lock,
        already_here=here,
        signature=inspect_signature(config, final, manifest.id),
    )


def _refuse_other_lock(carried: CarriedFile, bundle: Path, lock: Path) -> None:
    if find_lock(ChosenBundle(path=bundle, id=carried.manifest.id), (lock,)) is None:
        raise BundleError(
            f"{carried.path}: the lock in it is not the one that its bundle was made from",
            hint="carry the file again; if it is as it was exported, export it once more",
        )


def _write_bundle(carried: CarriedFile, store: Store, final: Path) -> None:
    manifest = carried.manifest
    with contextlib.ExitStack() as opened_bundles:
        sources = _open_sources(carried, store, opened_bundles)
        with store.publish(final) as partial, partial.open("wb") as out:
            for name, size in manifest.members():
                if name == MANIFEST_NAME:
                    pieces = iter((manifest.to_bytes(),))
                elif name in sources:
                    pieces = _copy_from_source(carried, name, sources[name])
                else:
                    pieces = carried.pieces(name, size)
                write_member(out, name, size, pieces)
            carried.end()
            out.write(END)


def _copy_from_source(carried: CarriedFile, name: str, source: BundleFile) -> Iterator[bytes]:
    try:
        yield from carried.members.pieces(name, make_reader(source, name))
    except (MemberError, NodeError) as exc:
        why = exc.problem.why if isinstance(exc, NodeError) else str(exc)
        raise BundleError(
            f"{source.path}, which the carried file builds on, is damaged: {why}",
            hint="import a file of `stager export` without --base and --since",
        ) from exc


def _open_sources(
    carried: CarriedFile, store: Store, opened_bundles: contextlib.ExitStack
) -> Mapping[str, BundleFile]:
    label = carried.label
    left_out = set(label.left_out)
    wanted = {item for item in list_shared_members(carried.manifest) if item[0] in left_out}
    sources: dict[str, BundleFile] = {}
    for path in sorted(store.bundles.glob(f"*{BUNDLE_SUFFIX}")):
        if not wanted:
            break
        with contextlib.suppress(BundleError):  # this one is damaged, or of another format
            bundle = opened_bundles.enter_context(bundle_file.open_bundle(path))
            found = wanted & list_shared_members(bundle.manifest)
            sources |= {name: bundle for name, _, _ in found}
            wanted -= found
    if wanted or left_out - sources.keys():
        raise BundleError(
            f"{carried.path} carries only what is new since the bundle {label.base[:12]}, and "
            f"{format_count(len(wanted), 'part')} of that cannot be found in {store.root}",
            hint="import the file that carries that first, or export without --base and --since",
        )
    return sources


_WRITTEN = ("project", "assets")  # folders of an environment that the project's folder gets
_ALL = "all"
_LINK = "link"
_STILL_RUNS = "the bundle was imported, and runs; to edit the project, bring its folder itself"


def _refuse_used(folder: Path) -> None:
    fault, hint = "", "name a new directory"
    try:
        if folder.is_symlink():  # what is written takes its place by a rename
            fault, hint = "it is a symbolic link", "name the directory itself, or a new one"
        elif any(folder.iterdir()):
            fault = "there are files in it already"
    except FileNotFoundError:
        return
    except OSError as exc:
        fault = exc.strerror or str(exc)
    if fault:
        raise ConfigError(f"--project {folder}: {fault}", hint=hint)


def _write_project(imported: ImportResult, store: Store, folder: Path) -> list[str]:
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        with bundle_file.open_bundle(imported.bundle, imported.id) as bundle:
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
    return _write_lock(folder, imported, store.root)


def _unpack(bundle: BundleFile, place: Path) -> None:
    final = place / _ALL
    final.mkdir()
    for name in _WRITTEN:
        (place / name).symlink_to(_ALL)
    fresh = list(_find_layers(bundle))
    refuse_clashes([index for _, index, _ in fresh])
    links = [link for _, index, _ in fresh for link in index.links]
    files = [entry.path for _, _, entries in fresh for entry in entries]
    for path in (*files, *(link.path for link in links)):  # before one could be followed
        (place / path).parent.mkdir(parents=True, exist_ok=True)
    write_layers(bundle, str(place), fresh, decompress_frame, processes=1, compare=True)
    for link in links:
        (place / link.path).symlink_to(link.target)


def refuse_clashes(indexes: Sequence[Index]) -> None:
    """Refuse content that cannot lie in one folder, or whose links lead out of it together."""
    seen: dict[str, tuple[object, str]] = {}
    for index in indexes:
        content = [(entry.path, (entry.size, entry.sha256)) for entry in index.files]
        for place, what in [*content, *((link.path, (_LINK, link.target)) for link in index.links)]:
            path = place.partition("/")[2]
            if seen.setdefault(path, what) != what:
                raise StagerError(
                    f"two different files of the bundle would be {path} in the project's folder: "
                    "one lay in the project, the other elsewhere (assets.paths, project.path)",
                    hint=_STILL_RUNS,
                )
    try:
        check_links({f"{_ALL}/{at}": goal for at, (kind, goal) in seen.items() if kind == _LINK})
    except LayerError as exc:
        raise StagerError(
            f"the project's links lead out of its folder: {exc}", hint=_STILL_RUNS
        ) from exc


def _find_layers(bundle: BundleFile) -> Iterator[Fresh]:
    for layer in bundle.manifest.layers:
        # A model or data set, which a lock names, has a version.
        if layer.kind in ("project", "asset") and not layer.version:
            index = bundle.index(layer, bundle.head(layer), decompress_index)
            paths = [one.path for one in index.files] + [link.path for link in index.links]
            if {path.partition("/")[0] for path in paths} <= {*_WRITTEN}:
                # Bytecode was added when the layer was made.
                yield layer, index, [one for one in index.files if not one.path.endswith(".pyc")]


def _write_lock(folder: Path, imported: ImportResult, root: Path) -> list[str]:
    name, lock = imported.name, read_bytes(imported.lock)
    settings = find(folder)
    if settings is not None and settings.parent == folder:
        try:
            return list(_write_beside_settings(lock, load(folder), root))
        except StagerError as exc:
            if not os.path.lexists(folder / LOCK_NAME):
                _write(folder / LOCK_NAME, lock)
            return [f"a build in {folder} would fail: {exc.message}", *exc.context]
    scripts = [path for path in folder.glob("*.py") if inline_script.make_script_name(path) == name]
    if inline_script.find_script(list(map(str, scripts))) is not None:
        _write(folder / f"pylock.{name}.toml", lock)
        return []
    _write(folder / LOCK_NAME, lock)
    return [
        f"there is no stager.toml in {folder}: the project's settings lay outside of project.path, "
        "and are not in the bundle; write one before you build"
    ]


def _write(place: Path, lock: bytes) -> None:
    with write_output(place, hint="write the lock there by hand") as handle:
        handle.write(lock)


def _write_beside_settings(data: bytes, config: Config, root: Path) -> Iterator[str]:
    spec = read_spec(config)
    place = lock_path(config, spec)
    _write(place, data)
    lock = read_lock(place, spec.target)
    here, there = spec.target.platform, lock.target.platform
    if here != there:
        yield (
            f"the packages are for {there}, this machine is {here}: to build here, set "
            f'environment.platform = "{there}" in {config.source}'
        )
    elif not lock.is_current(spec):
        yield f"{place} does not fit {config.source}: a build makes another lock, from an index"
    if offline_root(config) != root:
        yield (
            f"{config.source} names another offline root, {offline_root(config)}, which does not "
            f"have the packages: to build here, set OFFLINE_ROOT={root}"
        )
