"""Those who say nothing: Slurm's controller, for a while, and nodes, when others are done.

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
from typing import Any

from ...launch.output_reader import RANKS_ENDED
from ...system import processes
from . import slurm_commands
from .driver_channel import DriverChannel
from .transport import Ended, OnEvent, Requests

CONTROLLER_SECONDS = 180.0
"""How long Slurm's controller may be away before a step is given up that nothing has begun of.

A restart takes seconds; a backup controller takes over after ``SlurmctldTimeout``, 120 s.
"""
_SETTLING_SECONDS = 30.0
"""How long it may refuse a step once it is back."""
_RETRY_SECONDS = 3.0
QUIET_SECONDS = 10.0
"""How long nothing has come when silent nodes are looked for; each further look waits longer."""
_LONGEST_SECONDS = 300.0
_LOOK_SECONDS = 60.0
"""How long a look may take: to a node that does not answer, Slurm needs ten and more."""
_DESERTED = "stager-deserted "
_LOOK = f"""\
of() {{ grep -sqzx "$1=$2" "$3/environ"; }}
of SLURM_STEP_ID "$SLURM_STEP_ID" "/proc/$$" || exit 0
for place in /proc/[0-9]*; do
    if of SLURM_JOB_ID "$SLURM_JOB_ID" "$place" && of SLURM_STEP_ID '[0-9]*' "$place" &&
        ! of SLURM_STEP_ID "$SLURM_STEP_ID" "$place"; then exit 0; fi
done
echo "{_DESERTED}$SLURMD_NODENAME" >&2
"""
"""Says so where no process of another step of the job runs; nothing where that cannot be known."""
_DESERTED_ADVICE = (
    "see on {node} what ended slurmstepd and the job's processes: `dmesg` shows the out-of-memory "
    "killer's work; or leave the node out with --exclude={node}"
)


class Waiting:
    """Waits for a controller that does not answer: for a while, and only saying so once."""

    def __init__(
        self,
        on_event: OnEvent,
        seconds: float = CONTROLLER_SECONDS,
        fault: Callable[[str], str] = slurm_commands.controller_fault,
    ) -> None:
        """Begin; nothing is waited for yet.

        Args:
            on_event: called once with what is waited for.
            seconds: how long.
            fault: finds in what a command wrote to standard error why nothing has begun; empty
                for any other reason than a controller that does not answer.
        """
        self._on_event, self._seconds, self._fault = on_event, seconds, fault
        self._until = 0.0
        self._settled = 0.0

    def again(self, said: str) -> bool:
        """Whether to try again, after a pause, what ended with these lines on standard error."""
        now = time.monotonic()
        fault = self._fault(said)
        if fault and not self._until:
            self._until = now + self._seconds
            text = (
                f"Slurm's controller does not answer ({fault}); trying again for up to "
                f"{self._seconds:.0f} s"
            )
            self._on_event({"v": 1, "event": "note", "text": text})
        if not fault and self._until and slurm_commands.not_created(said):
            # It is back, but knows little of the nodes until they have registered with it.
            self._settled = self._settled or now + _SETTLING_SECONDS
            fault = said if now < self._settled else ""
        if not fault or now > self._until:
            return False
        time.sleep(_RETRY_SECONDS)
        return True


class Watch:
    """What is known of the nodes of one phase: who is done, and who cannot be reached any more."""

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
        self._phase, self._nodes, self._on_event, self._env = phase, tuple(nodes), on_event, env
        self._done: set[str] = set()
        self._pause = QUIET_SECONDS
        self._next = 0.0
        self._look: _Look | None = None
        self._deserted: frozenset[str] = frozenset()

    def take(self, event: dict[str, Any]) -> None:
        """Learn from an event of a node, and pass it on."""
        if event["event"] == RANKS_ENDED or (event["event"] == self._phase and "ok" in event):
            self._done.add(str(event["node"]))
        self._next = time.monotonic() + self._pause
        self._on_event(event)

    def over(self, gone: Collection[str]) -> bool:
        """Whether some nodes are gone and all others are done: there is nothing to wait for."""
        gone = {*gone, *self.lost}
        return bool(gone) and bool(self._done) and {*self._done, *gone} >= {*self._nodes}

    def look(self, gone: Collection[str]) -> None:
        """Look for nodes that cannot be reached, if it is time to; never waits for anything.

        Args:
            gone: nodes of which Slurm itself says that they are.
        """
        if self._look is not None:
            if self._look.ended:
                said = self._look.errors()
                self.close()
                self._note(said)
            return
        silent = [n for n in self._nodes if n not in self._done and n not in {*gone, *self.lost}]
        if not self._done or not silent or time.monotonic() < self._next:
            return
        self._pause = min(2 * self._pause, _LONGEST_SECONDS)
        self._next = time.monotonic() + self._pause
        self._look = _Look(silent, self._env)

    def close(self) -> None:
        """End a look that is still going on."""
        if self._look is not None:
            self._look.close()
            self._look = None

    def _note(self, said: str) -> None:
        for node, fault in slurm_commands.step_faults(said).items():
            if slurm_commands.unreachable(fault):
                why = f"others are done, and it cannot be reached any more: {fault}"
                self._lose(node, why, slurm_commands.lost_advice(node))
        lines = [line for line in said.splitlines() if line.startswith(_DESERTED)]
        deserted = frozenset(line[len(_DESERTED) :].strip() for line in lines)
        # Twice in a row: its last word may have been on its way.
        for node in sorted(deserted & self._deserted):
            why = "others are done, and nothing of the job runs there any more"
            self._lose(node, why, _DESERTED_ADVICE.format(node=node))
        self._deserted = deserted

    def _lose(self, node: str, why: str, advice: str) -> None:
        if node in self._nodes and node not in self._done:
            self.lost[node] = Ended(1, why, advice)
            text = f"{node} is lost: {why}"
            self._on_event({"v": 1, "event": "note", "text": text})


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
        """Whether it has ended, or has taken too long."""
        running = self._process is not None and self._process.poll() is None
        return not running or time.monotonic() > self._until

    def errors(self) -> str:
        """What Slurm and the step have said on standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            processes.stop(self._process, 1.0)
        self._errors.close()


def endings(requests: Requests, step: DriverChannel) -> dict[str, Ended]:
    """How each node's part of a step has ended, for the case that it gave no answer."""
    faults = step.faults
    said = [line for line in step.errors.splitlines() if line.strip()][-3:]
    general = "; ".join([processes.describe_exit(step.code), *said])
    endings = {}
    for node in requests:
        fault = faults.get(node, general)
        otherwise = step.code or int(
            slurm_commands.unreachable(fault)
        )  # srun itself may have ended well
        code = slurm_commands.fault_code(fault, otherwise)
        endings[node] = Ended(code, fault, slurm_commands.advice(node, fault))
    return endings
