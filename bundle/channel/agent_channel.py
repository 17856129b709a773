"""An agent's side of the conversation: its requests, the driver's lines, and its answers."""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any

from ..protocol import output as encoding
from ..system import signals
from .frames import Writer
from .lines import Lines

GO, STOP = "go", "stop"
"""What an agent that waits for a file is told: all of it has come, or it will not."""
PACKED = "="
"""How a request begins that was compressed; zlib's result follows, in base64."""
END = "end"
"""What agents are told that are at work and shall not be: end it, and stay until all has come."""
AGAIN = "again"
"""The key of a line that asks for frames once more, by source."""
STAY_SECONDS = 900.0
"""How long an agent stays that has said all, and that nobody lets go.

Usually the driver does so when the last one has answered. This is longer than it waits itself for
ranks that do not end (:data:`bundle.driver.transports.slurm_commands.PATIENCE`); by
then Slurm has passed on
everything.
"""
_LONGEST_PAUSE_SECONDS = 600.0
_REPEAT_SECONDS = 4.0
"""After which an agent that stays says its last word again, then after twice as long, and so on."""


class AgentChannel:
    """What the driver says.

    On a local node each request is one line on standard input. In a step of Slurm's the first one
    was taken from there before (:mod:`bundle.channel.bootstrap`), and standard input goes on: each
    line is a command or a further request, for all nodes; and its end means that the driver has
    gone, or wants this agent to.

    Attributes:
        request: what is asked at the moment; ``phase`` is among it where phases follow one another.
        sent: bytes of output that were passed on since the last request, by rank.
    """

    def __init__(self, handle: int | None, *, follow: bool = True) -> None:
        """Read the first request.

        Args:
            handle: an open file that holds it; None for standard input.
            follow: whether the end of standard input ends this process.
        """
        self._lines: queue.Queue[str] = queue.Queue()
        self._busy = True
        self._in_step = False
        self.request: dict[str, Any] = {}
        self.sent: dict[int | None, int] = {}
        if handle is None:
            self.request = json.loads(sys.stdin.readline())
        else:
            with open(handle, encoding="utf-8") as stream:
                asked = json.load(stream)
            self._in_step = "common" in asked
            self.request = _own(asked) if self._in_step else asked
        self.node = str(self.request["node"])
        self._job = self.request.get("job")
        task = os.environ.get("SLURM_PROCID", "0")
        self._source = f"{self.node}:{task}"
        self._writer: Writer | None = None
        self._writing = threading.Lock()
        self._last = 0
        """The number of the frame before the last message."""
        if self._in_step:
            self._writer = Writer(self._source, int(self.request.pop("frames_sent", 0)))
        if self._in_step and follow:
            threading.Thread(target=self._listen, daemon=True).start()

    def emit(self, event: Mapping[str, Any]) -> None:
        """Answer with one event."""
        line = encoding.line({"v": 1, "node": self.node, **event})
        with signals.held(), self._writing:  # half of it would be lost
            if self._writer is None:
                _write(line + b"\n")
                return
            self._last = self._writer.number
            _write(self._writer.frames(line))

    def output(self, rank: int | None, data: bytes) -> None:
        """Pass on what a rank has written, or the launcher (None)."""
        self.sent[rank] = self.sent.get(rank, 0) + len(data)
        self.emit({"event": "output", "rank": rank, **encoding.encoded(data)})

    def command(self) -> str:
        """Wait for the driver's next line."""
        return self._lines.get()

    def following(self) -> bool:
        """Wait for the next request; False where there is none any more."""
        while True:
            line = self._next()
            if not line:
                return False
            if line in (GO, STOP, END):
                continue  # this node had failed before it was said
            asked = _request(line)
            if asked is None:
                continue
            self.sent = {}
            if not self._in_step:
                self.request = asked
                return True
            # It travels again only where it is another one, be that for this node or not.
            self._job = asked["common"].setdefault("job", self._job)
            if self.node in asked.get("nodes", (self.node,)):
                self.request = _own(asked)
                return True

    def conclude(self, event: Mapping[str, Any]) -> None:
        """Give the last answer; stay until the driver has all that was said, or has gone.

        What a task leaves behind when it ends, Slurm passes on in pieces.
        """
        if self._writer is None:
            self.emit(event)
            return
        signals.ignore_signals()  # Slurm ends all tasks when one has died: not from here on
        self.emit(event)
        self._busy = False
        until = time.monotonic() + STAY_SECONDS
        while self._awaited(until):
            pass

    def again(self) -> int:
        """The request at hand as an open file without a name, for the program that goes on."""
        from .bootstrap import in_memory

        asked = {**self.request, "again": True}
        if self._writer is not None:
            asked["frames_sent"] = self._writer.number
            asked = {"phase": asked.get("phase"), "common": asked, "own": {}}
        return in_memory(json.dumps(asked).encode())

    def _next(self) -> str:
        if not self._in_step:
            return sys.stdin.readline()
        self._busy = False
        line = self._awaited(float("inf"))
        self._busy = True
        return line

    def _awaited(self, until: float) -> str:
        """Wait for the driver's next line; empty once it has gone, or after that time.

        Meanwhile the last word is said again: should it be what is missing, nothing shows that.
        """
        pause = _REPEAT_SECONDS
        while time.monotonic() < until:
            try:
                return self._lines.get(timeout=pause)
            except queue.Empty:
                self._send_again([(self._last + 1, self._number)])
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return ""

    @property
    def _number(self) -> int:
        return self._writer.number if self._writer is not None else 0

    def _listen(self) -> None:
        lines = Lines()
        while True:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                self._lines.put("")
                self._interrupt()
                return
            for line in lines.feed(chunk):
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if line == END:
            self._interrupt()
        if not line.startswith(f'{{"{AGAIN}"'):
            self._lines.put(line)
            return
        gaps = json.loads(line)[AGAIN].get(self._source, ())
        self._send_again([(int(first), int(last)) for first, last in gaps])

    def _interrupt(self) -> None:
        if self._busy:
            os.kill(os.getpid(), signal.SIGTERM)

    def _send_again(self, gaps: list[tuple[int, int]]) -> None:
        if self._writer is None:
            return
        with contextlib.suppress(OSError), self._writing:  # else nobody listens any more
            for first, last in gaps:
                _write(self._writer.again(first, last))


def _request(line: str) -> dict[str, Any] | None:
    """Return a request; None for a line that was cut."""
    try:
        if line.startswith(PACKED):
            line = zlib.decompress(binascii.a2b_base64(line[len(PACKED) :])).decode()
        asked = json.loads(line)
    except (ValueError, zlib.error):
        return None
    return asked if isinstance(asked, dict) else None


def _write(data: bytes) -> None:
    """Write all of it to standard output."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _own(asked: Mapping[str, Any]) -> dict[str, Any]:
    """This node's part of a request that is for all nodes of a step."""
    node = os.environ["SLURMD_NODENAME"]
    return {
        **asked["common"],
        **asked["own"].get(node, {}),
        "phase": asked.get("phase", ""),
        "node": node,
        "node_rank": asked["common"]["job"]["nodes"].index(node),
    }
