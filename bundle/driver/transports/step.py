"""A step: one command that runs a program on some nodes, and its faults by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...protocol.problem import ProblemCode

# --- A step: one command that runs a program on some nodes at the same time ----------------------


@dataclass(frozen=True)
class Step:
    """One command that runs a program on some nodes."""

    phase: str
    """The phase of the agents; also the name of the step."""
    nodes: tuple[str, ...]
    """The nodes on which it runs."""
    cpus: int
    """CPUs of each task."""
    tasks_per_node: int = 1
    """More than one only where Slurm itself starts the ranks."""
    together: bool = False
    """True if the first task that fails takes the others with it."""
    patience: int = 0
    """Seconds that tasks may go on after the first has ended; 0 for any time."""
    image: str | None = None
    """Container image, for the pyxis plugin."""
    mounts: tuple[str, ...] = ()
    """Paths of the node that the container sees, as pyxis takes them."""


# --- The faults of a step, by node, as the command that runs it has reported them ----------------


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
