"""Growth of building and unpacking with the environment: ours beside uv, tar and zstd."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import building, ours, reference, unpacking
from .place import remove
from .process import Command, run
from .rounds import Samples
from .session import Made, Session
from .synthetic import Shape, make_wheels

PACKAGES = 20
FILES = (10, 100, 1000, 5000)
SIZES = (100_000_000, 500_000_000, 2_000_000_000)
_STEPS = ("build/ours", "build/uv", "unpack/tmpfs/ours", "unpack/tmpfs/zst")


@dataclass(frozen=True, kw_only=True)
class Point:
    """The measurements of one shape; medians in seconds."""

    shape: Shape
    """What the environment is like."""
    seconds: dict[str, float]
    """By the names of the values."""


def shapes() -> Iterator[Shape]:
    """Growing files a package at one size, then growing sizes at one number of files."""
    for files in FILES:
        yield Shape(packages=PACKAGES, files=files, size=SIZES[1])
    for size in SIZES:
        if size != SIZES[1]:
            yield Shape(packages=PACKAGES, files=FILES[1], size=size)


def measure(session: Session, wanted: Sequence[Shape] | None = None) -> list[Point]:
    """Measure every shape, one after the other; each is removed before the next."""
    points = []
    for shape in wanted or tuple(shapes()):
        session.say(f"curve: {shape.name}")
        folder = session.place.fresh("curve")
        made = _prepared(session, shape, folder)
        own = replace(session, prepared=made, samples=Samples(), made=Made(), pex=False)
        building.measure(own, names=_STEPS)
        unpacking.measure(own, names=_STEPS)
        seconds = {name: own.samples.middle(name) for name in _STEPS}
        points.append(Point(shape=shape, seconds=seconds))
        remove(folder)
    return points


def _prepared(session: Session, shape: Shape, folder: Path) -> reference.Prepared:
    """A project with nothing but synthetic packages, locked without any index."""
    project, locks, store = folder / "project", folder / "locks", folder / "offline"
    wheels = store / "wheels"
    for path in (project, locks / "first", wheels):
        path.mkdir(parents=True)
    make_wheels(shape, wheels)
    for needed in session.prepared.wheels.glob("zstandard-*.whl"):
        shutil.copyfile(needed, wheels / needed.name)
    (project / "stager.toml").write_text(
        f'[environment]\nrequirements = ["{reference.PINS}"]\nimports = ["synthetic000"]\n'
    )
    (project / reference.PINS).write_text("".join(f"{pin}\n" for pin in shape.pins))
    env = session.env(OFFLINE_ROOT=str(store))
    argv = (*ours.lock(session.stager), "--offline")
    run(Command(argv=argv, cwd=project, env=env))
    for name in (reference.PINS, reference.LOCK):
        shutil.copyfile(project / name, locks / "first" / name)
    return reference.Prepared(
        reference=replace(reference.FULL, name=shape.name, imports=("synthetic000",)),
        project=project,
        wheels=wheels,
        locks=locks,
        seconds=0.0,
    )
