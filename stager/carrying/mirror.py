"""The wheels that a mirror should have: those of a project's lock, or of some requirements."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest

from ..building.current_bundle import Listener, offline_root
from ..building.project_lock import ensure_lock, fetch_decompressor, read_buildable_spec
from ..config.load import Config
from ..config.sections import OF_NODE
from ..core.errors import ConfigError, WheelError
from ..core.store import Store, digest_file
from ..core.values import Wheel
from ..lock.lock import ResolveOptions, make_lock
from ..lock.pylock import Lock
from ..lock.spec import Spec, read_spec
from ..wheels import WheelSource
from .mirror_folder import (
    INDEX,
    ListedWheel,
    describe_wheel,
    lock_mirror,
    publish_index,
    put_wheel,
    read_record,
    refuse_other,
    write_record,
)


def _fetch_for_target(
    project: Config,
    settings: Config,
    asked: Sequence[str],
    store: Store,
    listener: Listener,
    offline: bool,
) -> tuple[Sequence[Wheel], set[str]]:
    options = ResolveOptions(offline=offline, note=listener.note)
    listener.begin("lock")
    spec = _read_requested(settings, asked) if asked else read_buildable_spec(settings)
    if settings != project:
        listener.note(f"for Python {spec.target.python} on {spec.target.platform}")
    if asked or spec.target != read_spec(project).target:
        with store.scratch("lock") as scratch:
            lock = make_lock(spec, path=scratch / "pylock.toml", store=store, options=options)
    else:
        lock = ensure_lock(project, spec, store, options, listener, locked=False)
    listener.begin("wheels")
    source = WheelSource(spec=spec, store=store, offline=offline, progress=listener.note)
    decompressor = fetch_decompressor(source, settings.environment.interpreter != OF_NODE)
    wheels = [*source.fetch(lock), *filter(None, [decompressor])]  # every build needs it
    return wheels, _list_built(wheels, lock)


def _list_built(wheels: Sequence[Wheel], lock: Lock) -> set[str]:
    from_index = {file.sha256 for file in lock.files if file.is_wheel}
    built = {wheel.path.name for wheel in wheels if wheel.sha256 not in from_index}
    return built.union(name for name, _ in lock.sources)


def _read_requested(config: Config, requirements: Sequence[str]) -> Spec:
    environment = replace(config.environment, requirements=tuple(requirements), constraints=())
    try:
        asked = read_spec(replace(config, root=Path.cwd(), environment=environment))
    except ConfigError as exc:
        raise ConfigError(
            "the requirements on the command line cannot be used",
            hint="name what environment.requirements takes; see docs/settings.md",
            context=exc.context or (exc.message,),
        ) from exc
    return replace(asked, indexes=read_spec(config).all_indexes.merge(asked.indexes))


def _digest_wheels(root: Path, listener: Listener) -> dict[str, Digest]:
    """Return the digest of each wheel that is there, read anew: a copy has other times."""
    paths = sorted(root.glob("*.whl"))
    digests: dict[str, Digest] = {}
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for path, digest in zip(paths, pool.map(digest_file, paths), strict=True):
                digests[path.name] = digest
                listener.step("checking the wheels", len(digests), len(paths))
    except OSError as exc:
        raise WheelError(
            f"{exc.filename or root} cannot be read: {exc.strerror or exc}",
            hint="make it readable, or remove it and run the command again",
        ) from exc
    return digests


@dataclass(frozen=True, kw_only=True)
class MirrorResult:
    """The result of ``stager mirror``."""

    ok: bool = True  # true: a mirror that cannot be made is an error
    mirror: Path
    index: str  # the URL of its index, for pip and uv
    packages: int
    wheels: int
    bytes: int  # the size of its wheels in bytes
    added: tuple[str, ...]
    replaced: tuple[str, ...]  # those damaged, or built here again with other bytes
    missing: tuple[str, ...]


def mirror_wheels(
    config: Config,
    root: Path,
    requirements: Sequence[str],
    listener: Listener,
    *,
    targets: Sequence[tuple[str | None, str | None]] = (),
    offline: bool = False,
) -> MirrorResult:
    """Add wheels to the mirror in a folder, for some Pythons and platforms or for the project's."""
    refuse_other(root)
    store = Store(offline_root(config))
    with store.lock(lambda: listener.note(f"waiting for another build in {store.root}")):
        wheels: list[Wheel] = []
        built: set[str] = set()
        own = (config.environment.python, config.environment.platform)
        for python, platform in dict.fromkeys(targets or (own,)):
            target = replace(config.environment, python=python, platform=platform)
            settings = replace(config, environment=target)
            more, names = _fetch_for_target(
                config, settings, requirements, store, listener, offline
            )
            wheels += more
            built |= names
        listener.begin("mirror")
        return fill(root, wheels, built, listener)


