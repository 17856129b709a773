"""Broadcasts with ``sbcast``: the nodes work on what has arrived while the rest is on its way."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from ...channel import agent_channel
from ...system import processes
from . import slurm_commands, slurm_faults
from .phase_run import SECONDS, PhaseRun
from .timeouts import Waiting
from .transport import Transfer

_GRACE = 5.0
_TICK_SECONDS = 0.02
"""The pause between two looks at a running broadcast."""


class Sending:
    """One file on its way to the nodes of a step. Leaving the ``with`` block ends it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it.

        Args:
            argv: the command, see :func:`bundle.driver.transports.slurm_commands.broadcast_argv`.
            env: its whole environment.
        """
        # A file, as nobody reads while it runs and a pipe could fill.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process: processes.Process | None = None
        self._refused = ""
        try:
            self._process = processes.start(
                argv,
                env=env,
                stdin=processes.DEVNULL,
                stdout=processes.DEVNULL,
                stderr=self._errors,
            )
        except processes.ProcessError as exc:
            self._refused = exc.reason

    def __enter__(self) -> Sending:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            processes.stop(self._process, _GRACE)
        self._errors.close()

    @property
    def ended(self) -> bool:
        """True once it has ended, well or not."""
        return self._process is None or self._process.poll() is not None

    @property
    def failed(self) -> dict[str, str]:
        """The nodes that it did not reach, and why; ``""`` for what concerns no single node."""
        if self._process is None:
            return {"": self._refused}
        if not self._process.poll():
            return {}
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        faults = slurm_faults.broadcast_faults(errors)
        if faults:
            return faults
        lines = errors.strip().splitlines()
        return {"": lines[-1] if lines else "sbcast failed"}


class Broadcaster:
    """Sends files to the agents of steps that wait for them."""

    def __init__(self, env: Mapping[str, str], version: tuple[int, int]) -> None:
        """Take what every broadcast needs.

        Args:
            env: all variables for ``sbcast``.
            version: Slurm's version.
        """
        self._env, self._version = env, version

    def send(
        self, transfer: Transfer, run: PhaseRun, waiting: Waiting
    ) -> tuple[dict[str, str], float]:
        """Send as soon as all agents are ready, and tell them when all has come, or none will.

        Returns:
            The nodes that were not reached, with the reasons, and the seconds that it took.
        """
        deadline = time.monotonic() + SECONDS["unpack"]
        if not _all_ready(run, deadline):
            return {}, 0.0  # how each node's agent ended says why
        started = time.monotonic()
        failed = self._broadcast(transfer, run, waiting, deadline)
        run.step.tell(agent_channel.STOP if failed else agent_channel.GO)
        return failed, time.monotonic() - started

    def _broadcast(
        self, transfer: Transfer, run: PhaseRun, waiting: Waiting, deadline: float
    ) -> dict[str, str]:
        """Send the file to all nodes of a step; return those that it did not reach, and why."""
        step, answers = run.step, run.answers
        width = slurm_commands.fanout(len(answers.nodes), self._version)
        argv = slurm_commands.broadcast_argv(
            transfer.source, transfer.target, answers.step_id, width
        )
        while True:
            with Sending(argv, self._env) as sending:
                while not (step.ended or sending.ended):
                    if time.monotonic() > deadline:
                        return {"": "it was not done in time"}
                    step.pump(answers.take, _TICK_SECONDS)
                failed = sending.failed
            if step.ended or not waiting.again(failed.get("", "")):
                return failed


def _all_ready(run: PhaseRun, deadline: float) -> bool:
    """Wait until all agents are ready for the file; return whether they are."""
    step, answers = run.step, run.answers
    while not step.ended and not answers.ready >= answers.nodes:
        step.pump(answers.take)
        if answers.answered or step.faults or time.monotonic() > deadline:
            step.tell(agent_channel.STOP)  # it is known already that it cannot be done
            return False
    return not step.ended
