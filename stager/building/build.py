"""The whole build: spec, lock, wheels, layers, bundle, proof; each stage is one call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bundle.format.manifest import Layer

from ..config.load import Config
from ..config.template import unnamed_requirements
from ..core.errors import BundleError, ConfigError, ResolveError, StagerError, WheelError
from ..core.store import Store
from ..core.values import Wheel
from ..layers.build import MadeLayers, make_layers
from ..layers.modules import top_modules
from ..layers.prune import Pruned
from ..layers.source import LayerSource, project_sources
from ..lock.lock import Lock, ResolveOptions, make_lock, read_lock
from ..lock.resolver import ResolverName
from ..lock.spec import Spec, read_spec
from ..pack import existing
from ..pack.bundle import Contents, Packed, pack, stored_index
from ..pack.compiled_program import compiled_program
from ..pack.decompressor import decompressor_lock
from ..pack.existing import ChosenBundle, Newest
from ..pack.prove import Proof, prove
from ..wheels.fetch import fetch
from .current_bundle import Listener, inputs, lock_path, offline_root

REPORTED = ("torch", "transformers", "datasets", "numpy")
"""Packages whose versions a probe always reports where they are present."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build."""

    resolver: ResolverName = "auto"
    """The program that resolves; ``auto`` takes uv if it is installed."""
    offline: bool = False
    """True if nothing may be fetched."""
    locked: bool = False
    """True if a lock that is not current is an error."""
    prove: bool = True
    """True to prove that nothing is missing."""
    jobs: int | None = None
    """Number of layers made at a time; None for one for each CPU of this process."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """Result of a build."""

    packed: Packed
    """The bundle."""
    lock: Lock
    """The lock it was made from."""
    made: MadeLayers
    """Its layers."""
    proof: Proof | None
    """The proof that nothing is missing; None if it was skipped."""
    seconds: dict[str, float]
    """Time taken by phase."""


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """The result of ``stager build``."""

    ok: bool = True
    """True: a build that fails is an error."""
    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    packages: int
    """Number of packages in it."""
    files: int
    """Number of files in it."""
    bundle_bytes: int
    """Its size in bytes."""
    unpacked_bytes: int
    """The size of its files in bytes."""
    layers_built: int
    """Layers that were made."""
    layers_reused: int
    """Layers that existed."""
    pruned: Pruned
    """What ``environment.prune`` left out."""
    proved: bool
    """True if it was proved that nothing is missing."""
    lock: Path
    """The lock."""
    seconds: dict[str, float]
    """Duration of each phase."""


@dataclass(frozen=True, kw_only=True)
class LockResult:
    """The result of ``stager lock``."""

    lock: Path
    """The lock."""
    packages: int
    """Number of packages in it."""


def lock_project(config: Config, options: BuildOptions, listener: Listener) -> LockResult:
    """Make the project's lock anew.

    Raises:
        StagerError: see :func:`stager.lock.spec.read_spec` and :func:`stager.lock.lock.make_lock`.
    """
    store = Store(offline_root(config))
    spec = read_spec(config)
    listener.begin("lock")
    with store.lock():
        lock = _make_lock(config, spec, store, options)
    return LockResult(lock=lock.path, packages=len(lock.files))


def build(config: Config, options: BuildOptions, listener: Listener) -> Built:
    """Make the project's bundle, with everything that the store has already.

    Raises:
        StagerError: an expected failure; see the stages.
    """
    _refuse_unsupported(config)
    store = Store(offline_root(config))
    phase = _Phases(listener)

    def fetched(line: str) -> None:
        listener.step(line, 0, 0)

    with store.lock(lambda: listener.note(f"waiting for another build in {store.root}")):
        with phase("lock"):
            spec = read_spec(config)
            _note_no_requirements(config, listener)
            lock = _current_lock(config, spec, store, options)
        with phase("wheels"):
            wheels = fetch(
                lock, store, offline=options.offline, progress=fetched, indexes=spec.indexes
            )
            decompressor = _decompressor(spec, store, options, fetched)
        with phase("layers"):
            trees = project_sources(config, (store.root, lock.path), listener.note)
            made = make_layers(
                [*(LayerSource.of_wheel(wheel, spec.prune) for wheel in wheels), *trees],
                store=store,
                target=spec.target,
                jobs=options.jobs or len(os.sched_getaffinity(0)),
                progress=listener.step,
            )
            for line in made.notes:
                listener.note(line)
        with phase("bundle"):
            requested = _requested(spec, lock)
            contents = Contents(
                name=config.name,
                target=spec.target,
                wheels=wheels,
                layers=made.layers,
                decompressor=decompressor,
                packages=_reported(requested, made.layers),
                imports=_imports(config, requested, made.layers, store),
            )
            packed = pack(contents, store)
            compiled_program(existing.node_program(packed.path, store, packed.manifest.id), store)
        proof = None
        if options.prove:
            with phase("proof"):
                proof = _proved(packed, store, spec, requested)
                listener.note(proof.how)
        newest = Newest(
            path=packed.path, id=packed.manifest.id, inputs=inputs(spec, trees, lock.path)
        )
        existing.remember(store, config.source, newest)
    return Built(packed=packed, lock=lock, made=made, proof=proof, seconds=phase.seconds)


class _Phases:
    """Announces phases and measures them."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._listener.begin(name)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 3)


