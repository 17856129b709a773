"""The source of a module of the far side, for those that run in a process of their own."""

from __future__ import annotations

import pkgutil

from ..protocol.problem import NodeError, Problem, ProblemCode


def source_of(name: str) -> bytes:
    """Return the source of a module, from the directory or the zip that this one came from.

    Raises:
        NodeError: there is no such module.
    """
    top = __name__.partition(".")[0]
    data = pkgutil.get_data(top, f"{name.replace('.', '/')}.py")
    if data is None:
        raise NodeError(Problem(ProblemCode.PROGRAM_INCOMPLETE, name))
    return data
