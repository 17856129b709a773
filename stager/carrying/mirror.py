"""The wheels that a mirror should have: those of a project's lock, or of some requirements."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from bundle.protocol.counts import format_count
from bundle.protocol.digest import Digest

from ..building.current_bundle import Listener, offline_root
from ..building.project_lock import WheelSource, ensure_lock, read_buildable_spec
from ..config.load import Config
from ..config.sections import OF_NODE
from ..core.errors import ConfigError, WheelError
from ..core.store import Store, digest_file
from ..core.values import Wheel
from ..lock.lock import ResolveOptions, make_lock
from ..lock.pylock import Lock
from ..lock.spec import Spec, read_spec
from .mirror_folder import ListedWheel, MirrorFolder, describe_wheel, lock_mirror, refuse_other


@dataclass(frozen=True, kw_only=True)
class WantedWheels:
    """Wheels that a mirror should have, in the offline root."""

    wheels: tuple[Wheel, ...]
    """The wheels, with that of the decompressor, which every build needs."""
    built: Collection[str]
    """The file names of those that were built here: the next time they may have other bytes."""


@dataclass(frozen=True)
class MirrorRequest:
    """What a mirror is to be given, and for which machines."""

    requirements: tuple[str, ...] = ()
    """What is to be mirrored in place of the project's requirements; paths start here."""
    pythons: tuple[str, ...] = ()
    """Versions of Python, as ``3.12``; empty for the project's."""
    platforms: tuple[str, ...] = ()
    """Platforms, as ``manylinux_2_28_x86_64``, each with each Python; empty for the project's."""
    offline: bool = False
    """True if nothing may be fetched."""

    def settings(self, config: Config) -> list[Config]:
        """Return the settings for each target."""
        environment = config.environment
        return [
            replace(config, environment=replace(environment, python=python, platform=platform))
            for platform in dict.fromkeys(self.platforms or (environment.platform,))
            for python in dict.fromkeys(self.pythons or (environment.python,))
        ]


def fetch_wanted_wheels(
    config: Config, wanted: MirrorRequest, store: Store, listener: Listener
) -> WantedWheels:
    """Fetch the wheels of requirements, or of the project's lock. The store's lock must be held."""
    wheels: dict[str, Wheel] = {}
    built: set[str] = set()
    for settings in wanted.settings(config):
        found = _fetch_for_target(config, settings, wanted, store, listener)
        wheels.update((wheel.path.name, wheel) for wheel in found.wheels)
        built.update(found.built)
    return WantedWheels(wheels=tuple(wheels.values()), built=built)


def _fetch_for_target(
    project: Config, settings: Config, wanted: MirrorRequest, store: Store, listener: Listener
) -> WantedWheels:
    """Fetch the wheels for one target; ``settings`` are the project's with that target."""
    options = ResolveOptions(offline=wanted.offline, note=listener.note)
    listener.begin("lock")
    asked = wanted.requirements
    spec = _spec_of(settings, asked) if asked else read_buildable_spec(settings)
    if settings != project:
        listener.note(f"for Python {spec.target.python} on {spec.target.platform}")
    if asked or spec.target != read_spec(project).target:
        with store.scratch("lock") as scratch:
            lock = make_lock(spec, path=scratch / "pylock.toml", store=store, options=options)
    else:
        lock = ensure_lock(project, spec, store, options, listener, locked=False)
    listener.begin("wheels")
    source = WheelSource(spec=spec, store=store, offline=wanted.offline, progress=listener.note)
    wheels = source.fetch_lock(lock)
    decompressor = source.decompressor(settings.environment.interpreter != OF_NODE)
    if decompressor is not None:
        wheels = (*wheels, decompressor)
    return WantedWheels(wheels=wheels, built=_list_built_wheels(lock, wheels))


def _spec_of(config: Config, requirements: Sequence[str]) -> Spec:
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
    return replace(asked, indexes=read_spec(config).all_indexes.merge(asked.indexes))


def _list_built_wheels(lock: Lock, wheels: Sequence[Wheel]) -> Collection[str]:
    from_index = {file.sha256 for file in lock.files if file.is_wheel}
    own = {name for name, _ in lock.sources}
    names = (wheel.path.name for wheel in wheels if wheel.sha256 not in from_index)
    return own.union(names)


# --- The difference between a mirror as it is and as it should be. Nothing is written here -------


@dataclass(frozen=True, kw_only=True)
class MirrorPlan:
    """The work that gives a mirror the wanted wheels."""

    added: tuple[Wheel, ...]
    replaced: tuple[Wheel, ...]
    """Wheels in whose places there is something else."""
    kept: Mapping[str, Digest]
    """The wheels that stay as they are, with their digests."""
    missing: tuple[str, ...]
    listed: tuple[ListedWheel, ...]
    """What the index is to list."""


