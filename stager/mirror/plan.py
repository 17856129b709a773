"""The difference between a mirror as it is and as it is to be; nothing is written for that."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from bundle.protocol.counts import counted

from ..building.current_bundle import Listener
from ..core.errors import WheelError
from ..core.store import sha256_of
from ..core.values import Digest, Wheel
from .folder import MirrorFolder
from .wanted import WantedWheels
from .wheel_file import ListedWheel, listed_wheel


@dataclass(frozen=True, kw_only=True)
class MirrorPlan:
    """What has to be done for a mirror to have the wanted wheels."""

    added: tuple[Wheel, ...]
    """Wheels that are not there."""
    replaced: tuple[Wheel, ...]
    """Wheels in whose places there is something else."""
    kept: Mapping[str, Digest]
    """The wheels that stay as they are, with their digests."""
    missing: tuple[str, ...]
    """Wheels of the record that are gone, and are not wanted now."""
    listed: tuple[ListedWheel, ...]
    """What the index is to list."""


def plan(folder: MirrorFolder, wanted: WantedWheels, listener: Listener) -> MirrorPlan:
    """Compare every wheel of the folder with its record, and with what is wanted.

    A wheel without a record counts as it is: an interrupted call has put it, or the user.

    Raises:
        WheelError: wheels that are damaged, or that would have to be replaced by others of the same
            name; all of them.
    """
    recorded, present = folder.recorded(), _digests(folder, listener)
    named = {wheel.path.name: wheel for wheel in wanted.wheels}
    added = tuple(wheel for name, wheel in named.items() if name not in present)
    replaced = tuple(
        wheel for name, wheel in named.items() if present.get(name, wheel.sha256) != wheel.sha256
    )
    kept = {name: digest for name, digest in present.items() if name not in _names(replaced)}
    damaged = [name for name, digest in kept.items() if _differs(name, digest, recorded, named)]
    problems = [_damage(name, kept.pop(name), recorded[name]) for name in damaged]
    for wheel in replaced:
        name = wheel.path.name
        if name not in wanted.built and recorded.get(name) == present[name]:
            problems.append(_conflict(wheel, present[name]))
    stored = {wheel.path: wheel.sha256 for wheel in (*added, *replaced)}
    listed, unlistable = _listed({folder.root / name: kept[name] for name in kept} | stored)
    problems += unlistable
    if problems:
        raise WheelError(
            f"{counted(len(problems), 'wheel')} cannot be listed in the mirror {folder.root}",
            hint=_remedy(folder, damaged),
            context=problems,
        )
    return MirrorPlan(
        added=added,
        replaced=replaced,
        kept=kept,
        missing=tuple(sorted(recorded.keys() - present.keys() - named.keys())),
        listed=listed,
    )


def _listed(wheels: Mapping[Path, Digest]) -> tuple[tuple[ListedWheel, ...], list[str]]:
    """Return what the index says of wheels, and why it cannot list some."""
    listed, problems = [], []
    for path, digest in wheels.items():
        try:
            listed.append(listed_wheel(path, digest))
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
        return sha256_of(path)
    except OSError as exc:
        raise WheelError(
            f"{path} cannot be read: {exc.strerror or exc}",
            hint="make it readable, or remove it and run the command again",
        ) from exc


def _names(wheels: Sequence[Wheel]) -> set[str]:
    return {wheel.path.name for wheel in wheels}


def _differs(
    name: str, digest: Digest, recorded: Mapping[str, Digest], named: Mapping[str, Wheel]
) -> bool:
    """Return whether a wheel is neither what the record says nor what is wanted."""
    return name not in named and recorded.get(name, digest) != digest


def _damage(name: str, actual: Digest, expected: Digest) -> str:
    return f"{name}: is damaged: expected sha256 {expected}, found {actual}"


def _conflict(wheel: Wheel, there: Digest) -> str:
    return (
        f"{wheel.path.name}: the mirror has another file of this name: sha256 {there}; "
        f"the new one is {wheel.sha256}"
    )


def _remedy(folder: MirrorFolder, damaged: Sequence[str]) -> str:
    """Return what to do about wheels with problems."""
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
    return f"`stager mirror {folder.root} {' '.join(pins)}` replaces what is damaged; or {remove}"
