"""The wheels that a mirror should have: those of a project's lock, or of some requirements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..building.current_bundle import Listener
from ..building.project_lock import WheelSource, buildable_spec, current_lock
from ..config.load import Config
from ..config.sections import OF_NODE
from ..core.errors import ConfigError
from ..core.store import Store
from ..core.values import Wheel
from ..lock.lock import ResolveOptions, make_lock
from ..lock.pylock import Lock
from ..lock.spec import Spec, read_spec


@dataclass(frozen=True, kw_only=True)
class WantedWheels:
    """Wheels that a mirror should have, in the offline root."""

    wheels: tuple[Wheel, ...]
    """The wheels, with that of the decompressor, which every build needs."""
    built: Collection[str]
    """The file names of those that were built here: the next time they may have other bytes."""


@dataclass(frozen=True, kw_only=True)
class MirrorTargets:
    """The Pythons and platforms that a mirror has wheels for, each with each."""

    pythons: tuple[str, ...] = ()
    """Versions of Python, as ``3.12``; empty for the project's."""
    platforms: tuple[str, ...] = ()
    """Platforms, as ``manylinux_2_28_x86_64``; empty for the project's."""

    def settings(self, config: Config) -> list[Config]:
        """Return the settings for each target."""
        environment = config.environment
        return [
            replace(config, environment=replace(environment, python=python, platform=platform))
            for platform in dict.fromkeys(self.platforms or (environment.platform,))
            for python in dict.fromkeys(self.pythons or (environment.python,))
        ]


@dataclass(frozen=True, kw_only=True)
class MirrorRequest:
    """What a mirror is to be given, and for which machines."""

    requirements: tuple[str, ...] = ()
    """What is to be mirrored in place of the project's requirements; paths start here."""
    targets: MirrorTargets = field(default_factory=MirrorTargets)
    """The Pythons and platforms."""
    offline: bool = False
    """True if nothing may be fetched."""


def wanted_wheels(
    config: Config, wanted: MirrorRequest, store: Store, listener: Listener
) -> WantedWheels:
    """Fetch the wheels of requirements, or of the project's lock. The store's lock must be held.

    Raises:
        StagerError: they cannot be resolved, fetched or built.
    """
    wheels: dict[str, Wheel] = {}
    built: set[str] = set()
    targets = wanted.targets.settings(config)
    for settings in targets:
        found = _of_target(config, settings, wanted, store, listener)
        wheels.update((wheel.path.name, wheel) for wheel in found.wheels)
        built.update(found.built)
    return WantedWheels(wheels=tuple(wheels.values()), built=built)


def _of_target(
    project: Config, settings: Config, wanted: MirrorRequest, store: Store, listener: Listener
) -> WantedWheels:
    """Fetch the wheels for one target; ``settings`` are the project's with that target."""
    options = ResolveOptions(offline=wanted.offline, note=listener.note)
    listener.begin("lock")
    asked = wanted.requirements
    spec = _spec_of(settings, asked) if asked else buildable_spec(settings)
    if settings != project:
        listener.note(f"for Python {spec.target.python} on {spec.target.platform}")
    if asked or spec.target != read_spec(project).target:
        with store.scratch("lock") as scratch:
            lock = make_lock(spec, path=scratch / "pylock.toml", store=store, options=options)
    else:
        lock = current_lock(project, spec, store, options, listener, locked=False)
    listener.begin("wheels")
    source = WheelSource(spec=spec, store=store, offline=wanted.offline, progress=listener.note)
    wheels = source.of_lock(lock)
    decompressor = source.decompressor(settings.environment.interpreter != OF_NODE)
    if decompressor is not None:
        wheels = (*wheels, decompressor)
    return WantedWheels(wheels=wheels, built=_built(lock, wheels))


def _spec_of(config: Config, requirements: Sequence[str]) -> Spec:
    """Return the spec of requirements, for the project's target and indexes."""
    environment = replace(config.environment, requirements=tuple(requirements), constraints=())
    try:
        asked = read_spec(replace(config, root=Path.cwd(), environment=environment))
    except ConfigError as exc:
        raise ConfigError(
            "the requirements on the command line cannot be used",
            hint="name packages ('numpy>=2'), requirement files, or what else "
            "environment.requirements takes; see docs/settings.md",
            context=exc.context or (exc.message,),
        ) from exc
    return replace(asked, indexes=read_spec(config).all_indexes.plus(asked.indexes))


def _built(lock: Lock, wheels: Sequence[Wheel]) -> Collection[str]:
    """Return the file names of the wheels that came from no index."""
    from_index = {file.sha256 for file in lock.files if file.is_wheel}
    own = {name for name, _ in lock.sources}
    names = (wheel.path.name for wheel in wheels if wheel.sha256 not in from_index)
    return own.union(names)
