"""The link from an environment to its interpreter, and ``pyvenv.cfg``, which must agree with it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

from ..system.files import read_file
from .fault import Fault, reason

RENEWED = re.compile(r"(?:bin/python|pyvenv\.cfg)\.\d+-\d+")
"""Files that ``renew`` renames into place to point an environment at another interpreter."""
_RENEWAL_SECONDS = 0.05


def interpreter_faults(env_dir: str) -> Iterator[Fault]:
    """Compare ``pyvenv.cfg`` with the link to the interpreter, as they are now."""
    try:
        target = os.readlink(os.path.join(env_dir, "bin", "python"))
    except OSError as exc:
        yield Fault("bin/python", f"it is missing or no link: {exc.strerror or exc}")
        return
    wanted = pyvenv_cfg(target)
    try:
        data = read_file(os.path.join(env_dir, "pyvenv.cfg"), len(wanted) + 1)
    except OSError as exc:
        yield Fault("pyvenv.cfg", reason(exc))
        return
    if data != wanted:
        yield Fault("pyvenv.cfg", f"it does not say what it must for {target}")


def settled_interpreter_faults(env_dir: str) -> list[Fault]:
    """Do as :func:`interpreter_faults`, twice if need be: another job may be changing both."""
    found = list(interpreter_faults(env_dir))
    if found:
        time.sleep(_RENEWAL_SECONDS)
        found = list(interpreter_faults(env_dir))
    return found


def pyvenv_cfg(python: str) -> bytes:
    """Return the content of ``pyvenv.cfg`` for an interpreter (PEP 405)."""
    return (
        f"home = {os.path.dirname(python)}\n"
        "include-system-site-packages = false\n"
        f"executable = {python}\n"
    ).encode("utf-8", "surrogateescape")
