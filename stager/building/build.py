"""The whole build: spec, lock, wheels, layers, bundle, proof; each stage is one call."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bundle.format.manifest import Layer, Manifest
from bundle.protocol.dataclass import dataclass

from ..config.load import Config
from ..config.sections import OF_NODE
from ..config.template import find_unnamed_requirements
from ..core.errors import BundleError, StagerError
from ..core.store import Store, remove
from ..core.values import Target
from ..hub.client import HubFiles, is_the_users
from ..interpreter import (
    BundledInterpreter,
    find_compiler,
    find_interpreter,
    make_bundled_interpreter,
)
from ..layers.bytecode import Compiler
from ..layers.layer_build import MadeLayers, make_layers
from ..layers.layer_file import list_top_modules
from ..layers.prune import Pruned, notes_on_patterns, sum_notes
from ..layers.source import LayerSource, layer_id
from ..lock.lock import ResolveOptions
from ..lock.pylock import Lock, PackageChanges, compare_packages, read_lock
from ..lock.spec import Spec
from ..pack import bundle_file
from ..pack.bundle import Contents, Packed, list_file_needs, pack, read_stored_head
from ..pack.bundle_file import ChosenBundle, Newest
from ..pack.node_program import find_compiled_program
from ..pack.proof import Proof, Wanted, prove
from ..wheels import WheelSource
from .current_bundle import Listener, digest_inputs, list_project_sources, lock_path, offline_root
from .layer_sources import BundledWheels, advise_behind_air_gap, make_hub_sources
from .project_lock import (
    ensure_lock,
    fetch_decompressor,
    lock_assets,
    read_buildable_spec,
    sort_upgrades,
)

REPORTED = ("torch", "transformers", "datasets", "numpy")  # by a probe, where they are present


def _list_requested(spec: Spec, lock: Lock) -> tuple[str, ...]:
    """Return the user's requirements; all packages of a lock without requirements."""
    requested = [*spec.requirements] if spec.pylock is None else [one.name for one in lock.files]
    if spec.uv_lock is not None:
        locked = {file.name for file in lock.files}
        requested += [name for name in spec.uv_lock.direct() if name in locked]
    return (*requested, *(parse_wheel_filename(wheel)[0] for wheel, _ in lock.sources))


