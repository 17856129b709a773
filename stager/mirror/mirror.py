"""``stager mirror``: put wheels into a folder with an index; what is there stays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..building.current_bundle import Listener, offline_root
from ..config.load import Config
from ..core.store import Store
from .folder import held, refuse_other
from .plan import MirrorPlan, plan
from .wanted import MirrorRequest, WantedWheels, wanted_wheels


@dataclass(frozen=True, kw_only=True)
class MirrorResult:
    """The result of ``stager mirror``."""

    ok: bool = True
    """True: a mirror that cannot be made is an error."""
    mirror: Path
    """The folder."""
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
    """Add the wheels of requirements, or of the project's lock, to the mirror in a folder.

    Raises:
        StagerError: the wheels cannot be had; the folder is something else, or cannot be written;
            or wheels in it are damaged (all of them).
    """
    refuse_other(root)
    store = Store(offline_root(config))
    with store.lock(lambda: listener.note(f"waiting for another build in {store.root}")):
        wheels = wanted_wheels(config, wanted, store, listener)
        listener.begin("mirror")
        return fill(root, wheels, listener)


def fill(root: Path, wanted: WantedWheels, listener: Listener) -> MirrorResult:
    """Put wheels into the mirror in a folder, and list all that are there.

    Raises:
        StagerError: see :func:`mirror_wheels`.
    """
    with held(root, lambda: listener.note(f"waiting for another process at {root}")) as folder:
        todo = plan(folder, wanted, listener)
        if todo.replaced:  # nothing is claimed of them until they are there
            folder.record(todo.kept)
        wheels = (*todo.added, *todo.replaced)
        for number, wheel in enumerate(wheels, 1):
            folder.put(wheel)
            listener.step(wheel.path.name, number, len(wheels))
        folder.publish(todo.listed)
    return _result(root, folder.index.as_uri(), todo)


def _result(root: Path, index: str, done: MirrorPlan) -> MirrorResult:
    return MirrorResult(
        mirror=root,
        index=index,
        packages=len({wheel.name for wheel in done.listed}),
        wheels=len(done.listed),
        bytes=sum(wheel.size for wheel in done.listed),
        added=tuple(sorted(wheel.path.name for wheel in done.added)),
        replaced=tuple(sorted(wheel.path.name for wheel in done.replaced)),
        missing=done.missing,
    )
