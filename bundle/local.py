"""The transport of the local allocation: each node is an agent process on this machine.

Every node has a node root of its own and talks to the others over the loopback interface, so the
whole path, rendezvous between nodes included, runs without a cluster.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from . import fs, process
from .agent import STOP_GRACE, base_for
from .job import Job
from .root import secure_root

OnEvent = Callable[[dict[str, Any]], None]

FAILURE_GRACE = 5.0
"""Seconds that the other nodes get to end by themselves after one has failed."""
_POLL_SECONDS = 0.2
_CHUNK = 1 << 18


class LocalTransport:
    """Starts agents as child processes."""

    def __init__(self, job: Job) -> None:
        """Choose the directories; one is made for each node under this user's own node root.

        Raises:
            NodeError: no place on this machine fits.
        """
        self.nodes_here = len(job.nodes)
        base = base_for(job, os.environ, copies=self._missing(job))
        own = secure_root(base)
        self._bases: dict[str, str] = {}
        for node in job.nodes:
            self._bases[node] = os.path.join(own, "nodes", node)
            os.makedirs(self._bases[node], mode=0o700, exist_ok=True)

    def place(self, job: Job, nodes: list[str]) -> tuple[str, int]:
        """Make the bundle readable for the given nodes: here it is, where it lies.

        Returns:
            Its path as the nodes see it, and how many bytes were sent.
        """
        return job.bundle, 0

    def run(
        self, phase: str, requests: Mapping[str, Mapping[str, Any]], on_event: OnEvent
    ) -> dict[str, int]:
        """Run one phase on the given nodes at the same time.

        Args:
            phase: ``preflight``, ``unpack``, ``probe`` or ``launch``.
            requests: what each node's agent is asked.
            on_event: called, in this thread, with each event of each node.

        Returns:
            The agents' exit statuses.
        """
        running: dict[str, process.Process] = {}
        try:
            for node, request in requests.items():
                running[node] = self._start(phase, node, request)
            return _attend(running, on_event)
        finally:
            _stop_all(running)

    def _start(self, phase: str, node: str, request: Mapping[str, Any]) -> process.Process:
        python = str(request.get("python") or sys.executable)
        argv = [python, "-I", "-S", sys.argv[0], "agent", phase]
        started = process.start(
            argv,
            env={**os.environ, fs.ROOT_VARIABLE: self._bases[node]},
            stdin=process.PIPE,
            stdout=process.PIPE,
            stderr=process.STDOUT,
        )
        if started.stdin is not None:
            started.stdin.write(json.dumps(request).encode() + b"\n")
            started.stdin.close()
        return started

    def _missing(self, job: Job) -> int:
        """How many nodes have no environment yet, in the first place that comes into question."""
        base = base_for(job, os.environ, copies=0)
        own = f"stager-{os.geteuid()}"
        envs = [os.path.join(base, own, "nodes", node, own, "envs") for node in job.nodes]
        return sum(not os.path.isdir(os.path.join(path, job.bundle_id)) for path in envs)


def _attend(running: Mapping[str, process.Process], on_event: OnEvent) -> dict[str, int]:
    """Pass on events until every agent has ended; one that fails takes the others with it."""
    deadline: float | None = None
    with selectors.DefaultSelector() as waiting:
        for node, agent in running.items():
            waiting.register(_output(agent), selectors.EVENT_READ, (node, [b""]))
        while waiting.get_map():
            for key, _ in waiting.select(_POLL_SECONDS):
                node, rest = key.data
                chunk = os.read(key.fd, _CHUNK)
                *lines, rest[0] = (rest[0] + (chunk or b"\n")).split(b"\n")
                for line in filter(None, lines):
                    on_event(_event(node, line))
                if not chunk:
                    waiting.unregister(key.fileobj)
                    if running[node].wait() != 0 and deadline is None:
                        deadline = time.monotonic() + FAILURE_GRACE
            if deadline is not None and time.monotonic() > deadline:
                deadline = math.inf
                for key in list(waiting.get_map().values()):
                    running[key.data[0]].send_signal(signal.SIGTERM)
    return {node: agent.wait() for node, agent in running.items()}


def _output(agent: process.Process) -> IO[bytes]:
    return cast("IO[bytes]", agent.stdout)


def _event(node: str, line: bytes) -> dict[str, Any]:
    """An agent's line; anything that is not an event (a traceback) counts as its output."""
    text = line.decode(errors="replace").rstrip("\n")
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if isinstance(event, dict) and event.get("v") == 1 and "event" in event:
        return event
    return {"v": 1, "event": "output", "node": node, "lines": [text]}


def _stop_all(running: Mapping[str, process.Process]) -> None:
    """End what still runs: all are told first, then each is waited for."""
    for agent in running.values():
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
        _output(agent).close()  # one that cannot get rid of its lines would wait for ever
    for agent in running.values():
        process.stop(agent, STOP_GRACE + 5)
