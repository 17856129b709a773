"""The program that runs: its Python, and the source of its modules."""

from __future__ import annotations

import sys

from ..protocol.problem import NodeError, Problem, ProblemCode


def short_version() -> str:
    """Return this Python's version as ``major.minor``."""
    return "%d.%d" % sys.version_info[:2]


def can_load_modules_for(version: str) -> bool:
    """Return True if this Python loads what CPython ``major.minor`` has compiled."""
    own = (sys.implementation.name, short_version(), "t" in sys.abiflags)
    return own == ("cpython", version, False)


def read_source(name: str) -> bytes:
    """Return the source of a module, from the directory or the zip that this one came from."""
    import pkgutil  # which the login side has no use for

    top = __name__.partition(".")[0]
    data = pkgutil.get_data(top, f"{name.replace('.', '/')}.py")
    if data is None:
        raise NodeError(Problem(ProblemCode.PROGRAM_INCOMPLETE, name))
    return data