def fill(
    root: Path, wanted: Collection[Wheel], built: Collection[str], listener: Listener
) -> MirrorResult:
    """Put wheels into the mirror in a folder, and list all that are there.

    ``built`` has the file names of those built here: the next time they may have other bytes.
    """
    wheels = {wheel.path.name: wheel for wheel in wanted}
    with lock_mirror(root, lambda: listener.note(f"waiting for another process at {root}")):
        recorded, present = read_record(root), _digest_wheels(root, listener)
        added = sorted(wheels.keys() - present.keys())
        replaced = _find_replaced(wheels, present)
        new = [wheels[name] for name in (*added, *replaced)]
        changed = dict(present.items() - recorded.items()).keys()
        damaged = sorted((changed & recorded.keys()) - wheels.keys())
        problems = [
            f"{name}: is damaged: expected sha256 {recorded[name]}, found {present[name]}"
            for name in damaged
        ] + [
            f"{name}: the mirror has another file of this name: sha256 {present[name]}; "
            f"the new one is {wheels[name].sha256}"
            for name in sorted({*replaced} - {*built, *changed})
        ]
        kept = {name: present[name] for name in sorted(present.keys() - {*replaced, *damaged})}
        listed = _list_wheels(root, kept, new, problems)
        if problems:
            raise WheelError(
                f"{format_count(len(problems), 'wheel')} cannot be listed in the mirror {root}",
                hint="`stager mirror DIR NAME==VERSION` replaces it, with the --python "
                "and --platform that it is for; or remove it from there, and run the command again",
                context=problems,
            )
        if replaced:  # nothing is claimed of them until they are there
            write_record(root, kept)
        _put_wheels(root, new, listener)
        publish_index(root, listed)
    return MirrorResult(
        mirror=root,
        index=(root / INDEX).as_uri(),
        packages=len({wheel.name for wheel in listed}),
        wheels=len(listed),
        bytes=sum(wheel.size for wheel in listed),
        added=tuple(added),
        replaced=tuple(replaced),
        missing=tuple(sorted(recorded.keys() - present.keys() - wheels.keys())),
    )


def _find_replaced(wheels: Mapping[str, Wheel], present: Mapping[str, Digest]) -> list[str]:
    both = sorted(wheels.keys() & present.keys())
    return [name for name in both if wheels[name].sha256 != present[name]]


def _put_wheels(root: Path, wheels: Sequence[Wheel], listener: Listener) -> None:
    for number, wheel in enumerate(wheels, 1):
        put_wheel(root, wheel)
        listener.step(wheel.path.name, number, len(wheels))


def _list_wheels(
    root: Path, kept: Mapping[str, Digest], new: Collection[Wheel], problems: list[str]
) -> list[ListedWheel]:
    listed = []
    places = [(root / name, digest) for name, digest in kept.items()]
    for path, digest in (*places, *((wheel.path, wheel.sha256) for wheel in new)):
        try:
            listed.append(describe_wheel(path, digest))
        except ValueError as exc:
            problems.append(str(exc))
    return listed
