"""The difference between a mirror as it is and as it should be. Nothing is written here."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from bundle.protocol.counts import counted
from bundle.protocol.digest import Digest

from ..building.current_bundle import Listener
from ..core.errors import WheelError
from ..core.store import sha256_of
from ..core.values import Wheel
from .folder import MirrorFolder
from .wanted import WantedWheels
from .wheel_file import ListedWheel, listed_wheel


@dataclass(frozen=True, kw_only=True)
class MirrorPlan:
    """The work that gives a mirror the wanted wheels."""

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

    A wheel without a record is taken as sound: an interrupted command left it, or the user did.

    Raises:
        WheelError: wheels that are damaged, or that would have to be replaced by others of the same
            name; all of them.
    """
    wheels = _Comparison(
        recorded=folder.recorded(),
        present=_digests(folder, listener),
        wanted={wheel.path.name: wheel for wheel in wanted.wheels},
    )
    kept = wheels.kept()
    copied = (*wheels.added(), *wheels.replaced())
    listed, unlistable = _listed(
        {folder.root / name: digest for name, digest in kept.items()}
        | {wheel.path: wheel.sha256 for wheel in copied}
    )
    problems = [*wheels.damages(), *wheels.conflicts(wanted.built), *unlistable]
    if problems:
        raise WheelError(
            f"{counted(len(problems), 'wheel')} cannot be listed in the mirror {folder.root}",
            hint=_remedy(folder, wheels.damaged()),
            context=problems,
        )
    return MirrorPlan(
        added=wheels.added(),
        replaced=wheels.replaced(),
        kept=kept,
        missing=wheels.missing(),
        listed=listed,
    )


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """A folder's record, the wheels that are there, and the wanted ones, by file name."""

    recorded: Mapping[str, Digest]
    """What the record says."""
    present: Mapping[str, Digest]
    """What is there."""
    wanted: Mapping[str, Wheel]
    """What is wanted."""

    def added(self) -> tuple[Wheel, ...]:
        return tuple(wheel for name, wheel in self.wanted.items() if name not in self.present)

    def replaced(self) -> tuple[Wheel, ...]:
        return tuple(
            wheel
            for name, wheel in self.wanted.items()
            if self.present.get(name, wheel.sha256) != wheel.sha256
        )

    def damaged(self) -> list[str]:
        return [
            name
            for name, digest in self.present.items()
            if name not in self.wanted and self.recorded.get(name, digest) != digest
        ]

    def damages(self) -> list[str]:
        return [
            f"{name}: is damaged: expected sha256 {self.recorded[name]}, found {self.present[name]}"
            for name in self.damaged()
        ]

    def conflicts(self, built: Collection[str]) -> list[str]:
        """Report sound wheels that others would replace, except built ones: those always differ."""
        replaced = {wheel.path.name: wheel for wheel in self.replaced()}
        return [
            f"{name}: the mirror has another file of this name: sha256 {self.present[name]}; "
            f"the new one is {wheel.sha256}"
            for name, wheel in replaced.items()
            if name not in built and self.recorded.get(name) == self.present[name]
        ]

    def kept(self) -> dict[str, Digest]:
        others = {wheel.path.name for wheel in self.replaced()} | set(self.damaged())
        return {name: digest for name, digest in self.present.items() if name not in others}

    def missing(self) -> tuple[str, ...]:
        return tuple(sorted(self.recorded.keys() - self.present.keys() - self.wanted.keys()))


def _listed(wheels: Mapping[Path, Digest]) -> tuple[tuple[ListedWheel, ...], list[str]]:
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


def _remedy(folder: MirrorFolder, damaged: Sequence[str]) -> str:
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
