"""The failure that a problem of the far side is: its words, its class and its remedy."""

from __future__ import annotations

from bundle.protocol.problem import Problem
from bundle.protocol.problem_table import JOB_ENDINGS, TABLE, ending_problem

from .failure import FirstFailure


def of_problem(problem: Problem, node: str) -> FirstFailure:
    """Return the failure that is a problem."""
    # The end of a job is said of that job alone: its number needs no mention.
    where = "" if problem.code in JOB_ENDINGS else problem.where
    return FirstFailure(
        node=node,
        kind=TABLE[problem.code].failure_class,
        cause=": ".join(filter(None, (where, problem.what, problem.why))),
        hint=problem.fix,
        problem=problem,
    )


def of_ending(ending: str, job_id: str, node: str) -> FirstFailure:
    """Return the failure for Slurm's end of a job: an ``Ending``, or another version's word."""
    return of_problem(ending_problem(ending, job_id), node)
