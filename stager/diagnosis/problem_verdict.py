"""The failure that a problem of the far side is: its words, its class and its remedy."""

from __future__ import annotations

from bundle.protocol.problem import Problem
from bundle.protocol.problem_table import JOB_ENDINGS, TABLE, ending_problem

from .failure import FirstFailure


def of_problem(problem: Problem, node: str) -> FirstFailure:
    """Return the failure that is a problem.

    Args:
        problem: the problem.
        node: the node to name; empty for none.
    """
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
    """Return the failure for an end that Slurm made.

    Args:
        ending: one of :class:`~bundle.protocol.enumerations.Ending`, or what another version wrote.
        job_id: the allocation.
        node: the node to name; empty for none.
    """
    return of_problem(ending_problem(ending, job_id), node)
