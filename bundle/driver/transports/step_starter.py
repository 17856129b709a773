"""Starting the steps of a job: the command, the variables and the input of each."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

from ...agent.agent import SESSION
from ...protocol.enumerations import Launcher, Stage, TransferWay
from ...protocol.job import Job
from ...protocol.requests import AgentRequest, LaunchRequest
from ...redaction.masking import without_secrets
from . import slurm_commands
from .agent_program import AgentProgram, factored, may_carry
from .driver_channel import DriverChannel
from .transport import Requests, mounts


@dataclass(frozen=True)
class StepCommand:
    """The command that starts a step."""

    argv: list[str]
    """Its words."""
    variables: dict[str, str]
    """All its variables."""
    input: bytes
    """What is written to its standard input at once."""


class StepStarter:
    """Starts steps in the allocation that this process runs in.

    Attributes:
        variables: all variables for commands of Slurm, and for agents that start no ranks.
        patience: seconds that nodes may go on after the first has ended well; 0 for any time.
        latest: the step that was started last.
    """

    def __init__(self, job: Job) -> None:
        """Read the program, and the variables of the allocation."""
        self._job = job
        with open(sys.argv[0], "rb") as handle:
            self._program = AgentProgram(handle.read())
        credentials = slurm_commands.CREDENTIALS
        self.variables = slurm_commands.step_environment(without_secrets(os.environ, credentials))
        # What the ranks get besides is for their own step alone.
        self._rank_variables = slurm_commands.step_environment(
            without_secrets(os.environ, (*credentials, *job.launch.pass_env))
        )
        # A container's plugin may not pass on so long a variable.
        self._carries = job.launch.container_image is None and may_carry(os.environ)
        counts = slurm_commands.cpus_per_node(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        self._cpus = job.cpus_per_task or min(counts, default=1)
        self.patience = slurm_commands.patience(os.environ)
        self.latest: DriverChannel | None = None

    def start(self, phase: str, requests: Requests, tasks: int, command: str = "") -> DriverChannel:
        """Start a step.

        Args:
            phase: the first phase that is asked for; the step has its name.
            requests: the request of each node.
            tasks: the number of tasks on each node.
            command: the command of the agents; empty for the phase and nothing else.
        """
        step = self.command(phase, requests, tasks, command)
        self.latest = DriverChannel(step.argv, step.variables, step.input)
        return self.latest

    def command(self, phase: str, requests: Requests, tasks: int, command: str = "") -> StepCommand:
        """Return the command of a step, and what its tasks are sent at once.

        The arguments are those of :meth:`start`.
        """
        command = command or phase
        launches = phase == "launch"
        settings = self._job.launch
        step = slurm_commands.Step(
            phase=phase,
            nodes=tuple(requests),
            cpus=max(1, self._cpus // tasks),
            tasks_per_node=tasks,
            together=launches and settings.elastic is None,
            patience=self.patience if launches else 0,
            image=settings.container_image,
            mounts=mounts(self._job),
        )
        starter = slurm_commands.starter(self._program.bootstrap, command, self._job.python_hints)
        if self.holds(phase):
            requests = {node: _held(request) for node, request in requests.items()}
        phases = self._phases(command)
        variables = self._rank_variables if launches else self.variables
        if self._carries:
            variables = {**variables, **self._program.variables(phases)}
        message = factored(requests)
        step_input = self._program.step_input(phases, message, carried=self._carries)
        return StepCommand(slurm_commands.step_argv(step, starter), variables, step_input)

    def tasks(self, phase: str, requests: Requests) -> int:
        """Return the tasks of a node: one for each rank where Slurm starts the ranks, else one."""
        if phase != "launch" or self._job.launch.launcher is not Launcher.SRUN:
            return 1
        launches = [request for request in requests.values() if isinstance(request, LaunchRequest)]
        return max(request.group.nproc for request in launches)

    def holds(self, phase: str) -> bool:
        """Return whether ranks wait until all nodes are there: the job may go on with fewer."""
        return phase == "launch" and not self._job.one_step and self._job.min_nodes is not None

    def _phases(self, command: str) -> set[str]:
        """Return the phases that agents with this command may be asked for."""
        relays = self._job.transfer in (TransferWay.AUTO, TransferWay.RELAY)
        relay = {"relay"} if relays and self._job.stage is not Stage.NEVER else set()
        if command == "unpack":
            return relay
        if command != SESSION:
            return {command}
        phases: set[str] = {self._job.action, *relay}
        if self._job.deep:
            phases.add("deep")
        # A deep check launches, too; and so may the session of a job that runs.
        if self._job.one_step and phases & {"run", "deep"}:
            phases.add("launch")
        return phases


def _held(request: AgentRequest) -> AgentRequest:
    return replace(request, hold=True) if isinstance(request, LaunchRequest) else request
