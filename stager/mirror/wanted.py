"""The wheels that a mirror should have: those of a project's lock, or of some requirements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..building.current_bundle import Listener
from ..building.project_lock import buildable_spec, current_lock
from ..building.wheel_source import WheelSource
from ..config.environment import OF_NODE
from ..config.load import Config
from ..core.errors import ConfigError
from ..core.store import Store
from ..core.values import Wheel
from ..lock.lock import make_lock
from ..lock.pylock import Lock
from ..lock.resolve import ResolveOptions
from ..lock.spec import Spec, read_spec


@dataclass(frozen=True, kw_only=True)
class WantedWheels:
    """Wheels that a mirror should have, in the offline root."""

    wheels: tuple[Wheel, ...]
    """The wheels, with that of the decompressor, which every build needs."""
    built: Collection[str]
    """The file names of those that were built here: the next time they may have other bytes."""


def wanted_wheels(
    config: Config,
    requirements: Sequence[str],
    store: Store,
    listener: Listener,
    *,
    offline: bool,
) -> WantedWheels:
    """Fetch the wheels of requirements, or of the project's lock. The store's lock must be held.

    Args:
        config: the settings: the target, the indexes, and the project's requirements.
        requirements: what is to be mirrored in place of the project's; paths start here.
        store: the offline root, which keeps the wheels.
        listener: told the progress.
        offline: True if nothing may be fetched.

    Raises:
        StagerError: they cannot be resolved, fetched or built.
    """
    options = ResolveOptions(offline=offline, note=listener.note)
    listener.begin("lock")
    if requirements:
        spec = _spec_of(config, requirements)
        with store.scratch("lock") as scratch:
            path = scratch / "pylock.toml"
            lock = make_lock(spec, path=path, store=store, options=options)
    else:
        spec = buildable_spec(config)
        lock = current_lock(config, spec, store, options, listener, locked=False)
    listener.begin("wheels")
    source = WheelSource(spec=spec, store=store, offline=offline, progress=listener.note)
    wheels = source.of_lock(lock)
    decompressor = source.decompressor(config.environment.interpreter != OF_NODE)
    if decompressor is not None:
        wheels = (*wheels, decompressor)
    return WantedWheels(
        wheels=tuple({wheel.path.name: wheel for wheel in wheels}.values()),
        built=_built(lock, wheels),
    )


def _spec_of(config: Config, requirements: Sequence[str]) -> Spec:
    """Return the spec of some requirements, for the target and the indexes of the project.

    Raises:
        ConfigError: they cannot be read, or those of the project cannot.
    """
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
