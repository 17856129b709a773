"""The files of one job under the log directory, all written by the driver.

``order.<jobid>.tsv`` says when which log grew: a line for each piece that was appended, with the
time in seconds since the epoch on the driver's clock, the node, the task and the piece's bytes. A
log's pieces are in order, so their sizes tell where each begins.
"""

from __future__ import annotations

import json
import os
import time
from typing import IO

from . import agent, private
from .job import Job, redacted
from .problem import NodeError, Problem


class Logs:
    """Open files by name; lines are appended, so a job that is started again goes on in them.

    Attributes:
        lost: why lines could not be kept (a full disk); empty while all is well. A job does not
            fail for want of a log.
    """

    def __init__(self, job: Job) -> None:
        """Create the directory, the event log, and copies of the job and of the wrapper.

        The copy of the job is for those who look at it later: it has no secrets of its arguments.

        Raises:
            NodeError: they cannot be written.
        """
        self.lost = ""
        self._job = job
        self._files: dict[str, IO[bytes]] = {}
        try:
            private.make_folder(job.log_dir, job.log_mode)
            self._open(self._events)
        except OSError as exc:
            raise NodeError(
                Problem(
                    what="the log directory cannot be written",
                    where=job.log_dir,
                    why=exc.strerror or str(exc),
                    fix="name another one with --log-dir",
                )
            ) from exc
        self._copy(f"run_wrapper.{job.id}.py", agent.wrapper_source())
        kept = json.dumps(redacted(job).to_json(), indent=1)
        self._copy(f"job.{job.id}.json", kept.encode() + b"\n")

    @property
    def _events(self) -> str:
        return f"events.{self._job.id}.jsonl"

    def event(self, line: str) -> None:
        """Keep one event."""
        self._append(self._events, [line])

    def lines(self, node: str, task: int, lines: list[str]) -> None:
        """Append to a task's log, ``<jobname>.<jobid>.<node>.<task>.out``, and to the order."""
        name = self._log(node, task)
        if written := self._append(name, lines):
            piece = f"{time.time():.3f}\t{node}\t{task}\t{written}"
            self._append(f"order.{self._job.id}.tsv", [piece])

    def begin(self, node: str, task: int) -> None:
        """Make a task's log, empty unless it is there."""
        name = self._log(node, task)
        try:  # and no more: there may be more ranks than files may be open
            self._opened(name, "ab").close()
        except OSError as exc:
            self.lost = f"{name}: {exc.strerror or exc}"

    def preflight(self, lines: list[str]) -> None:
        """Write ``preflight.<jobid>.txt``."""
        self._append(f"preflight.{self._job.id}.txt", lines)

    def _log(self, node: str, task: int) -> str:
        return f"{self._job.name}.{self._job.id}.{node}.{task}.out"

    def _copy(self, name: str, data: bytes) -> None:
        try:
            with self._opened(name, "wb") as handle:
                handle.write(data)
        except OSError as exc:
            self.lost = f"{name}: {exc.strerror or exc}"

    def _open(self, name: str) -> IO[bytes]:
        # Unbuffered: whoever looks sees all there is, and a failed write leaves nothing behind.
        if name not in self._files:
            self._files[name] = self._opened(name, "ab", buffering=0)
        return self._files[name]

    def _opened(self, name: str, mode: str, buffering: int = -1) -> IO[bytes]:
        """Open a file of the job; one that is missing is made for those who may read it."""
        path = os.path.join(self._job.log_dir, name)
        return open(path, mode, buffering, opener=private.opener(self._job.log_mode))

    def _append(self, name: str, lines: list[str]) -> int:
        """Append lines to a file; how many bytes that were."""
        try:
            return self._open(name).write("".join(f"{line}\n" for line in lines).encode())
        except OSError as exc:
            self.lost = f"{name}: {exc.strerror or exc}"
            return 0