def _list_checked(
    config: Config, requested: Sequence[str], layers: Sequence[Layer], store: Store
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the packages to report, and the modules that must import: as set, else theirs."""
    names = [canonicalize_name(Requirement(text).name) for text in requested]
    wheels = {layer.name: layer for layer in layers if layer.kind == "wheel"}
    reported = tuple(name for name in dict.fromkeys([*REPORTED, *names]) if name in wheels)
    if config.environment.imports:
        return reported, config.environment.imports
    modules: list[str] = []
    for name in filter(names.__contains__, wheels):
        modules += list_top_modules(name, read_stored_head(store, wheels[name])[1])
    # setuptools refuses to be imported after another package has imported distutils, as pip does.
    first = sorted(dict.fromkeys(modules), key=lambda module: module != "setuptools")
    return reported, tuple(first)


_MOST_NAMED = 3  # files in a message


def find_previous_manifest(store: Store, project: Path) -> Manifest | None:
    """Return the manifest of the bundle that a project's last build made, if it can be read."""
    newest = bundle_file.find_newest(store, project)
    with suppress(StagerError):
        return bundle_file.read_manifest(newest.path) if newest else None
    return None


def _compare_manifests(old: Manifest | None, new: Manifest) -> PackageChanges:
    """Compare with the bundle before; the bytes are those of all layers that it does not have."""
    earlier = old.layers if old is not None else ()
    there = {layer.id for layer in earlier}
    before, now = (
        {one.name: (one.version, one.version, one.size) for one in layers if one.kind == "wheel"}
        for layers in (earlier, new.layers)
    )
    sent = sum(layer.size for layer in new.layers if layer.id not in there)
    return replace(compare_packages(before, now), bytes=sent)


def describe_changed_files(
    old: Manifest, trees: Sequence[LayerSource], store: Store, target: Target
) -> str:
    """Return which files differ from those in the project's bundle, in parentheses, or nothing."""
    was = _list_shipped(old, store)
    now: Mapping[str, str] = was
    for one in trees:
        if one.kind == "project" and one.tree is not None:  # else nobody has looked at its files
            paths = [file.path for file in one.tree.files]
            now = dict(zip(paths, one.contents, strict=True))
    there = {layer.id for layer in old.layers}
    changed = {*dict(was.items() ^ now.items())}
    changed |= {
        one.name for one in trees if one.kind == "asset" and layer_id(one, target) not in there
    }
    return _name_some(changed, now.keys() - was.keys()) if changed else ""


def _name_some(changed: Set[str], new: Set[str]) -> str:
    named = ", ".join(sorted(changed)[:_MOST_NAMED])
    if len(changed) > _MOST_NAMED:
        named += f" and {len(changed) - _MOST_NAMED} more"
    if changed <= new and not any(path.endswith(".py") for path in changed):
        named += "; if a run wrote that, name it in project.outputs, or it is sent to the nodes"
    return f" ({named})"


def _list_shipped(old: Manifest, store: Store) -> dict[str, str]:
    """Return the digests of the project's files in a bundle; empty if its layer is damaged."""
    with suppress(StagerError):
        for layer in (layer for layer in old.layers if layer.kind == "project"):
            files = read_stored_head(store, layer)[1].files
            paths = {file.path.partition("/")[2]: str(file.sha256) for file in files}
            return {path: digest for path, digest in paths.items() if path[-4:] != ".pyc"}
    return {}


@dataclass(frozen=True, kw_only=True)
class BuildOptions(ResolveOptions):
    """Options of a build."""

    locked: bool = False  # a lock that is not current is an error
    prove: bool = True
    output: Path | None = None  # gets a copy of the bundle; None for none
    sign: Path | None = None  # the SSH key that the bundle is signed with; None for none
    launcher: tuple[str, ...] = ()  # runs builds from source on a node; empty for this machine
    jobs: int | None = None  # layers made at a time; None for one for each CPU of this process


class Built(NamedTuple):
    """Result of a build."""

    packed: Packed
    lock: Lock
    made: MadeLayers
    changes: PackageChanges
    proof: Proof | None  # None if it was skipped
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """The result of ``stager build``."""

    ok: bool = True
    bundle: Path
    id: str
    packages: int
    files: int
    bundle_bytes: int
    unpacked_bytes: int
    layers_built: int
    layers_reused: int
    changes: PackageChanges
    output: Path | None  # the copy at the place that ``--output`` names; null without one
    signature: Path | None = None  # what ``--sign`` has made; null without it
    pruned: Pruned
    proved: bool
    lock: Path
    seconds: dict[str, float]


def build(config: Config, options: BuildOptions, listener: Listener) -> Built:
    """Make the project's bundle, with everything that the store has already."""
    store = Store(offline_root(config))
    earlier = find_previous_manifest(store, config.source)
    seconds: dict[str, float] = {}
    phase = partial(_time_phase, listener, seconds)

    def show(line: str) -> None:
        listener.step(line, 0, 0)

    with store.lock(lambda: listener.note(f"waiting for another build in {store.root}")):
        with phase("lock"), advise_behind_air_gap(store):
            spec = read_buildable_spec(config, options.launcher)
            own = _find_own_interpreter(config, spec, listener)
            compiler = find_compiler(spec.target, own.program if own else None)
            unnamed = find_unnamed_requirements(config.root)
            if unnamed and not config.environment.requirements:
                listener.note(
                    f"environment.requirements is empty: the bundle gets no packages; {unnamed} is "
                    f"here, but {config.source.name} does not name it"
                )
            files = HubFiles(offline=options.offline, store=store, progress=show)
            resolving, moved = sort_upgrades(config, options)
            lock = ensure_lock(config, spec, store, resolving, listener, locked=options.locked)
            lock = lock_assets(config, lock, files, listener, locked=options.locked, moved=moved)
        with phase("wheels"), advise_behind_air_gap(store):
            bundled = BundledWheels(config, spec, store, compiler, listener.note)
            find, offline = bundled.find, options.offline
            source = WheelSource(
                spec=spec, store=store, offline=offline, progress=show, elsewhere=find
            )
            wheels, decompressor = source.fetch(lock), fetch_decompressor(source, own is not None)
            bundled.take_assets(lock.assets)
        with phase("layers"):
            trees = list_project_sources(config, store, lock.path, listener.note)
            for line in (*notes_on_patterns(wheels, spec.prune), *bundled.summary()):
                listener.note(line)
            hub = make_hub_sources(lock.assets, files, spec.target)
            sources = [*map(bundled.source, wheels), *trees, *hub, *([own.source] if own else [])]
            made = _make_missing_layers(sources, spec, store, compiler, options, listener)
        with phase("bundle"):
            requested = _list_requested(spec, lock)
            reported, imports = _list_checked(config, requested, made.layers, store)
            contents = Contents(
                name=config.name,
                target=spec.target,
                wheels=wheels,
                layers=made.layers,
                decompressor=decompressor,
                packages=reported,
                imports=imports,
                bundled_glibc=own.glibc if own else None,
                files=list_file_needs(wheels, made.layers, store, spec.target, listener.note),
            )
            packed = pack(contents, store)
            find_compiled_program(
                bundle_file.node_program(packed.path, store, packed.manifest.id), store
            )
        proof = None
        if options.prove:
            with phase("proof"):
                python = compiler.program if compiler else None
                wanted = Wanted(requested, spec.overridden, python)
                proof = _prove(packed, store, spec, wanted, listener)
        made_of = digest_inputs(config, spec, trees, lock.path)
        newest = Newest(config.source, packed.path, packed.manifest.id, made_of)
        bundle_file.remember(store, newest)
    return Built(packed, lock, made, _compare_manifests(earlier, packed.manifest), proof, seconds)


def _find_own_interpreter(
    config: Config, spec: Spec, listener: Listener
) -> BundledInterpreter | None:
    setting = config.environment.interpreter
    if setting == OF_NODE:
        return None
    own = make_bundled_interpreter(find_interpreter(setting, spec.target), spec.target, spec.prune)
    if own.foreign:
        listener.note(own.note())
    return own


def _make_missing_layers(
    sources: Sequence[LayerSource],
    spec: Spec,
    store: Store,
    compiler: Compiler | None,
    options: BuildOptions,
    listener: Listener,
) -> MadeLayers:
    made = make_layers(
        [replace(source, compiler=compiler) for source in sources],
        store=store,
        target=spec.target,
        jobs=options.jobs or len(os.sched_getaffinity(0)),
        progress=lambda made, done, total: listener.step(f"{made} made", done, total),
    )
    # The layers have what was fetched for them; a cache of the user's stays.
    if any(source.hub for source in sources) and not is_the_users(store.hub, os.environ):
        remove(store.hub)
    for line in made.notes:
        listener.note(line)
    return made


@contextmanager
def _time_phase(listener: Listener, seconds: dict[str, float], name: str) -> Iterator[None]:
    listener.begin(name)
    started = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - started, 3)


