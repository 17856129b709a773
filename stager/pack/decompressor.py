"""The zstandard wheel that travels in a bundle, so that a node needs nothing but a Python."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

from packaging.pylock import PackageWheel, Pylock, PylockSelectError
from packaging.utils import parse_wheel_filename

from ..core import toml
from ..core.errors import ResolveError
from ..core.values import Digest, LockedFile, Target
from ..lock.indexes import Indexes
from ..lock.pylock import Lock

PINNED = "zstandard.toml"
_STANDARD_LIBRARY_HAS_ZSTD = (3, 14)  # the first version with ``compression.zstd`` (PEP 784)
_LAST_WITHOUT_ZSTD = "3.13"


def decompressor_lock(target: Target, *, bundled_python: bool = False) -> Lock | None:
    """Return the pinned wheel for a target, as a lock of one file; None if Python has zstd."""
    major, minor = target.python.split(".")
    if (int(major), int(minor)) >= _STANDARD_LIBRARY_HAS_ZSTD:
        if not bundled_python:
            return None
        target = replace(target, python=_LAST_WITHOUT_ZSTD)
    resource = resources.files(__package__) / PINNED
    with resources.as_file(resource) as path:
        pinned = Pylock.from_dict(toml.read(path))
        try:
            ((package, file),) = pinned.select(
                environment=target.environment(), tags=list(target.tags())
            )
        except PylockSelectError as exc:
            raise ResolveError(
                f"there is no zstd decompressor for Python {target.python} on {target.platform}",
                hint="build for Python 3.9 or newer and a manylinux or musllinux platform",
            ) from exc
        if not isinstance(file, PackageWheel) or file.path is None or package.version is None:
            raise ResolveError(f"{PINNED} does not hold wheels", hint="install stager again")
        locked = LockedFile(
            name=parse_wheel_filename(file.path)[0],
            version=package.version,
            filename=file.path,
            sha256=Digest(file.hashes["sha256"]),
        )
        return Lock(
            path=path,
            target=target,
            files=(locked,),
            spec_digest=None,
            indexes=Indexes(),
            sources=(),
        )
