"""All that differs between clusters on which one command starts an agent on each node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ...protocol.problem import Problem, ProblemCode
from .phase_run import PhaseRun
from .step import Step
from .step_faults import StepErrors
from .timeouts import Look, Waiting
from .transport import Ended, OnEvent, Transfer


class StepCluster(Protocol):
    """The nodes of a job, and the command that starts agents on them."""

    variables: Mapping[str, str]
    """All variables for commands of ours, and for agents that start no ranks."""
    rank_variables: Mapping[str, str]
    """All variables for agents that start ranks in a step of their own."""
    carries: bool
    """True if variables may carry the program of the agents."""
    cpus: int
    """CPUs of each node's part."""
    patience: int
    """Seconds that nodes may go on after the first has ended well; 0 for any time."""
    errors: StepErrors
    """The reader of what the command writes to standard error."""
    unreachable: Collection[ProblemCode]
    """The problems of nodes that cannot be used themselves."""

    def argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        """Return the command that starts agents."""

    def sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        """Return the variables that are sent to agents, with those for ranks if they start some."""

    def waiting(self, on_event: OnEvent) -> Waiting:
        """Return the wait for what starts the agents, while it does not answer."""

    def look_at(self, nodes: Sequence[str]) -> Look | None:
        """Begin to look whether silent nodes can be reached; None where that shows by itself."""

    def down(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Return those of the nodes that were lost before anything ran on them."""

    def send(
        self, transfer: Transfer, run: PhaseRun, waiting: Waiting
    ) -> tuple[dict[str, str], float]:
        """Send a file to agents that wait for it, without a relay.

        Returns:
            The nodes that were not reached, with the reasons, and the seconds that it took.
        """

    def relay_ports(self) -> range | None:
        """Return the ports of this host that nodes may connect to; None for any."""

    def not_started(self, why: str) -> Problem:
        """Return the problem of a command that cannot be started."""

    def ended_by(self, errors: str) -> str:
        """Return why the allocation ended; empty while it stands."""

    def hurry(self) -> None:
        """Keep every further wait short: the user has asked for the end."""
