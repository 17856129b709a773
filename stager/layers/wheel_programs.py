"""The programs in an environment's ``bin``: those of entry points, and scripts of wheels."""

from __future__ import annotations

import re

from installer.utils import parse_entrypoints

from ..core.errors import WheelError

_LAUNCHER = """\
#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/{python}" "$0" "$@"
' '''
"""
"""Finds Python relative to the script, so the environment can lie anywhere; sh runs line two,
Python reads lines two and three as a string."""

_STARTER = """\
#!/bin/sh
here="$(dirname -- "$(realpath -- "$0")")"
exec "$here/{python}" "$here/../{script}" "$@"
"""
"""Starts a script that lies elsewhere as it is."""

_ENTRY_POINT = """\
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({attr}())
"""

_NOT_BELOW = re.compile(
    rb"\A[ \t\f]*#[^\n]*?coding[:=][ \t]*(?![uU][tT][fF][-_]?8)|__doc__|^from __future__ ",
    re.MULTILINE,
)
"""Parts of a script that mean something else, or nothing, below the lines for a shell."""
_NO_FUNCTION = re.compile(r"[^\[#;=]+=\s*[\w.]+\s*(\[.*\])?\s*")
"""A line of ``entry_points.txt`` whose value is a module alone."""


def write_entry_point(python: str, module: str, attr: str) -> bytes:
    """Return the program of an entry point."""
    code = _ENTRY_POINT.format(module=module, attr=attr, first=attr.split(".", maxsplit=1)[0])
    return (_LAUNCHER.format(python=python) + code).encode()


def relocate_script(python: str, data: bytes, elsewhere: str) -> tuple[bytes, bool]:
    """Return a script that finds the Python of its environment, and if it has a second file.

    Below the lines for a shell, a docstring is none, a ``from __future__`` behind it is an error,
    and a line that names an encoding comes too late. Such a script needs a place of its own, where
    it stays as it is, and the program starts it there.
    """
    first, _, rest = data.partition(b"\n")
    if not first.startswith(b"#!python"):  # ``#!pythonw`` too
        return data, False
    if _NOT_BELOW.search(rest):
        return _STARTER.format(python=python, script=elsewhere).encode(), True
    return _LAUNCHER.format(python=python).encode() + rest, False


def read_entry_point_names(text: str) -> set[str]:
    """Return the names of the programs in an ``entry_points.txt``.

    Raises:
        WheelError: one of them names no function.
        configparser.Error: it cannot be read.
    """
    try:
        return {name for name, _, _, _ in parse_entrypoints(text)}
    except AssertionError as exc:
        raise WheelError(
            "an entry point names no function (module:function)",
            hint="ask its publisher for another version; its program could not start",
            context=[line.strip() for line in text.splitlines() if _NO_FUNCTION.fullmatch(line)],
        ) from exc
