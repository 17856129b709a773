"""The faults of a step, by node, as the command that runs it has reported them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...protocol.problem import ProblemCode


@dataclass(frozen=True)
class StepFault:
    """A fault of a step on one node."""

    problem: ProblemCode
    """One of the ``NO_ANSWER`` codes, or another that says why nothing could begin."""
    values: Mapping[str, str]
    """Its values: ``why``, with the command's words, where it has any."""
    status: int | None = None
    """The exit status in the report, negative for a signal; None if it has none."""


class StepErrors(Protocol):
    """Reads what the command of a step has written to standard error. Pure functions."""

    def step_faults(self, stderr: str) -> dict[str, StepFault]:
        """Return the nodes that a step went wrong on, and how."""

    def ended_tasks(self, stderr: str) -> dict[str, set[int]]:
        """Return each node's tasks that have failed."""

    def general_fault(self, code: int, stderr: str) -> StepFault:
        """Return the fault of a node of which nothing was said: that of its whole step."""
