"""The driver's output and that of ranks: shown, logged, and accounted for."""

from __future__ import annotations

import collections
import itertools
import json
import os
import select
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Optional

from ..protocol.events import FramesLost, OutputLoss, OutputShown, RankOutput
from ..protocol.messages import LaunchAnswer, split_lines
from ..protocol.problem import Problem, ProblemCode
from ..system import signals
from .logs import Logs


def format_line(job_id: str, time: float, event: Mapping[str, object]) -> str:
    """Return an event as a line of JSON, as it is printed and kept."""
    return json.dumps({"v": 1, "job_id": job_id, "time": round(time, 3), **event})


HELD_BYTES = 8 << 20  # of ranks, besides what is being written
_OBJECT_BYTES = 400  # of a piece, besides its bytes: many ranks may print little each
_PATIENCE_SECONDS = 1.0  # in all, to wait for a reader that is only late
_AT_ONCE = 1 << 17  # bytes: a thread gets its turn only every few milliseconds
_STDOUT = 1


class _Output(NamedTuple):
    time: float
    phase: str
    event: RankOutput
    head: bool

    @property
    def memory(self) -> int:
        return len(self.event.data) + _OBJECT_BYTES


class Display:
    """The driver's standard output, printed by a thread: a stopped reader holds up nothing.

    Beyond a limit, the oldest output of ranks is not shown, and the next event counts its lines.
    """

    def __init__(self, job_id: str, handle: int = _STDOUT) -> None:
        self._job_id, self._handle = job_id, handle
        self._changed = threading.Condition()  # held with signals put off, for all that follows
        self._numbers = itertools.count()  # numbers of what is printed, in its order
        self._events: collections.deque[tuple[int, bytes]] = collections.deque()
        self._output: collections.deque[tuple[int, _Output]] = collections.deque()
        self._held = 0
        self._skipped = 0  # lines that are not shown, and that no event has mentioned yet
        self._patience = _PATIENCE_SECONDS
        self._idle = True
        self._thread: threading.Thread | None = None

    def event(self, line: str) -> None:
        """Print an event, whatever the reader does."""
        with signals.defer_signals(), self._changed:
            self._events.append((next(self._numbers), line.encode() + b"\n"))
            self._wake()

    def output(self, phase: str, event: RankOutput, *, head: bool) -> None:
        """Print output of ranks, if the reader keeps up."""
        shown = _Output(time.time(), phase, event, head)
        with signals.defer_signals(), self._changed:
            # Wait for a slow reader, no longer than the patience that is left.
            began, most = time.monotonic(), HELD_BYTES - shown.memory
            self._changed.wait_for(lambda: not self._output or self._held <= most, self._patience)
            self._patience = max(0.0, self._patience - (time.monotonic() - began))
            self._output.append((next(self._numbers), shown))
            self._held += shown.memory
            while self._held > HELD_BYTES and len(self._output) > 1:
                data = self._pop_output().event.data
                self._skipped += data.count(b"\n") + (not data.endswith(b"\n"))
            self._wake()

    def drain(self, seconds: float) -> bool:
        """Wait until the reader has all of it; return whether it has, after so many seconds."""
        with signals.defer_signals(), self._changed:
            return self._changed.wait_for(lambda: self._idle, seconds)

    def _pop_output(self) -> _Output:
        _, shown = self._output.popleft()
        self._held -= shown.memory
        return shown

    def _wake(self) -> None:
        self._idle = False
        if self._thread is None:
            # A daemon: where the reader has stopped, the driver ends without it.
            self._thread = threading.Thread(target=self._print, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _print(self) -> None:
        try:
            while True:
                self._write(self._next())
        except OSError as exc:
            if isinstance(exc, BrokenPipeError):  # the reader has gone: end as after a signal
                os.kill(os.getpid(), signal.SIGTERM)
        while True:
            self._next()

    def _next(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        with self._changed:
            self._idle = not (self._events or self._output)
            self._changed.notify_all()
            if self._idle:
                self._patience = _PATIENCE_SECONDS
            self._changed.wait_for(lambda: self._events or self._output)
            while (self._events or self._output) and size < _AT_ONCE:
                part = self._take()
                parts.append(part)
                size += len(part)
            self._changed.notify_all()
        return b"".join(parts)

    def _take(self) -> bytes:
        if not self._output or (self._events and self._events[0][0] < self._output[0][0]):
            return self._events.popleft()[1]
        shown = self._pop_output()
        skipped, self._skipped = self._skipped, 0
        fields = {
            "phase": shown.phase,
            "event": OutputShown.event,
            "node": shown.event.node,
            "rank": shown.event.rank,
            "lines": split_lines(shown.event.data),
            "head": shown.head,
            "skipped": skipped,
        }
        return format_line(self._job_id, shown.time, fields).encode() + b"\n"

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        room = select.poll()
        room.register(self._handle, select.POLLOUT)
        while view:
            try:
                view = view[os.write(self._handle, view) :]
            except BlockingIOError:  # a terminal's flags are shared by all that have it open
                room.poll()


_LOST_ON_THE_WAY = ProblemCode.OUTPUT_LOST.row.why


class OutputLogs:
    """Writes the output of ranks into their logs, and compares it with what the agents sent."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self.begin_launch()

    def begin_launch(self) -> None:
        """Count anew: nothing of an earlier launch is missed."""
        # Bytes received from each rank of each node; the node's launcher has None for a rank.
        self._received = collections.Counter[tuple[str, Optional[int]]]()
        self._missing: dict[tuple[str, int | None], OutputLoss] = {}
        self._frames = collections.Counter[str]()  # lost by nodes that have not said how many bytes
        self._counted: set[tuple[str, str]] = set()

    def write(self, event: RankOutput, task: int) -> None:
        """Append output to the log of a task."""
        source = event.node, event.rank
        if event.of_ranks:  # else an agent's own complaint, which no rank has sent
            self._received[source] += len(event.data)
        self._logs.output(event.node, task, event.data, source)

    def compare(self, event: object) -> None:
        """Compare what an event says was sent or lost with what has come."""
        if isinstance(event, FramesLost) and (event.node, event.task) not in self._counted:
            self._frames[event.node] += event.frames + event.unknown
        elif isinstance(event, LaunchAnswer) and event.sent is not None:
            # Its bytes are compared, which is more exact than frames.
            self._counted.add((event.node, "" if event.task is None else str(event.task)))
            for rank, sent in event.sent.items():
                of_rank = event.node, int(rank) if rank else None
                missing = sent - self._received.pop(of_rank, 0)
                if missing > 0:
                    self._missing[of_rank] = OutputLoss(*of_rank, _LOST_ON_THE_WAY, bytes=missing)

    def losses(self) -> list[OutputLoss]:
        """Return the output that ranks have written and no log has."""
        logs = self._logs
        frames = [
            OutputLoss(node, None, _LOST_ON_THE_WAY, frames=count)
            for node, count in self._frames.items()
            if (node, None) not in self._missing
        ]
        code = ProblemCode.OUTPUT_DISK_FULL if logs.disk_full else ProblemCode.OUTPUT_NOT_LOGGED
        unwritten = [
            OutputLoss(node, task, logs.fault, code, bytes=count)
            for (node, task), count in sorted(logs.lost.items())
            if count > 0
        ]
        return [*self._missing.values(), *frames, *unwritten]


def describe_losses(
    losses: Sequence[OutputLoss], left_out: Collection[str]
) -> dict[str, tuple[Problem, ...]]:
    """Return losses as problems by node; nodes left out may have crashed amid a message."""
    problems: dict[str, tuple[Problem, ...]] = {}
    for loss in losses:
        if loss.node not in left_out:
            why = {} if loss.code is ProblemCode.OUTPUT_LOST else {"why": loss.why}
            problem = Problem(loss.code, loss.node, {"source": str(loss), **why})
            problems[loss.node] = (*problems.get(loss.node, ()), problem)
    return problems
