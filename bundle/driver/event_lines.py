"""The lines of a job's events: printed for whoever follows the job, and kept beside its logs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping

from ..protocol.agent_events import RankOutput
from ..protocol.events import OutputShown
from ..protocol.job import Job
from ..protocol.output import lines_of
from .logs import Logs


def keep(job: Job, logs: Logs, event: Mapping[str, object]) -> None:
    """Print an event, and keep it in the file of the job's events."""
    line = _line(job, event)
    logs.event(line)
    _print(line)


def show(job: Job, phase: str, event: RankOutput, *, head: bool) -> None:
    """Print output of ranks; it is kept in logs of its own.

    Args:
        job: the job.
        phase: the phase it belongs to.
        event: the output.
        head: True if it is the first node's.
    """
    shown = {"node": event.node, "rank": event.rank, "lines": lines_of(event.data), "head": head}
    _print(_line(job, {"phase": phase, "event": OutputShown.event, **shown}))


def _line(job: Job, event: Mapping[str, object]) -> str:
    """Return an event as the line that is printed."""
    now = round(time.time(), 3)
    return json.dumps({"v": 1, "job_id": job.id, "time": now, **event})


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # The reader has gone: end as after a signal, and discard the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGTERM)
