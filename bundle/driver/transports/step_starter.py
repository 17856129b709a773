"""Starting the steps of a job: the command, the variables and the input of each."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from ...protocol.enumerations import Action, Launcher, PhaseName, Stage, TransferWay
from ...protocol.job import Job
from ...protocol.messages import AgentRequest, LaunchRequest
from .agent_program import AgentProgram, factored
from .driver_channel import DriverChannel
from .step import Step
from .step_cluster import StepCluster
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
    """Starts steps on the nodes of a cluster.

    Attributes:
        latest: the step that was started last.
    """

    def __init__(self, job: Job, cluster: StepCluster) -> None:
        self._job, self._cluster = job, cluster
        with open(sys.argv[0], "rb") as handle:
            self._program = AgentProgram(handle.read())
        self.latest: DriverChannel | None = None

    def start(self, phase: str, requests: Requests, tasks: int, command: str = "") -> DriverChannel:
        """Start a step."""
        step = self.command(phase, requests, tasks, command)
        self.latest = DriverChannel(step.argv, step.variables, step.input, self._cluster.errors)
        return self.latest

    def command(self, phase: str, requests: Requests, tasks: int, command: str = "") -> StepCommand:
        """Return the command of a step, and what its tasks are sent at once.

        The arguments are those of :meth:`start`.
        """
        command = command or phase
        launches = phase == PhaseName.LAUNCH
        settings = self._job.launch
        step = Step(
            phase=phase,
            nodes=tuple(requests),
            cpus=max(1, self._cluster.cpus // tasks),
            tasks_per_node=tasks,
            together=launches and settings.elastic is None,
            patience=self._cluster.patience if launches else 0,
            image=settings.container_image,
            mounts=mounts(self._job),
        )
        argv = self._cluster.argv(step, self._program.bootstrap, command)
        if self.holds(phase):
            requests = {node: _held(request) for node, request in requests.items()}
        phases = phases_of(self._job, command)
        variables = self._cluster.rank_variables if launches else self._cluster.variables
        if self._cluster.carries:
            variables = {**variables, **self._program.variables(phases)}
        step_input = self._program.step_input(
            phases,
            factored(requests),
            carried=self._cluster.carries,
            variables=self._cluster.sent_variables(ranks=launches),
        )
        return StepCommand(argv, dict(variables), step_input)

    def tasks(self, phase: str, requests: Requests) -> int:
        """Return the tasks of a node: one for each rank where Slurm starts the ranks, else one."""
        if phase != PhaseName.LAUNCH or self._job.launch.launcher is not Launcher.SRUN:
            return 1
        launches = [request for request in requests.values() if isinstance(request, LaunchRequest)]
        return max(request.group.nproc for request in launches)

    def holds(self, phase: str) -> bool:
        """Return whether ranks wait until all nodes are there: the job may go on with fewer."""
        return (
            phase == PhaseName.LAUNCH and not self._job.one_step and self._job.min_nodes is not None
        )


def phases_of(job: Job, command: str) -> set[str]:
    """Return the phases, and other parts of a job, that agents with this command must know."""
    signature = {"signature"} if job.trust is not None else set()
    return {*signature, *_phases(job, command)}


def _phases(job: Job, command: str) -> set[str]:
    relays = job.transfer in (TransferWay.AUTO, TransferWay.RELAY)
    relay = {"relay"} if relays and job.stage is not Stage.NEVER else set()
    processes = job.launch.launcher is Launcher.PROCESSES
    launch: set[str] = {PhaseName.LAUNCH, "processes"} if processes else {PhaseName.LAUNCH}
    may_resume = job.action is Action.RUN and job.resume_limit and {*job.outputs} - {*job.tracked}
    results = {"results"} if may_resume else set()
    if command == PhaseName.UNPACK:
        return {*relay, *results}
    if command != PhaseName.SESSION:
        return launch if command == PhaseName.LAUNCH else {command}
    phases: set[str] = {job.action, *relay, *results}
    if job.deep:
        phases.add(PhaseName.DEEP)
    # A deep check launches, too; and so may the session of a job that runs.
    if job.one_step and phases & {Action.RUN, PhaseName.DEEP}:
        phases |= launch
    return phases


def _held(request: AgentRequest) -> AgentRequest:
    return replace(request, hold=True) if isinstance(request, LaunchRequest) else request
