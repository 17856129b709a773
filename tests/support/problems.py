"""Problems for tests in which their words matter and their kind does not."""

from __future__ import annotations

from bundle.protocol.problem import Problem, ProblemCode


def worded(what: str, where: str, why: str, fix: str) -> Problem:
    """A problem of another version, which brings its own words."""
    return Problem(ProblemCode.OTHER, where, {"what": what, "why": why, "fix": fix})
