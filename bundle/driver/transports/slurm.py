"""The nodes of a Slurm allocation: ``srun`` starts the agents, ``sbcast`` sends a file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO

from ...channel.bootstrap import make_memory_file
from ...protocol.events import Remark
from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...redaction.secret_names import remove_secret_variables
from ...system import processes
from ...system.hostlist import parse_counts
from . import slurm_text
from .agent_program import can_carry, make_container_command, make_start_command
from .phase_run import PhaseAnswers
from .step_transport import SendCommand, StepTransport
from .transport import Ended, OnEvent, Retry, Step, StepErrors, Transfer

CONTROLLER_SECONDS = 180.0
"""Time that the controller may be away; a backup takes over after ``SlurmctldTimeout``, 120 s."""
_SETTLING_SECONDS = 30.0  # time that it may refuse a step once it is back
_RETRY_SECONDS = 3.0


class ControllerWait:
    """Waits for a controller that does not answer: for a while, and saying so only once."""

    def __init__(
        self,
        on_event: Callable[[Remark], None],
        seconds: float = CONTROLLER_SECONDS,
        fault: Callable[[str], str] = slurm_text.controller_fault,
    ) -> None:
        self._on_event, self._seconds, self._fault = on_event, seconds, fault
        self._until = 0.0  # when the controller is given up; 0 while it answers
        self._settled = 0.0  # when it may no more refuse a step; 0 at first

    def may_retry(self, errors: str) -> bool:
        """Return whether a command is to be tried again; pause before that."""
        now = time.monotonic()
        fault = self._fault(errors)
        if not self._until and (fault or slurm_text.is_controller_new(errors)):
            self._until = now + self._seconds
            if fault:
                text = f"Slurm's controller does not answer ({fault}); trying again for up to "
                self._on_event(Remark(f"{text}{self._seconds:.0f} s"))
        if not (fault or self._is_settling(errors, now)) or now > self._until:
            return False
        time.sleep(_RETRY_SECONDS)
        return True

    def _is_settling(self, errors: str, now: float) -> bool:
        """Return whether the controller is back, but most nodes have not registered yet."""
        if not self._until or not slurm_text.is_step_refused(errors):
            return False
        self._settled = self._settled or now + _SETTLING_SECONDS
        return now < self._settled


_CHECK_SECONDS = 60.0  # to a node that does not answer, Slurm needs ten and more
_DESERTED = "stager-deserted "
_SCRIPT = f"""\
of() {{ grep -sqzx "$1=$2" "$3/environ"; }}
of SLURM_STEP_ID "$SLURM_STEP_ID" "/proc/$$" || exit 0
for process in /proc/[0-9]*; do
    if of SLURM_JOB_ID "$SLURM_JOB_ID" "$process" && of SLURM_STEP_ID '[0-9]*' "$process" &&
        ! of SLURM_STEP_ID "$SLURM_STEP_ID" "$process"; then exit 0; fi
