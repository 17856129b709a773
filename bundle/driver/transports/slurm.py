"""The nodes of a Slurm allocation: ``srun`` starts the agents, ``sbcast`` sends a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...redaction.secrets import without_secrets
from ...system import processes
from . import apptainer, sbcast, slurm_commands, slurm_faults
from .agent_program import may_carry
from .phase_run import PhaseRun
from .slurm_look import SlurmLook
from .step import Step
from .step_faults import StepErrors
from .step_transport import StepTransport
from .timeouts import CONTROLLER_SECONDS, Waiting
from .transport import Ended, OnEvent, Transfer

_ASK_SECONDS = 30.0
_HURRIED_SECONDS, _HURRIED_ASK_SECONDS = 5.0, 10.0
"""The waits for an absent controller, and for its answers, once the user has asked for the end."""


def slurm_transport(job: Job) -> StepTransport:
    """Return the transport to the allocation that this process runs in.

    Raises:
        NodeError: a command of Slurm's is missing here.
    """
    return StepTransport(job, SlurmCluster(job))


def ended_by(
    job: Job,
    errors: str = "",
    seconds: float = _HURRIED_ASK_SECONDS,
    env: Mapping[str, str] | None = None,
) -> str:
    """Return the controller's reason for the end of a job; empty if it does not answer in time."""
    try:
        argv = ("scontrol", "--oneliner", "show", "job", job.id)
        shown = processes.run(argv, timeout=seconds, env=env).stdout
    except processes.ProcessError:
        return ""
    return slurm_commands.ended_by(shown, job.attempt, errors) or ""


class SlurmCluster:
    """The allocation that this process runs in."""

    unreachable: Collection[ProblemCode] = slurm_faults.UNREACHABLE

    def __init__(self, job: Job) -> None:
        """Look at the allocation once.

        Raises:
            NodeError: a command of Slurm's is missing here.
        """
        self.errors: StepErrors = slurm_faults
        self._job = job
        self._controller_seconds, self._ask_seconds = CONTROLLER_SECONDS, _ASK_SECONDS
        credentials = slurm_commands.CREDENTIALS
        self.variables: Mapping[str, str] = slurm_commands.step_environment(
            without_secrets(os.environ, credentials)
        )
        # What the ranks get besides is for their own step alone.
        self.rank_variables: Mapping[str, str] = slurm_commands.step_environment(
            without_secrets(os.environ, (*credentials, *job.launch.pass_env))
        )
        # A container's plugin may not pass on so long a variable.
        self.carries = job.launch.container_image is None and may_carry(os.environ)
        counts = slurm_commands.cpus_per_node(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        self.cpus = job.cpus_per_task or min(counts, default=1)
        self.patience = slurm_commands.patience(os.environ)
        version = slurm_commands.version(self._ask("srun", "--version"))
        self._broadcaster = sbcast.broadcaster(self.variables, version)

    def argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        """Return the ``srun`` of a step."""
        program = slurm_commands.starter(bootstrap, command, self._job.python_hints)
        if self._job.launch.in_apptainer:
            program = apptainer.entering(self._job, command, program)
            step = replace(step, image=None)
        return slurm_commands.step_argv(step, program)

    def sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        """Return none: ``srun`` passes its own on."""
        return {}

    def waiting(self, on_event: OnEvent) -> Waiting:
        """Return the wait for a controller that does not answer."""
        return Waiting(on_event, self._controller_seconds)

    def look_at(self, nodes: Sequence[str]) -> SlurmLook:
        """Start a step that looks whether nodes can be reached."""
        return SlurmLook(nodes, self.variables)

    def down(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Return those of an allocation's nodes that Slurm lost before anything ran on them."""
        try:
            states = slurm_commands.down_nodes(self._ask(*slurm_commands.states_argv(nodes)))
        except NodeError:
            return {}
        no_start = ProblemCode.NO_ANSWER_NO_START
        return {
            node: Ended(1, no_start, {"why": f"it is {state}"}) for node, state in states.items()
        }

    def send(
        self, transfer: Transfer, run: PhaseRun, waiting: Waiting
    ) -> tuple[dict[str, str], float]:
        """Broadcast a file to agents that wait for it."""
        return self._broadcaster.send(transfer, run, waiting)

    def relay_ports(self) -> range | None:
        """Return the ports of this host that a cluster's firewall lets nodes connect to.

        It is where ``srun`` listens, too. None where Slurm names none.
        """
        with contextlib.suppress(NodeError):
            return slurm_commands.srun_ports(self._ask("scontrol", "show", "config"))
        return None

    def not_started(self, why: str) -> Problem:
        """Return the problem of an ``srun`` that cannot be started."""
        return Problem(ProblemCode.SRUN_NOT_STARTED, "", {"why": why})

    def ended_by(self, errors: str) -> str:
        """Return the controller's reason for the end; empty where it cannot be asked."""
        return ended_by(self._job, errors, self._ask_seconds, self.variables)

    def hurry(self) -> None:
        """Wait for an absent controller for some seconds only."""
        self._controller_seconds, self._ask_seconds = _HURRIED_SECONDS, _HURRIED_ASK_SECONDS

    def _ask(self, *argv: str) -> str:
        try:
            return processes.run(argv, timeout=self._ask_seconds, env=self.variables).stdout
        except processes.ProcessError as exc:
            values = {"command": argv[0], "why": "; ".join([exc.reason, *exc.tail[-1:]])}
            where = os.uname().nodename
            raise NodeError(Problem(ProblemCode.SLURM_COMMAND_FAILED, where, values)) from exc
