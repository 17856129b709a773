"""The nodes of a Slurm allocation: ``srun`` starts the agents, ``sbcast`` sends a file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import IO

from ...channel.bootstrap import make_memory_file
from ...protocol.events import Remark
from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...redaction.secret_names import remove_secret_variables
from ...system import processes
from . import apptainer, slurm_text
from .agent_program import can_carry
from .file_sender import SendCommand
from .phase_run import PhaseAnswers
from .step_transport import StepTransport
from .transport import Ended, OnEvent, Retry, Step, StepErrors, Transfer

# --- The wait for a controller that does not answer --------------------------------------------

CONTROLLER_SECONDS = 180.0
"""Time that Slurm's controller may be away before a step that has not started is given up.

A restart takes seconds; a backup controller takes over after ``SlurmctldTimeout``, 120 s.
"""
_SETTLING_SECONDS = 30.0
"""Time that it may refuse a step once it is back."""
_RETRY_SECONDS = 3.0


class ControllerWait:
    """Waits for a controller that does not answer: for a while, and saying so only once."""

    def __init__(
        self,
        on_event: Callable[[Remark], None],
        seconds: float = CONTROLLER_SECONDS,
        fault: Callable[[str], str] = slurm_text.controller_fault,
    ) -> None:
        """Wait for a controller that does not answer: ``fault`` returns such a reason, or empty."""
        self._on_event, self._seconds, self._fault = on_event, seconds, fault
        self._until = 0.0
        """The time at which the controller is given up; 0 before it has failed to answer."""
        self._settled = 0.0
        """The time from which it may not refuse a step; 0 before it has refused one."""

    def may_retry(self, errors: str) -> bool:
        """Return whether a command is to be tried again; pause before that."""
        now = time.monotonic()
        fault = self._fault(errors)
        if fault and not self._until:
            self._until = now + self._seconds
            text = (
                f"Slurm's controller does not answer ({fault}); trying again for up to "
                f"{self._seconds:.0f} s"
            )
            self._on_event(Remark(text))
        elif not self._until and slurm_text.is_controller_new(errors):
            self._until = now + self._seconds
        waits = bool(fault) or self._is_settling(errors, now)
        if not waits or now > self._until:
            return False
        time.sleep(_RETRY_SECONDS)
        return True

    def _is_settling(self, errors: str, now: float) -> bool:
        """Tell whether the controller is back, but most nodes have not registered yet."""
        if not self._until or not slurm_text.is_step_refused(errors):
            return False
        self._settled = self._settled or now + _SETTLING_SECONDS
        return now < self._settled


# --- A check whether silent nodes of an allocation can be reached, by a step of its own ----------

# ``sinfo`` is asked as well: Slurm creates no step on a node that is down already, and does not
# name the node then.

_LOOK_SECONDS = 60.0
"""Time that a look may take: to a node that does not answer, Slurm needs ten and more."""
_DESERTED = "stager-deserted "
_LOOK = f"""\
of() {{ grep -sqzx "$1=$2" "$3/environ"; }}
of SLURM_STEP_ID "$SLURM_STEP_ID" "/proc/$$" || exit 0
for process in /proc/[0-9]*; do
    if of SLURM_JOB_ID "$SLURM_JOB_ID" "$process" && of SLURM_STEP_ID '[0-9]*' "$process" &&
        ! of SLURM_STEP_ID "$SLURM_STEP_ID" "$process"; then exit 0; fi
