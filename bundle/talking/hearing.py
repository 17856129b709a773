"""An agent's side of the conversation: its requests, the driver's lines, and its answers."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from . import frames
from .bootstrap import in_memory

GO, STOP = "go", "stop"
"""What an agent that waits for a file is told: all of it has come, or it will not."""

Emit = Callable[[Mapping[str, Any]], None]


class Hearing:
    """What the driver says.

    On a local node each request is one line on standard input. In a step of Slurm's the first one
    was taken from there before (:mod:`bundle.talking.bootstrap`), and standard input goes on: each
    line is a command or a further request, for all nodes; and its end means that the driver has
    gone, or wants this agent to.

    Attributes:
        request: what is asked at the moment; ``phase`` is among it where phases follow one another.
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
        if handle is None:
            self.request = json.loads(sys.stdin.readline())
        else:
            with open(handle, encoding="utf-8") as stream:
                asked = json.load(stream)
            self._in_step = "common" in asked
            self.request = _own(asked) if self._in_step else asked
        self.node = str(self.request["node"])
        task = os.environ.get("SLURM_PROCID", "0")
        self._source = f"{self.node}:{task}" if self._in_step else ""
        if self._in_step and follow:
            threading.Thread(target=self._listen, daemon=True).start()

    def emit(self, event: Mapping[str, Any]) -> None:
        """Answer with one event."""
        line = json.dumps({"v": 1, "node": self.node, **event})
        if not self._source:
            print(line, flush=True)
            return
        for frame in frames.split(self._source, line):
            sys.stdout.buffer.write(frame)
        sys.stdout.buffer.flush()

    def command(self) -> str:
        """Wait for the driver's next line."""
        return self._lines.get()

    def following(self) -> bool:
        """Wait for the next request; False where there is none any more."""
        while True:
            line = self._next()
            if not line:
                return False
            if line in (GO, STOP):
                continue  # this node had failed before it was said
            asked = json.loads(line)
            if not self._in_step:
                self.request = asked
                return True
            if self.node in asked.get("nodes", (self.node,)):
                self.request = _own(asked)
                return True

    def again(self) -> int:
        """The request at hand as an open file without a name, for the program that goes on."""
        asked = {**self.request, "again": True}
        if self._in_step:
            asked = {"phase": asked.get("phase"), "common": asked, "own": {}}
        return in_memory(json.dumps(asked).encode())

    def _next(self) -> str:
        if not self._in_step:
            return sys.stdin.readline()
        self._busy = False
        line = self._lines.get()
        self._busy = True
        return line

    def _listen(self) -> None:
        rest = b""
        while True:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                self._lines.put("")
                if self._busy:
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._lines.put(line.decode(errors="replace"))


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
