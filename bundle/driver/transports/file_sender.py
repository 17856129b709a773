"""Sending a file with one command: the nodes work on what has arrived while the rest is coming."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...channel import agent_channel
from ...channel.bootstrap import make_memory_file
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


def send_file(
    transfer: Transfer,
    run: PhaseRun,
    may_retry: Retry,
    command: Callable[[Transfer, PhaseAnswers], SendCommand],
    env: Mapping[str, str],
) -> tuple[dict[str, str], float]:
    """Send a file once all agents are ready; then tell them that it is there, or will not come.

    Returns:
        The nodes that were not reached, with the reasons, and the seconds that it took. Nothing is
        sent where some agents have ended, or are lost, before all are ready.
    """
    step, answers = run.step, run.answers
    deadline = time.monotonic() + SECONDS[PhaseName.UNPACK]
    run.lose_late(run.await_ready(deadline))
    if step.ended or answers.answered or run.lost_nodes():
        step.tell(agent_channel.STOP)
        return {"": NOT_READY}, 0.0  # how those nodes' agents ended says why
    started = time.monotonic()
    while True:
        failed = _try_once(command(transfer, answers), env, run, deadline)
        if step.ended or not may_retry(failed.get("", "")):
            break
    step.tell(agent_channel.STOP if failed else agent_channel.GO)
    return failed, time.monotonic() - started


def _try_once(
    command: SendCommand, env: Mapping[str, str], run: PhaseRun, deadline: float
) -> dict[str, str]:
    """Return the nodes that the file did not reach, and why; ``""`` for what concerns no node."""
    # Nobody reads its errors while it runs, and a pipe could fill.
    with open(make_memory_file(b""), "w+b") as errors:
        try:
            with open(command.source or os.devnull, "rb") as source:
                process = processes.start(
                    command.argv, env=env, stdin=source, stdout=processes.DEVNULL, stderr=errors
                )
        except processes.ProcessError as exc:
            return {"": exc.reason}
        except OSError as exc:
            return {"": error_text(exc)}
        try:
            while process.poll() is None and not run.step.ended:
                if time.monotonic() > deadline:
                    return {"": "it did not finish in time"}
                run.step.pump(run.answers.take, _TICK_SECONDS)
            if not process.poll():
                return {}
        finally:
            processes.stop(process, _GRACE)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    lines = text.strip().splitlines() or ["it failed without an error message"]
    return command.faults(text) or {"": lines[-1]}