def make_again(
    config: Config, spec: Spec, before: Path, listener: Listener, why: str
) -> ChosenBundle:
    """Make the bundle of a project again, in place of its previous bundle."""
    store = Store(offline_root(config))
    path = lock_path(config, spec)
    if not path.exists() or not read_lock(path, spec.target).is_current(spec):
        raise BundleError(
            f"the requirements of {config.name} have changed since its bundle was made",
            hint="build it again with `stager build`",
        )
    listener.note(f"{why}: building it again")
    packed = build(config, BuildOptions(offline=True, locked=True), listener).packed
    if packed.path != before and not bundle_file.is_named(store, before):
        is_kept = bundle_file.is_marked(before, time.time()) or not bundle_file.clear_away(before)
        stays = "which stays: a batch script or a failed job has used it, or it is in use"
        fate = stays if is_kept else "which is removed"
        listener.note(f"{packed.path.name} replaces {before.name}, {fate}")
    return ChosenBundle(path=packed.path, id=packed.manifest.id)


def build_result(built: Built, output: Path | None = None) -> BuildResult:
    """Return the result of ``stager build``."""
    manifest = built.packed.manifest
    with bundle_file.open_bundle(built.packed.path) as bundle:
        pruned = sum_notes(bundle)
    return BuildResult(
        bundle=built.packed.path,
        id=manifest.id,
        packages=sum(layer.kind == "wheel" for layer in manifest.layers),
        files=manifest.files,
        bundle_bytes=manifest.size,
        unpacked_bytes=manifest.unpacked_size,
        layers_built=built.made.built,
        layers_reused=built.made.reused,
        output=output,
        pruned=pruned,
        proved=built.proof is not None and built.proof.done,
        lock=built.lock.path,
        changes=built.changes,
        seconds=built.seconds,
    )


def _prove(packed: Packed, store: Store, spec: Spec, wanted: Wanted, listener: Listener) -> Proof:
    path, step = packed.path, listener.step
    try:
        proof = prove(
            path, packed.manifest, store=store, target=spec.target, wanted=wanted, step=step
        )
    except StagerError:
        if not packed.reused:  # a bundle that would fail on a node gets no name
            path.unlink(missing_ok=True)
        raise
    listener.note(proof.how)
    return proof
