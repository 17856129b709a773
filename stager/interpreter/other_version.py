"""An interpreter of this machine for another version of Python than the one that runs this."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bundle.node import interpreter
from bundle.protocol.problem import NodeError

from ..core.errors import StagerError
from ..core.processes import Runner, run
from ..core.values import Target
from ..layers.bytecode import Compiler
from .installation import candidates

_SECONDS = 30.0
_DESCRIBE = """\
import importlib.util, sys
print("%d.%d.%d" % sys.version_info[:3], importlib.util.MAGIC_NUMBER.hex())
"""


def compiler_for(
    target: Target,
    own: Path | None = None,
    env: Mapping[str, str] = os.environ,
    run: Runner = run,
) -> Compiler | None:
    """Return a Python of the target's version that compiles for it; None if there is none.

    Bytecode is the same on all processors, so the platform does not matter. None, too, for the
    version that runs this, which needs no other process.
    """
    if target.is_host_python:
        return None
    try:
        program = str(own) if own else _find(target, env, run)
        said = run([program, "-I", "-S", "-c", _DESCRIBE], timeout=_SECONDS).stdout
        version, magic = said.split()
    except (NodeError, StagerError, ValueError):  # the last: it says something else, or more
        return None
    return Compiler(program=Path(program), version=version, magic=magic)


def _find(target: Target, env: Mapping[str, str], run: Runner) -> str:
    kept = [str(path) for path in candidates(target, env, run)]
    return interpreter.find(target.python, kept, env)