def plan(folder: MirrorFolder, wanted: WantedWheels, listener: Listener) -> MirrorPlan:
    """Compare every wheel of the folder with its record, and with what is wanted.

    A wheel without a record is taken as sound: an interrupted command left it, or the user did.
    """
    recorded, present = folder.recorded(), _digests(folder, listener)
    wheels = {wheel.path.name: wheel for wheel in wanted.wheels}
    added = tuple(wheel for name, wheel in wheels.items() if name not in present)
    differing = present.items() - {(name, wheel.sha256) for name, wheel in wheels.items()}
    replaced = {name: wheels[name] for name, _ in sorted(differing) if name in wheels}
    changed = differing - recorded.items()
    damaged = sorted(name for name, _ in changed if name in recorded and name not in wheels)
    kept = {name: present[name] for name in present if name not in {*replaced, *damaged}}
    listed, problems = _describe_wheels(
        {folder.root / name: digest for name, digest in kept.items()}
        | {wheel.path: wheel.sha256 for wheel in (*added, *replaced.values())}
    )
    damages = [
        f"{name}: is damaged: expected sha256 {recorded[name]}, found {present[name]}"
        for name in damaged
    ]
    sound = replaced.keys() - wanted.built - dict(changed).keys()  # a wheel built again differs
    conflicts = [
        f"{name}: the mirror has another file of this name: sha256 {present[name]}; "
        f"the new one is {replaced[name].sha256}"
        for name in sorted(sound)
    ]
    problems = [*damages, *conflicts, *problems]
    if problems:
        raise WheelError(
            f"{format_count(len(problems), 'wheel')} cannot be listed in the mirror {folder.root}",
            hint=_suggest_repair(folder, damaged),
            context=problems,
        )
    return MirrorPlan(
        added=added,
        replaced=tuple(replaced.values()),
        kept=kept,
        missing=tuple(sorted(recorded.keys() - present.keys() - wheels.keys())),
        listed=listed,
    )


def _describe_wheels(wheels: Mapping[Path, Digest]) -> tuple[tuple[ListedWheel, ...], list[str]]:
    listed, problems = [], []
    for path, digest in wheels.items():
        try:
            listed.append(describe_wheel(path, digest))
        except ValueError as exc:
            problems.append(str(exc))
    return tuple(listed), problems


def _digests(folder: MirrorFolder, listener: Listener) -> dict[str, Digest]:
    """Return the digest of each wheel that is there, read anew: a copy has other times."""
    paths = folder.wheels()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        digests: dict[str, Digest] = {}
        for path, digest in zip(paths, pool.map(_digest, paths), strict=True):
            digests[path.name] = digest
            listener.step("checking the wheels", len(digests), len(paths))
    return digests


def _digest(path: Path) -> Digest:
    try:
        return digest_file(path)
    except OSError as exc:
        raise WheelError(
            f"{path} cannot be read: {exc.strerror or exc}",
            hint="make it readable, or remove it and run the command again",
        ) from exc


def _suggest_repair(folder: MirrorFolder, damaged: Sequence[str]) -> str:
    pins = []
    for name in damaged:
        try:
            package, version, _, _ = parse_wheel_filename(name)
        except InvalidWheelFilename:
            continue
        pins.append(f"'{package}=={version}'")
    remove = "remove them from there if they are not needed, and run the command again"
    if not pins:
        return remove
    target = ""
    if not all(name.endswith("-none-any.whl") for name in damaged):
        target = ", if it gets the --python and --platform that each is for"
    command = f"stager mirror {folder.root} {' '.join(pins)}"
    return f"`{command}` replaces what is damaged{target}; or {remove}"


# --- ``stager mirror``: put wheels into a folder with an index; what is there stays --------------


@dataclass(frozen=True, kw_only=True)
class MirrorResult:
    """The result of ``stager mirror``."""

    ok: bool = True
    """True: a mirror that cannot be made is an error."""
    mirror: Path
    index: str
    """The URL of its index, for pip and uv."""
    packages: int
    """Number of packages in it."""
    wheels: int
    """Number of wheels in it."""
    bytes: int
    """The size of its wheels in bytes."""
    added: tuple[str, ...]
    """Wheels that were put there now."""
    replaced: tuple[str, ...]
    """Wheels that were damaged, or that were built here again with other bytes."""
    missing: tuple[str, ...]
    """Wheels that were listed before, and are gone."""


def mirror_wheels(
    config: Config, root: Path, wanted: MirrorRequest, listener: Listener
) -> MirrorResult:
    """Add the wheels of requirements, or of the project's lock, to the mirror in a folder."""
    refuse_other(root)
    store = Store(offline_root(config))
    with store.lock(lambda: listener.note(f"waiting for another build in {store.root}")):
        wheels = fetch_wanted_wheels(config, wanted, store, listener)
        listener.begin("mirror")
        return fill(root, wheels, listener)


def fill(root: Path, wanted: WantedWheels, listener: Listener) -> MirrorResult:
    """Put wheels into the mirror in a folder, and list all that are there."""
    with lock_mirror(
        root, lambda: listener.note(f"waiting for another process at {root}")
    ) as folder:
        todo = plan(folder, wanted, listener)
        if todo.replaced:  # nothing is claimed of them until they are there
            folder.record(todo.kept)
        wheels = (*todo.added, *todo.replaced)
        for number, wheel in enumerate(wheels, 1):
            folder.put(wheel)
            listener.step(wheel.path.name, number, len(wheels))
        folder.publish(todo.listed)
    return MirrorResult(
        mirror=root,
        index=folder.index.as_uri(),
        packages=len({wheel.name for wheel in todo.listed}),
        wheels=len(todo.listed),
        bytes=sum(wheel.size for wheel in todo.listed),
        added=tuple(sorted(wheel.path.name for wheel in todo.added)),
        replaced=tuple(sorted(wheel.path.name for wheel in todo.replaced)),
        missing=todo.missing,
    )