def make_again(config: Config, spec: Spec, before: Path, listener: Listener) -> ChosenBundle:
    """Make the bundle of a project whose files have changed, in place of its previous bundle.

    Raises:
        StagerError: the requirements have changed too, or it cannot be made.
    """
    store = Store(offline_root(config))
    path = lock_path(config, spec)
    if not path.exists() or not read_lock(path, spec.target).is_current(spec):
        raise BundleError(
            f"the requirements of {config.name} have changed since its bundle was made",
            hint="build it again with `stager build`",
        )
    listener.note("the project has changed since its bundle was made: building it again")
    packed = build(config, BuildOptions(offline=True, locked=True), listener).packed
    if packed.path != before and not existing.is_named(store, before):
        existing.clear_away(before)
        listener.note(f"{packed.path.name} replaces {before.name}, which is removed")
    return ChosenBundle(path=packed.path, id=packed.manifest.id)


def build_result(built: Built) -> BuildResult:
    """Return the result of ``stager build``."""
    manifest = built.packed.manifest
    return BuildResult(
        bundle=built.packed.path,
        id=manifest.id,
        packages=sum(layer.kind == "wheel" for layer in manifest.layers),
        files=manifest.files,
        bundle_bytes=built.packed.size,
        unpacked_bytes=manifest.unpacked_size,
        layers_built=built.made.built,
        layers_reused=built.made.reused,
        pruned=existing.pruned(built.packed.path),
        proved=built.proof is not None and built.proof.done,
        lock=built.lock.path,
        seconds=built.seconds,
    )


def _refuse_unsupported(config: Config) -> None:
    hub = [f"assets.models: {name}" for name in config.assets.models]
    hub += [f"assets.datasets: {name}" for name in config.assets.datasets]
    if hub:
        raise ConfigError(
            "models and data sets cannot be fetched from a hub by this version",
            hint="download them yourself and name the folders in assets.paths",
            context=hub,
        )


def _note_no_requirements(config: Config, listener: Listener) -> None:
    """Say that a requirements file is not used, where a project asks for no packages."""
    name = unnamed_requirements(config.root)
    if name and not config.environment.requirements:
        listener.note(
            f"environment.requirements is empty: the bundle gets no packages; {name} is here, but "
            f"{config.source.name} does not name it"
        )


def _current_lock(config: Config, spec: Spec, store: Store, options: BuildOptions) -> Lock:
    """Return the lock on disk if it matches the spec, else a new one."""
    path = lock_path(config, spec)
    if path.exists():
        lock = read_lock(path, spec.target)
        if lock.is_current(spec):
            return lock
    if options.locked:
        state = "is out of date" if path.exists() else "does not exist"
        raise ResolveError(
            f"the lock {path} {state}, and --locked does not allow making it",
            hint="run `stager lock`, review the difference, and build again",
        )
    return _make_lock(config, spec, store, options)


def _make_lock(config: Config, spec: Spec, store: Store, options: BuildOptions) -> Lock:
    resolving = ResolveOptions(resolver=options.resolver, offline=options.offline)
    return make_lock(spec, path=lock_path(config, spec), store=store, options=resolving)


def _decompressor(
    spec: Spec, store: Store, options: BuildOptions, progress: Callable[[str], None]
) -> Wheel | None:
    lock = decompressor_lock(spec.target)
    if lock is None:
        return None
    try:
        (wheel,) = fetch(
            lock, store, offline=options.offline, progress=progress, indexes=spec.indexes
        )
    except WheelError as exc:
        (file,) = lock.files
        raise WheelError(
            "the zstd decompressor that every bundle carries cannot be obtained",
            hint=f"put {file.filename} into {store.wheels}, or build once where an index has it",
            context=exc.context or (exc.message,),
        ) from exc
    return wheel


def _requested(spec: Spec, lock: Lock) -> tuple[str, ...]:
    """Return the user's requirements; all packages of a lock without requirements."""
    requested = [*spec.requirements]
    if spec.pylock is not None:
        requested = [file.name for file in lock.files]
    for wheel, _ in lock.sources:
        requested.append(parse_wheel_filename(wheel)[0])
    return tuple(requested)


def _reported(requested: Sequence[str], layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return the packages whose versions a probe reports."""
    present = {layer.name for layer in layers if layer.kind == "wheel"}
    names = [canonicalize_name(Requirement(text).name) for text in requested]
    return tuple(name for name in dict.fromkeys([*REPORTED, *names]) if name in present)


def _imports(
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
    return tuple(dict.fromkeys(modules))


def _proved(packed: Packed, store: Store, spec: Spec, requested: Sequence[str]) -> Proof:
    try:
        return prove(
            packed.path, packed.manifest, store=store, target=spec.target, requirements=requested
        )
    except StagerError:
        if not packed.reused:  # a bundle that would fail on a node gets no name
            packed.path.unlink(missing_ok=True)
        raise
