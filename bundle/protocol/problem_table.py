"""The one table from the code of a problem to its words, its failure class and its remedy.

The far side's messages, the diagnosis, the report and ``docs/troubleshooting.md`` read it. It stays
with the driver: agents of a Slurm step are sent neither it nor the wordings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .enumerations import Ending
from .environment_wordings import ENVIRONMENT_WORDINGS
from .host_wordings import HOST_WORDINGS
from .job_wordings import JOB_WORDINGS
from .node_wordings import NODE_WORDINGS
from .problem import Problem, ProblemCode
from .wording import Wording

TABLE: Mapping[ProblemCode, Wording] = {
    **NODE_WORDINGS,
    **HOST_WORDINGS,
    **ENVIRONMENT_WORDINGS,
    **JOB_WORDINGS,
}
"""The words of every code."""

ENDINGS: Mapping[str, ProblemCode] = {
    Ending.TIME_LIMIT: ProblemCode.JOB_TIME_LIMIT,
    Ending.CANCELLED: ProblemCode.JOB_CANCELLED,
    Ending.PREEMPTED: ProblemCode.JOB_PREEMPTED,
    Ending.REQUEUED: ProblemCode.JOB_REQUEUED,
    Ending.NODE_FAILURE: ProblemCode.JOB_NODE_FAILURE,
}
"""The problem of a job that Slurm ended, by the reason."""

_WIDEST = 100
"""Characters of a fault and its finding that are shown as one line."""

JOB_ENDINGS = frozenset((*ENDINGS.values(), ProblemCode.JOB_ENDED))
"""The problems that are the end of a job."""


def ending_problem(ending: str, job_id: str) -> Problem:
    """Return the problem of a job that Slurm ended; another version's ending is accepted."""
    where, code = f"job {job_id}", ENDINGS.get(ending)
    if code is None:
        return Problem(ProblemCode.JOB_ENDED, where, {"job": job_id, "ending": ending})
    return Problem(code, where, {"job": job_id})


def read(raw: Mapping[str, object]) -> Problem:
    """Read a problem from JSON; see :meth:`Problem.from_json`."""
    if not isinstance(raw, Mapping):
        raise TypeError("it is no object")
    code, values = raw.get("code"), raw.get("values")
    if code in _KNOWN and isinstance(values, Mapping):
        known = ProblemCode(code)
        if values.keys() >= TABLE[known].names:
            return Problem(known, _text(raw, "where"), {key: _text(values, key) for key in values})
    words = {"what": _text(raw, "what"), "why": "", "fix": ""}
    words.update((key, _text(raw, key)) for key in ("why", "fix") if key in raw)
    return Problem(ProblemCode.OTHER, _text(raw, "where") if "where" in raw else "", words)


_KNOWN = {code.value for code in ProblemCode}


def _text(raw: Mapping[str, object], key: str) -> str:
    if not isinstance(raw[key], str):
        raise TypeError(f"{key} is no text")
    return str(raw[key])


def what(problem: Problem) -> str:
    """Return the fault in words."""
    return _filled(TABLE[problem.code].what, problem)


def why(problem: Problem) -> str:
    """Return the finding in words."""
    return _filled(TABLE[problem.code].why, problem)


def fix(problem: Problem) -> str:
    """Return the remedy in words."""
    return _filled(TABLE[problem.code].fix, problem)


@dataclass(frozen=True)
class ShownProblem:
    """A problem as a person is shown it: a line, those that support it, and what to do."""

    line: str
    """The fault with its place, and the finding if there is room for it."""
    findings: tuple[str, ...]
    """The findings, if there are several or they are long."""
    hint: str
    """The remedy."""


def shown(problem: Problem, here: Collection[str]) -> ShownProblem:
    """Return a problem as it is shown."""
    place = "" if problem.where in here else problem.where
    line, finding = ": ".join(filter(None, (place, problem.what))), problem.why
    whole = "; ".join(filter(None, (line, finding)))
    if len(whole) <= _WIDEST:
        return ShownProblem(whole, (), problem.fix)
    return ShownProblem(line, tuple(finding.split("; ")), problem.fix)


def _filled(text: str, problem: Problem) -> str:
    return text.format_map({**problem.values, "where": problem.where})
