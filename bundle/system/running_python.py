"""The Python that this process runs under."""

from __future__ import annotations

import sys


def short_version() -> str:
    """Return its version as ``major.minor``."""
    return "%d.%d" % sys.version_info[:2]


def loads_modules_for(version: str) -> bool:
    """Return True if it loads what was compiled for CPython of this version, ``major.minor``."""
    own = (sys.implementation.name, short_version(), "t" in sys.abiflags)
    return own == ("cpython", version, False)
