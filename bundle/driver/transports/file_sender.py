"""Sending a file with one command: the nodes work on what has arrived while the rest is coming."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from ...channel import agent_channel
from ...channel.bootstrap import in_memory
from ...protocol.enumerations import PhaseName
from ...system import processes
from ...system.files import error_text
from .phase_run import SECONDS, PhaseAnswers, PhaseRun
from .transport import Retry, Transfer

_GRACE = 5.0
NOT_READY = "not every node was ready for it"
"""The reason why nothing was sent; those nodes' own answers say more."""
_TICK_SECONDS = 0.02
"""The pause between two looks at a running command."""


@dataclass(frozen=True)
class SendCommand:
    """A command that sends a file."""

    argv: list[str]
    """Its words."""
    faults: Callable[[str], dict[str, str]]
    """Finds in what it wrote to standard error the nodes that it failed on, and how."""
    source: str = ""
    """The file that it reads from standard input; empty if it opens it itself."""


class Sending:
    """One file on its way to the nodes of a step. Leaving the ``with`` block ends it."""

    def __init__(self, command: SendCommand, env: Mapping[str, str]) -> None:
        self._faults = command.faults
        # Nobody reads while it runs, and a pipe could fill; nor does it take a disk with room.
        self._errors = open(in_memory(b""), "w+b")  # noqa: SIM115 - closed in __exit__
        self._process: processes.Process | None = None
        self._refused = ""
        try:
            with open(command.source or os.devnull, "rb") as source:
                self._process = _started(command.argv, env, source, self._errors)
        except processes.ProcessError as exc:
            self._refused = exc.reason
        except OSError as exc:
            self._refused = error_text(exc)

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
        faults = self._faults(errors)
        if faults:
            return faults
        lines = errors.strip().splitlines()
        return {"": lines[-1] if lines else "it failed without an error message"}


def _started(
    argv: list[str], env: Mapping[str, str], source: IO[bytes], errors: IO[bytes]
) -> processes.Process:
    return processes.start(argv, env=env, stdin=source, stdout=processes.DEVNULL, stderr=errors)


class FileSender:
    """Sends files to the agents of steps that wait for them."""

    def __init__(
        self, env: Mapping[str, str], command: Callable[[Transfer, PhaseAnswers], SendCommand]
    ) -> None:
        self._env, self._command = env, command

    def send(
        self, transfer: Transfer, run: PhaseRun, may_retry: Retry
    ) -> tuple[dict[str, str], float]:
        """Send a file once all agents are ready; then tell them that it is there, or will not come.

        Returns:
            The nodes that were not reached, with the reasons, and the seconds that it took. Nothing
            is sent where some agents have ended, or are lost, before all are ready.
        """
        deadline = time.monotonic() + SECONDS[PhaseName.UNPACK]
        run.lose_late(run.await_ready(deadline))
        if run.step.ended or run.answers.answered or run.lost_nodes():
            run.step.tell(agent_channel.STOP)
            return {"": NOT_READY}, 0.0  # how those nodes' agents ended says why
        started = time.monotonic()
        failed = self._send_now(transfer, run, may_retry, deadline)
        run.step.tell(agent_channel.STOP if failed else agent_channel.GO)
        return failed, time.monotonic() - started

    def _send_now(
        self, transfer: Transfer, run: PhaseRun, may_retry: Retry, deadline: float
    ) -> dict[str, str]:
        step, answers = run.step, run.answers
        command = self._command(transfer, answers)
        while True:
            with Sending(command, self._env) as sending:
                while not (step.ended or sending.ended):
                    if time.monotonic() > deadline:
                        return {"": "it did not finish in time"}
                    step.pump(answers.take, _TICK_SECONDS)
                failed = sending.failed
            if step.ended or not may_retry(failed.get("", "")):
                return failed