done
echo "{_DESERTED}$SLURMD_NODENAME" >&2
"""
"""Says so where no process of another step of the job runs; nothing where that cannot be known."""


class SlurmLook:
    """A step on some nodes that looks whether the job is still there."""

    def __init__(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        self._until = time.monotonic() + _LOOK_SECONDS
        self._nodes = nodes
        self._states = open(make_memory_file(b""), "w+b")  # noqa: SIM115 - closed in close
        self._errors = open(make_memory_file(b""), "w+b")  # noqa: SIM115
        self._processes: list[processes.Process] = []
        step = Step(phase="look", nodes=tuple(nodes), cpus=1)
        commands = (
            (slurm_text.step_argv(step, ["sh", "-c", _LOOK]), processes.DEVNULL, self._errors),
            (slurm_text.states_argv(nodes), self._states, processes.DEVNULL),
        )
        with contextlib.suppress(processes.ProcessError):  # nothing is found out
            for argv, stdout, stderr in commands:
                started = processes.start(argv, env=env, stdout=stdout, stderr=stderr)
                self._processes.append(started)

    @property
    def ended(self) -> bool:
        """True once it has ended, or has taken too long."""
        running = any(process.poll() is None for process in self._processes)
        return not running or time.monotonic() > self._until

    def unreachable(self) -> dict[str, str]:
        """Return the nodes on which Slurm could start nothing, and why."""
        unreachable = {
            node: Problem(fault.problem, node, fault.values).why
            for node, fault in slurm_text.parse_step_faults(_read(self._errors)).items()
            if fault.problem.row.is_unreachable
        }
        for node, state in slurm_text.down_nodes(_read(self._states)).items():
            if node in self._nodes:
                values = {"phase": "", "why": f"it is {state}"}
                no_start = Problem(ProblemCode.NO_ANSWER_NO_START, node, values)
                unreachable.setdefault(node, no_start.why)
        return unreachable

    def deserted_nodes(self) -> frozenset[str]:
        """Return the nodes on which it has found nothing of the job."""
        lines = [line for line in _read(self._errors).splitlines() if line.startswith(_DESERTED)]
        return frozenset(line[len(_DESERTED) :].strip() for line in lines)

    def close(self) -> None:
        """End it."""
        for process in self._processes:
            processes.stop(process, 1.0)
        self._errors.close()
        self._states.close()


def _read(written: IO[bytes]) -> str:
    written.seek(0)
    return written.read().decode(errors="replace")


_ASK_SECONDS = 30.0
_HURRIED_SECONDS, _HURRIED_ASK_SECONDS = 5.0, 10.0
"""The waits for an absent controller, and for its answers, once the user has asked for the end."""


def slurm_transport(job: Job) -> StepTransport:
    """Return the transport to the allocation that this process runs in.

    Raises:
        NodeError: a command of Slurm's is missing here.
    """
    return StepTransport(job, SlurmCluster(job))


def find_job_ending(
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
    return slurm_text.parse_job_ending(shown, job.attempt, errors) or ""


class SlurmCluster:
    """The allocation that this process runs in."""

    def __init__(self, job: Job) -> None:
        """Look at the allocation once.

        Raises:
            NodeError: a command of Slurm's is missing here.
        """
        self.errors: StepErrors = slurm_text
        self._job = job
        self._controller_seconds, self._ask_seconds = CONTROLLER_SECONDS, _ASK_SECONDS
        credentials = slurm_text.CREDENTIALS
        self.variables: Mapping[str, str] = slurm_text.step_environment(
            remove_secret_variables(os.environ, credentials)
        )
        # What the ranks get besides is for their own step alone.
        self.rank_variables: Mapping[str, str] = slurm_text.step_environment(
            remove_secret_variables(os.environ, (*credentials, *job.launch.pass_env))
        )
        # A container's plugin may not pass on so long a variable.
        self.carries = job.launch.container_image is None and can_carry(os.environ)
        counts = slurm_text.cpus_per_node(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        self.cpus = job.cpus_per_task or min(counts, default=1)
        self.patience = slurm_text.patience(os.environ)
        self._version = slurm_text.version(self._ask("srun", "--version"))

    def argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        """Return the ``srun`` of a step."""
        program = slurm_text.make_starter(bootstrap, command, self._job.python_hints)
        if self._job.launch.is_run_by_apptainer:
            program = apptainer.make_container_command(self._job, command, program)
            step = replace(step, image=None)
        return slurm_text.step_argv(step, program)

    def sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        """Return none: ``srun`` passes its own on."""
        return {}

    def retries(self, on_event: OnEvent) -> Retry:
        """Return what waits for a controller that does not answer."""
        return ControllerWait(on_event, self._controller_seconds).may_retry

    def look_at(self, nodes: Sequence[str]) -> SlurmLook:
        """Start a step that looks whether nodes can be reached."""
        return SlurmLook(nodes, self.variables)

    def down(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Return those of an allocation's nodes that Slurm lost before anything ran on them."""
        try:
            states = slurm_text.down_nodes(self._ask(*slurm_text.states_argv(nodes)))
        except NodeError:
            return {}
        no_start = ProblemCode.NO_ANSWER_NO_START
        return {
            node: Ended(1, no_start, {"why": f"it is {state}"}) for node, state in states.items()
        }

    def send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        """Return the ``sbcast`` that sends a file to agents that wait for it."""
        width = slurm_text.choose_fanout(len(answers.nodes), self._version)
        argv = slurm_text.broadcast_argv(transfer.source, transfer.target, answers.step_id, width)
        return SendCommand(argv, slurm_text.parse_broadcast_faults)

    def relay_ports(self) -> range | None:
        """Return the ports of this host that a cluster's firewall lets nodes connect to.

        It is where ``srun`` listens, too. None where Slurm names none.
        """
        with contextlib.suppress(NodeError):
            return slurm_text.srun_ports(self._ask("scontrol", "show", "config"))
        return None

    def not_started(self, why: str) -> Problem:
        """Return the problem of an ``srun`` that cannot be started."""
        return Problem(ProblemCode.SRUN_NOT_STARTED, "", {"why": why})

    def ended_by(self, errors: str) -> str:
        """Return the controller's reason for the end; empty where it cannot be asked."""
        return find_job_ending(self._job, errors, self._ask_seconds, self.variables)

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
