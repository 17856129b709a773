"""The transport of the local allocation: each node is an agent process on this machine.

Every node has a node root of its own and talks to the others over the loopback interface, so the
whole path, rendezvous between nodes included, runs without a cluster.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from ...agent.agent import EARLY, SESSION
from ...channel.lines import Lines
from ...launch.output_reader import AGENT_SECONDS
from ...node.location import base_for
from ...node.root import secure_root
from ...protocol import log_modes, output
from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem
from ...redaction.masking import without_secrets
from ...system import files, permissions, processes, signals
from .transport import Delivery, Ended, OnEvent, Requests, Transfer, saving_note

FAILURE_GRACE = 3.0
"""Seconds that the other nodes get to end by themselves after one has failed.

Short: what ranks need to save what they have, they get once they are told to end.
"""
_FAILED = 3
"""What an agent ends with that did not do its part."""
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 0.5
"""How long agents may take to leave by themselves, once there is nothing more to ask."""
_CHUNK = 1 << 18


class LocalTransport:
    """Starts agents as child processes."""

    def __init__(self, job: Job) -> None:
        """Choose the directories; one is made for each node under this user's own node root.

        Raises:
            NodeError: no place on this machine fits.
        """
        self.nodes_here = len(job.nodes)
        self._job = job
        self._variables = without_secrets(os.environ, job.launch.pass_env)
        self._grace = job.launch.grace_seconds + AGENT_SECONDS
        base = base_for(job, os.environ, copies=self._missing(job))
        own = secure_root(base)
        self._agents: dict[str, processes.Process] = {}
        self._bases: dict[str, str] = {}
        for node in job.nodes:
            self._bases[node] = os.path.join(own, "nodes", node)
            permissions.make_folder(self._bases[node], log_modes.PRIVATE)

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        """Run one phase on the given nodes at the same time.

        Each node has one agent for all phases; it is started with the first one.

        Args:
            phase: one of :data:`bundle.agent.agent.PHASES`.
            requests: what each node's agent is asked.
            on_event: called, in this thread, with each event of each node.

        Returns:
            How each agent ended, or would have.
        """
        try:
            for node, request in requests.items():
                self._ask(node, {**request, "phase": phase})
            asked = {node: self._agents[node] for node in requests}
            try:
                codes = _attend(asked, on_event, phase)
            except signals.Stopped:  # what the ranks say last belongs into their logs
                if phase == "launch":
                    on_event(saving_note(self._job))
                _tell_to_end(asked)
                _attend(asked, on_event, phase, time.monotonic() + self._grace)
                raise
            return {
                node: Ended(code, processes.describe_exit(code)) for node, code in codes.items()
            }
        except BaseException:
            _stop_all(self._agents, self._grace)
            raise

    def close(self) -> None:
        """Let the agents end: there is nothing more to ask."""
        for agent in self._agents.values():
            if agent.stdin is not None:
                with contextlib.suppress(OSError):
                    agent.stdin.close()
        until = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < until and any(one.poll() is None for one in self._agents.values()):
            time.sleep(_LEAVE_SECONDS / 100)
        _stop_all(self._agents, self._grace)

    def deliver(self, parcel: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Not needed: the nodes are on this machine, and read the bundle where it lies.

        Raises:
            NodeError: always; a plan for this allocation has nothing to send.
        """
        raise NodeError(Problem("nothing is sent on one machine", "", "", "use --stage auto"))

    def fetch(self, phase: str, requests: Requests, take: Callable[[IO[bytes]], None]) -> None:
        """Not needed: the run directory is the nodes' own.

        Raises:
            NodeError: always.
        """
        raise NodeError(Problem("nothing is fetched on one machine", "", "", ""))

    def ended_by(self) -> str:
        """Nobody ends it but the user."""
        return ""

    def hurry(self) -> None:
        """Nobody is waited for who is not here."""

    def begin(self, job: Job) -> None:
        """Start the agents, and let them start what takes long before anything else is done."""
        for node in job.nodes:
            self._ask(node, {"phase": EARLY, "job": job.to_json(), "node": node})

    def _ask(self, node: str, request: Mapping[str, Any]) -> None:
        """Send a node's agent its next request; start one where there is none, or none any more."""
        agent = self._agents.get(node)
        if agent is None or agent.poll() is not None:
            agent = self._agents[node] = self._start(node, str(request.get("python") or ""))
        if agent.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended: that is told by its output
                agent.stdin.write(json.dumps(request).encode() + b"\n")
                agent.stdin.flush()

    def _start(self, node: str, python: str) -> processes.Process:
        return processes.start(
            [python or sys.executable, "-I", "-S", sys.argv[0], "agent", SESSION],
            env={**self._variables, files.ROOT_VARIABLE: self._bases[node]},
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            stderr=processes.STDOUT,
        )

    def _missing(self, job: Job) -> int:
        """How many nodes have no environment yet, in the first place that comes into question."""
        base = base_for(job, os.environ, copies=0)
        own = f"stager-{os.geteuid()}"
        envs = [os.path.join(base, own, "nodes", node, own, "envs") for node in job.nodes]
        return sum(not os.path.isdir(os.path.join(path, job.bundle_id)) for path in envs)