done
echo "{_DESERTED}$SLURMD_NODENAME" >&2
"""  # says so where no process of another step of the job runs; nothing where that cannot be known


class _SlurmCheck:
    """Starts a step on silent nodes; asks ``sinfo``, too, as no step says which node is down."""

    def __init__(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        self._until = time.monotonic() + _CHECK_SECONDS
        self._nodes = nodes
        self._states = open(make_memory_file(b""), "w+b")  # noqa: SIM115 - closed in close
        self._errors = open(make_memory_file(b""), "w+b")  # noqa: SIM115
        self._processes: list[processes.Process] = []
        step = Step(phase="look", nodes=tuple(nodes), cpus=1)
        argv = slurm_text.make_step_argv(step, ["sh", "-c", _SCRIPT])
        none, states = processes.DEVNULL, slurm_text.make_states_argv(nodes)
        with contextlib.suppress(processes.ProcessError):  # nothing is found out
            for words, out, errors in ((argv, none, self._errors), (states, self._states, none)):
                started = processes.start(words, env=env, stdout=out, stderr=errors)
                self._processes.append(started)

    @property
    def has_ended(self) -> bool:
        running = any(process.poll() is None for process in self._processes)
        return not running or time.monotonic() > self._until

    def read_findings(self) -> tuple[dict[str, str], frozenset[str]]:
        errors = _read(self._errors)
        states = slurm_text.parse_down_nodes(_read(self._states)).items()
        down = {node: _end_down_node(state) for node, state in states if node in self._nodes}
        unreachable = {
            node: Problem(end.problem, node, {"phase": "", **end.values}).why
            for node, end in (*down.items(), *slurm_text.parse_step_faults(errors).items())
            if end.problem.row.is_unreachable
        }
        lines = [line for line in errors.splitlines() if line.startswith(_DESERTED)]
        return unreachable, frozenset(line[len(_DESERTED) :].strip() for line in lines)

    def close(self) -> None:
        for process in self._processes:
            processes.stop(process, 1.0)
        self._errors.close()
        self._states.close()


def _read(written: IO[bytes]) -> str:
    written.seek(0)
    return written.read().decode(errors="replace")


def _end_down_node(state: str) -> Ended:
    return Ended(ProblemCode.NO_ANSWER_NO_START, {"why": f"it is {state}"}, 1)


_ASK_SECONDS = 30.0
_HURRIED_SECONDS, _HURRIED_ASK_SECONDS = 5.0, 10.0  # once the user wants the end


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


class SlurmTransport(StepTransport):
    """The transport to the allocation that this process runs in."""

    errors: StepErrors = slurm_text
    not_started = ProblemCode.SRUN_NOT_STARTED

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._controller_seconds, self._ask_seconds = CONTROLLER_SECONDS, _ASK_SECONDS
        # What the ranks get besides is for their own step alone.
        self.variables, self.rank_variables = (
            slurm_text.make_step_environment(
                remove_secret_variables(os.environ, (*slurm_text.CREDENTIALS, *allowed))
            )
            for allowed in ((), job.launch.pass_env)
        )
        # A container's plugin may not pass on so long a variable.
        self.carries = job.launch.container_image is None and can_carry(os.environ)
        counts = parse_counts(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        self.cpus = job.cpus_per_task or min(counts, default=1)
        self.patience = slurm_text.read_patience(os.environ)
        self._version = slurm_text.parse_version(self._ask("srun", "--version"))

    def _make_argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        words = ("-c", bootstrap, "agent", command)
        program = make_start_command(self._job.python_hints, command, words)
        if self._job.launch.is_run_by_apptainer:
            program = make_container_command(self._job, command, program)
            step = step._replace(image=None)
        return slurm_text.make_step_argv(step, program)

    def _make_retry(self, on_event: OnEvent) -> Retry:
        return ControllerWait(on_event, self._controller_seconds).may_retry

    def _begin_check(self, nodes: Sequence[str]) -> _SlurmCheck:
        return _SlurmCheck(nodes, self.variables)

    def _find_down_nodes(self, nodes: Collection[str]) -> dict[str, Ended]:
        with contextlib.suppress(NodeError):
            states = slurm_text.parse_down_nodes(self._ask(*slurm_text.make_states_argv(nodes)))
            return {node: _end_down_node(state) for node, state in states.items()}
        return {}

    def _make_send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        width = slurm_text.choose_fanout(len(answers.nodes), self._version)
        step = next(iter(answers.ready.values())).step
        argv = slurm_text.make_broadcast_argv(transfer.source, transfer.target, step, width)
        return SendCommand(argv, slurm_text.parse_broadcast_faults)

    def _find_relay_ports(self) -> range | None:
        with contextlib.suppress(NodeError):
            return slurm_text.parse_srun_ports(self._ask("scontrol", "show", "config"))
        return None

    def find_ending(self) -> str:
        """Return the controller's reason for the end; empty if it does not answer in time."""
        errors = self._latest.errors if self._latest else ""
        return find_job_ending(self._job, errors, self._ask_seconds, self.variables)

    def hurry(self) -> None:
        """Keep every further wait short."""
        self._controller_seconds, self._ask_seconds = _HURRIED_SECONDS, _HURRIED_ASK_SECONDS

    def _ask(self, *argv: str) -> str:
        try:
            return processes.run(argv, timeout=self._ask_seconds, env=self.variables).stdout
        except processes.ProcessError as exc:
            values = {"command": argv[0], "why": "; ".join([exc.reason, *exc.tail[-1:]])}
            where = os.uname().nodename
            raise NodeError(Problem(ProblemCode.SLURM_COMMAND_FAILED, where, values)) from exc
