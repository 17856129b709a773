"""The requirements that a node must meet to run a bundle."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PYTHON = re.compile(r"3\.\d{1,3}")
_LIBC_VERSION = re.compile(r"(?:\d{1,4}(?:\.\d{1,4}){0,3})?")


@dataclass(frozen=True)
class Requires:
    """Requirements of a bundle on a node."""

    python: str
    """Version of CPython as ``major.minor``."""
    machine: str
    """Processor architecture as ``uname -m`` prints it."""
    libc: str
    """``glibc`` or ``musl``."""
    libc_version: str
    """The lowest version of the C library that all that is inside accepts, ``2.28``."""
    libc_needed_by: str = ""
    """What needs that version, with the file or tag that says so; empty for nothing."""
    bundled_python: bool = False
    """True if the bundle has that Python, and a node needs none of this version."""

    def __post_init__(self) -> None:
        for value in (self.machine, self.libc, self.libc_version, self.libc_needed_by):
            printable(value, "requires")
        if not _LIBC_VERSION.fullmatch(self.libc_version):
            raise ValueError(f"requires.libc_version is {self.libc_version[:20]!r}")
        if not _PYTHON.fullmatch(printable(self.python, "requires.python")):
            raise ValueError(f"requires.python is {self.python[:20]!r}")


def printable(value: object, what: str) -> str:
    """Return a value that is printable text.

    Raises:
        ValueError: it is of another type, or holds what cannot be printed.
    """
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{what} holds {value!r}")
    return value
