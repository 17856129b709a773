"""Timeouts: for Slurm's controller, and for nodes that lag behind others that are done.

A node whose network is gone ends no connection: ``srun`` waits for its tasks, and Slurm notices
only after ``SlurmdTimeout``, five minutes as a rule. So once other nodes are done, and nothing has
come for a while, a step is started on those that are not: ``srun`` then names the ones on which it
can start nothing. Neither does ``srun`` notice that the ``slurmstepd`` of a node was killed, by the
kernel where memory ran out for example: so the step also looks whether the job still runs there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ...protocol.answers import Answer
from ...protocol.events import Remark
from ...protocol.launch_answers import RanksEnded
from ...protocol.problem import Problem, ProblemCode
from ...system import processes
from . import slurm_commands, slurm_faults
from .driver_channel import DriverChannel
from .transport import Ended, Event, OnEvent, Requests

CONTROLLER_SECONDS = 180.0
"""Time that Slurm's controller may be away before a step that has not started is given up.

A restart takes seconds; a backup controller takes over after ``SlurmctldTimeout``, 120 s.
"""
_SETTLING_SECONDS = 30.0
"""Time that it may refuse a step once it is back."""
_RETRY_SECONDS = 3.0
QUIET_SECONDS = 10.0
"""Time without a word after which silent nodes are looked for; each further look waits longer."""
_LONGEST_SECONDS = 300.0
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


class Waiting:
    """Waits for a controller that does not answer: for a while, and saying so only once."""

    def __init__(
        self,
        on_event: Callable[[Remark], None],
        seconds: float = CONTROLLER_SECONDS,
        fault: Callable[[str], str] = slurm_faults.controller_fault,
    ) -> None:
        """Begin; nothing is waited for yet.

        Args:
            on_event: called once with what is waited for.
            seconds: the longest time to wait.
            fault: finds in what a command wrote to standard error why nothing has begun; empty
                for any other reason than a controller that does not answer.
        """
        self._on_event, self._seconds, self._fault = on_event, seconds, fault
        self._until = 0.0
        """The time at which the controller is given up; 0 before it has failed to answer."""
        self._settled = 0.0
        """The time from which it may not refuse a step; 0 before it has refused one."""

    def again(self, errors: str) -> bool:
        """Return whether a command is to be tried again; pause before that.

        Args:
            errors: what the command wrote to standard error before it ended.
        """
        now = time.monotonic()
        fault = self._fault(errors)
        if fault and not self._until:
            self._until = now + self._seconds
            self._note(fault)
        waits = bool(fault) or self._is_settling(errors, now)
        if not waits or now > self._until:
            return False
        time.sleep(_RETRY_SECONDS)
        return True

    def _note(self, fault: str) -> None:
        text = (
            f"Slurm's controller does not answer ({fault}); trying again for up to "
            f"{self._seconds:.0f} s"
        )
        self._on_event(Remark(text))

    def _is_settling(self, errors: str, now: float) -> bool:
        """Return whether it is back, but knows little of the nodes until they have registered."""
        if not self._until or not slurm_faults.not_created(errors):
            return False
        self._settled = self._settled or now + _SETTLING_SECONDS
        return now < self._settled


class Watch:
    """The nodes of one phase: which are done, and which cannot be reached any more.

    Attributes:
        lost: the nodes that are given up, and why.
    """

    def __init__(
        self,
        phase: str,
        nodes: Collection[str],
        on_event: OnEvent,
        env: Mapping[str, str],
    ) -> None:
        """Begin.

        Args:
            phase: its name, and that of the event by which a node is done.
            nodes: the nodes that do it.
            on_event: called with each event of theirs, and with what is found out.
            env: all variables for ``srun``.
        """
        self.lost: dict[str, Ended] = {}
        self._on_event, self._env = on_event, env
        self._nodes = dict.fromkeys(nodes)
        self._last_events = (RanksEnded.event, phase)
        """Names of the events after which nothing is waited for."""
        self._done: set[str] = set()
        self._pause = QUIET_SECONDS
        self._next_look = 0.0
        self._look: _Look | None = None
        self._deserted: frozenset[str] = frozenset()
        """The nodes that the last look found deserted."""

    def take(self, event: Event) -> None:
        """Learn from an event of a node, and pass it on."""
        if isinstance(event, (RanksEnded, Answer)) and event.event in self._last_events:
            self._done.add(event.node)
        self._next_look = time.monotonic() + self._pause
        self._on_event(event)

    def over(self, gone: Collection[str]) -> bool:
        """Return whether some nodes are gone and all others are done: nothing more will come."""
        gone = {*gone, *self.lost}
        return bool(gone) and bool(self._done) and {*self._done, *gone} >= {*self._nodes}

    def look(self, gone: Collection[str]) -> None:
        """Look for nodes that cannot be reached, if it is time to; never wait for anything.

        Args:
            gone: nodes of which Slurm itself says that they are.
        """
        if self._look is not None:
            self._end_look(self._look)
        elif self._done and time.monotonic() >= self._next_look:
            self._begin_look(gone)

    def lose(self, node: str, problem: ProblemCode, values: Mapping[str, str]) -> None:
        """Give a node up, and say why; nothing for one that is done.

        Args:
            node: its name.
            problem: the kind of its silence.
            values: those of the problem.
        """
        if node in self._nodes and node not in self._done:
            self.lost[node] = Ended(1, problem, values)
            text = f"{node} is lost: {_words(node, problem, values)}"
            self._on_event(Remark(text))

    def close(self) -> None:
        """End a look that is still going on."""
        if self._look is not None:
            self._look.close()
            self._look = None

    def _begin_look(self, gone: Collection[str]) -> None:
        known = {*self._done, *gone, *self.lost}
        silent = [node for node in self._nodes if node not in known]
        if silent:
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
            self._next_look = time.monotonic() + self._pause
            self._look = _Look(silent, self._env)

    def _end_look(self, look: _Look) -> None:
        """Learn from a look, if it has ended."""
        if not look.ended:
            return
        errors = look.errors()
        self.close()
        for node, fault in slurm_faults.step_faults(errors).items():
            if fault.problem in slurm_faults.UNREACHABLE:
                reason = _words(node, fault.problem, fault.values)
                self.lose(node, ProblemCode.NO_ANSWER_UNREACHABLE, {"why": reason})
        deserted = _deserted_nodes(errors)
        # Twice in a row: its last word may have been on its way.
        for node in sorted(deserted & self._deserted):
            self.lose(node, ProblemCode.NO_ANSWER_DESERTED, {})
        self._deserted = deserted


def _words(node: str, problem: ProblemCode, values: Mapping[str, str]) -> str:
    return Problem(problem, node, values).why


def _deserted_nodes(errors: str) -> frozenset[str]:
    """Return the nodes on which a look has found nothing of the job."""
    lines = [line for line in errors.splitlines() if line.startswith(_DESERTED)]
    return frozenset(line[len(_DESERTED) :].strip() for line in lines)


class _Look:
    """A step on some nodes that looks whether the job is still there."""

    def __init__(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        self._until = time.monotonic() + _LOOK_SECONDS
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        self._process: processes.Process | None = None
        step = slurm_commands.Step(phase="look", nodes=tuple(nodes), cpus=1)
        try:
            self._process = processes.start(
                slurm_commands.step_argv(step, ["sh", "-c", _LOOK]),
                env=env,
                stdout=processes.DEVNULL,
                stderr=self._errors,
            )
        except processes.ProcessError:
            return  # nothing is found out

    @property
    def ended(self) -> bool:
        """True once it has ended, or has taken too long."""
        running = self._process is not None and self._process.poll() is None
        return not running or time.monotonic() > self._until

    def errors(self) -> str:
        """Return what Slurm and the step have written to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            processes.stop(self._process, 1.0)
        self._errors.close()


def endings(requests: Requests, step: DriverChannel) -> dict[str, Ended]:
    """Return how each node's part of a step has ended, for the case that it gave no answer."""
    general = slurm_faults.general_fault(step.code, step.errors)
    endings = {}
    for node in requests:
        fault = step.faults.get(node, general)
        code = fault.status
        if code is None:  # srun itself may have ended well
            code = step.code or int(fault.problem in slurm_faults.UNREACHABLE)
        endings[node] = Ended(code, fault.problem, fault.values)
    return endings