def begin(job: Job) -> Callable[[Job], LocalTransport] | None:
    """Start the agents of a job that is to run, while the driver gets ready.

    Returns:
        What gives the transport; None where it is to be made when its turn comes, as what is in its
        way is told then.
    """
    if job.action != "run" or job.dry_run:
        return None
    try:
        transport = LocalTransport(job)
        transport.begin(job)
    except (NodeError, processes.ProcessError):
        return None
    return lambda job: transport


def _tell_to_end(running: Mapping[str, processes.Process]) -> None:
    """By a signal, and so that an agent which is done already does not wait for more to do."""
    for agent in running.values():
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
        if agent.stdin is not None:
            with contextlib.suppress(OSError):
                agent.stdin.close()


def _attend(
    running: Mapping[str, processes.Process],
    on_event: OnEvent,
    phase: str = "",
    until: float = math.inf,
) -> dict[str, int]:
    """Pass on events until every agent has answered a phase, or ended.

    One that fails takes the others with it. At ``until``, of the monotonic clock, it is over.

    Returns:
        Exit status of each: of one that has answered, what it would have ended with.
    """
    codes: dict[str, int] = {}
    deadline: float | None = None
    with selectors.DefaultSelector() as waiting:
        for node, agent in running.items():
            waiting.register(_output(agent), selectors.EVENT_READ, (node, Lines()))
        while waiting.get_map() and time.monotonic() < until:
            for key, _ in waiting.select(_POLL_SECONDS):
                node, lines = key.data
                chunk = os.read(key.fd, _CHUNK)
                for line in filter(None, lines.feed(chunk or b"\n")):
                    event = _event(node, line)
                    if event["event"] == phase and "ok" in event:
                        codes[node] = 0 if event["ok"] else _FAILED
                    on_event(event)
                if not chunk:
                    codes.setdefault(node, running[node].wait())
                if node in codes:
                    waiting.unregister(key.fileobj)
                    if codes[node] != 0 and deadline is None:
                        deadline = time.monotonic() + FAILURE_GRACE
            if deadline is not None and time.monotonic() > deadline:
                deadline = math.inf
                for key in list(waiting.get_map().values()):
                    running[key.data[0]].send_signal(signal.SIGTERM)
    return {node: codes.get(node, _FAILED) for node in running}


def _output(agent: processes.Process) -> IO[bytes]:
    return cast("IO[bytes]", agent.stdout)


def _event(node: str, line: bytes) -> dict[str, Any]:
    """An agent's line; anything that is not an event (a traceback) counts as its output."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if isinstance(event, dict) and event.get("v") == 1 and "event" in event:
        return event
    return {"v": 1, "event": "output", "node": node, **output.encoded(line + b"\n")}


def _stop_all(running: Mapping[str, processes.Process], grace: float) -> None:
    """End what still runs: all are told first, then each is waited for."""
    _tell_to_end(running)
    for agent in running.values():
        _output(agent).close()  # one that cannot get rid of its lines would wait for ever
    for agent in running.values():
        processes.stop(agent, grace)
