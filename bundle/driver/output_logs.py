"""The output of ranks on its way into their logs, and what of it is lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..protocol.events import OutputLoss, RankOutput
from ..protocol.problem import Problem, ProblemCode
from .logs import Logs
from .output_account import OutputAccount, loss_problem


class OutputLogs:
    """Writes the output of ranks into their logs.

    Attributes:
        account: what was sent, against what has come.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self.account = OutputAccount()

    def write(self, event: RankOutput, task: int) -> None:
        """Append output to the log of a task."""
        node, rank = event.node, event.rank
        if event.of_ranks:  # else an agent's own complaint, which no rank has sent
            self.account.receive(node, rank, len(event.data))
        self._logs.output(node, task, event.data, (node, rank))

    def losses(self) -> list[OutputLoss]:
        """Return the output that ranks have written and no log has."""
        logs = self._logs
        code = ProblemCode.OUTPUT_DISK_FULL if logs.disk_full else ProblemCode.OUTPUT_NOT_LOGGED
        unwritten = [
            OutputLoss(node, task, logs.fault, code, bytes=count)
            for (node, task), count in sorted(logs.lost.items())
            if count > 0
        ]
        return [*self.account.losses(), *unwritten]


def problems_of(
    losses: Sequence[OutputLoss], left_out: Collection[str]
) -> dict[str, tuple[Problem, ...]]:
    """Return losses as problems by node, without those of nodes that were left out.

    Such a node may have crashed in the middle of a message, and the job has gone on without it.
    """
    problems: dict[str, tuple[Problem, ...]] = {}
    for loss in losses:
        if loss.node not in left_out:
            problems[loss.node] = (*problems.get(loss.node, ()), loss_problem(loss))
    return problems
