"""The rows of the CUDA environment: those of the reference that its size may change."""

from __future__ import annotations

from . import building, unpacking
from .session import Session

_BUNDLES = ("build/ours", "rebuild/one")
"""The builds that make our two bundles."""
_ARCHIVES = {
    "size/pip": "build/pip",
    "size/uv": "build/uv",
    "unpack/tmpfs/gz": "build/pip",
    "unpack/tmpfs/zst": "build/uv",
}
"""The builds that make the archives of peers."""


def measure(session: Session) -> None:
    """Build, compare sizes, unpack to tmpfs and stage again, as far as rows need it.

    Installing with pip and packing with gzip takes minutes: only a row that names it has it done.
    """
    wanted = session.names
    timed = {name for name in wanted if name.startswith(("build/", "rebuild/"))} - {"build/proof"}
    archives = {_ARCHIVES[name] for name in wanted if name in _ARCHIVES}
    builds = sorted({*_BUNDLES, *timed, *archives})
    if timed:
        building.measure(session, builds)
    else:
        building.ensure(session, builds)
    building.sizes(session)
    unpacks = sorted(name for name in wanted if name.startswith("unpack/"))
    if unpacks:
        unpacking.measure(session, unpacks)
    if any(name.startswith("restage/") for name in wanted):
        unpacking.restage(session)
