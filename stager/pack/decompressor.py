"""The zstandard wheel that travels in a bundle, so that a node needs nothing but a Python."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

from ..core.errors import ResolveError
from ..core.values import Target
from ..lock.pylock import Lock, read_lock

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
    with resources.as_file(resources.files(__package__) / PINNED) as path:
        try:
            lock = read_lock(path, target)
        except ResolveError as exc:
            raise ResolveError(
                f"there is no zstd decompressor for Python {target.python} on {target.platform}",
                hint="build for Python 3.9 or newer and a manylinux or musllinux platform",
            ) from exc
        return replace(lock, files=tuple(replace(file, path=None) for file in lock.files))
