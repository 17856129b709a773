"""The transport of the local allocation: each node is an agent on this machine, with a node root.

The nodes connect to each other over the loopback interface, so the whole path runs without a
cluster.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, NoReturn, cast

from ...channel.frames import Lines
from ...launch.output_reader import AGENT_SECONDS
from ...node import node_root
from ...protocol.enumerations import Action, LogMode, PhaseName
from ...protocol.events import read_agent_line
from ...protocol.job import Job
from ...protocol.messages import AgentRequest, Answer, EarlyRequest, PlacedRequest
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...redaction.secret_names import remove_secret_variables
from ...system import permissions, processes, signals
from . import transport as transports
from .agent_program import make_container_command, make_start_command
from .transport import Delivery, Ended, LaunchStopped, OnEvent, Requests, Transfer, Transport

FAILURE_GRACE = 3.0  # before other nodes are told to end, too
_FAILED = 3  # exit status of an agent that did not do its part
_POLL_SECONDS = 1.0  # longest time for which the output of agents is waited for at once
_LEAVE_SECONDS = 0.5  # for agents to leave by themselves
_CHUNK = 1 << 18


class LocalTransport(Transport):
    """Starts agents as child processes."""

    def __init__(self, job: Job) -> None:
        self.nodes_here = len(job.nodes)
        self._job = job
        self._variables = remove_secret_variables(os.environ, job.launch.pass_env)
        self._grace = job.launch.grace_seconds + AGENT_SECONDS
        place, name = node_root.choose_base(job.node_root, os.environ), node_root.node_root_name()
        roots = (os.path.join(place, name, "nodes", node, name) for node in job.nodes)
        envs = [node_root.env_path(root, job.bundle_id) for root in roots]
        missing = len(envs) - sum(map(os.path.isdir, envs))
        room = job.room[0] * missing, job.room[1] * missing
        root = node_root.make_secure_root(
            node_root.choose_base_for_bundle(job.node_root, job.bundle_id, room, os.environ)
        )
        self._agents: dict[str, processes.Process] = {}
        self._bases = {node: os.path.join(root, "nodes", node) for node in job.nodes}
        for base in self._bases.values():
            permissions.make_folder(base, LogMode.PRIVATE)

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        """Run one phase; return the end of each agent, of one that still runs the end to assume."""
        try:
            for node, request in requests.items():
                self._ask(node, request)
            agents = {node: self._agents[node] for node in requests}
            try:
                codes = _follow_agents(agents, on_event, phase, tick=self.tick)
            except (signals.Stopped, LaunchStopped):
                # The last output of the ranks belongs in their logs.
                if phase == PhaseName.LAUNCH:
                    on_event(transports.make_saving_note(self._job))
                _tell_to_end(agents)
                _follow_agents(agents, on_event, phase, time.monotonic() + self._grace)
                raise
            return {node: _describe_exit_code(code) for node, code in codes.items()}
        except BaseException:
            _stop_all(self._agents, self._grace)
            raise

    def close(self) -> None:
        """Let the agents end: there is nothing more to ask."""
        agents = self._agents.values()
        for agent in agents:
            _close_input(agent)
        until = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < until and any(agent.poll() is None for agent in agents):
            time.sleep(_LEAVE_SECONDS / 100)
        _stop_all(self._agents, self._grace)

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Fail: the nodes are on this machine, and read the bundle where it lies."""
        raise NodeError(Problem(ProblemCode.SENT_LOCALLY, ""))

    def fetch(self, phase: str, requests: Requests, *streams: object, **named: object) -> NoReturn:
        """Fail: the nodes write into the run directory themselves."""
        raise NodeError(Problem(ProblemCode.FETCHED_LOCALLY, ""))

    start_fetch = fetch

    def begin(self, job: Job) -> None:
        """Start the agents, and let them start what takes long before anything else is done."""
        for rank, node in enumerate(job.nodes):
            self._ask(node, EarlyRequest(job, node, rank, self.nodes_here))

    def send_to_ranks(self, line: str) -> None:
        """Send a line to all agents that read: the pipe of one that is stopped may be full."""
        for agent in self._agents.values():
            stdin, room = cast("IO[bytes]", agent.stdin), select.poll()
            if not stdin.closed:
                room.register(stdin, select.POLLOUT)
                with contextlib.suppress(OSError):  # it has ended
                    if room.poll(0):
                        stdin.write(line.encode() + b"\n")
                        stdin.flush()

    def _ask(self, node: str, request: AgentRequest) -> None:
        agent = self._agents.get(node)
        if agent is None or agent.poll() is not None:
            python = request.python if isinstance(request, PlacedRequest) else ""
            agent = self._agents[node] = self._start(node, python)
        with contextlib.suppress(BrokenPipeError):  # it has ended: the end of its output shows
            stdin = cast("IO[bytes]", agent.stdin)
            stdin.write(json.dumps(request.to_json()).encode() + b"\n")
            stdin.flush()

    def _start(self, node: str, python: str) -> processes.Process:
        argv = self._make_agent_argv(node, python)
        try:
            with signals.ignore_user_signals():  # until it can pass them on
                return processes.start(
                    argv,
                    env={**self._variables, node_root.ROOT_VARIABLE: self._bases[node]},
                    stdin=processes.PIPE,
                    stdout=processes.PIPE,
                    stderr=processes.STDOUT,
                )
        except processes.ProcessError as exc:
            values = {"why": f"{argv[0]}: {exc.reason}"}
            raise NodeError(Problem(ProblemCode.AGENT_NOT_STARTED, node, values)) from exc

    def _make_agent_argv(self, node: str, python: str) -> list[str]:
        program = os.path.abspath(sys.argv[0])
        if not self._job.launch.is_run_by_apptainer:
            return [python or sys.executable, "-I", "-S", sys.argv[0], "agent", PhaseName.SESSION]
        hints = [*filter(None, [python]), *self._job.python_hints]
        words = (program, "agent", PhaseName.SESSION)
        inside = make_start_command(hints, PhaseName.SESSION, words, node=node, framed=False)
        folders = (self._bases[node], os.path.dirname(program))
        return make_container_command(
            self._job, PhaseName.SESSION, inside, framed=False, folders=folders
        )


def begin(job: Job) -> Callable[[Job], LocalTransport] | None:
    """Start a job's agents while the driver gets ready; None where it is to report what fails."""
    if job.action is not Action.RUN or job.dry_run:
        return None
    try:
        transport = LocalTransport(job)
        transport.begin(job)
    except NodeError:
        return None
    return lambda job: transport


def _close_input(agent: processes.Process) -> None:
    if agent.stdin is not None:
        with contextlib.suppress(OSError):
            agent.stdin.close()


def _tell_to_end(agents: Mapping[str, processes.Process]) -> None:
    for agent in agents.values():
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
        _close_input(agent)


def _describe_exit_code(code: int) -> Ended:
    problem = ProblemCode.NO_ANSWER if code <= 0 else ProblemCode.NO_ANSWER_EXITED
    if code == -signal.SIGKILL:
        problem = ProblemCode.NO_ANSWER_KILLED
    return Ended(problem, {"why": processes.describe_exit(code)}, code)


def _follow_agents(
    agents: Mapping[str, processes.Process],
    on_event: OnEvent,
    phase: str = "",
    until: float = math.inf,
    tick: Callable[[], None] = transports.do_nothing,
) -> dict[str, int]:
    """Pass on events until every agent has answered a phase, or ended, or it is ``until``.

    In a launch, an agent that fails takes the others with it. Returns each exit status, also the
    future one of an agent that has answered.
    """
    codes: dict[str, int] = {}
    end_others_at = math.inf
    is_told = phase != PhaseName.LAUNCH  # only ranks wait for each other
    with selectors.DefaultSelector() as selector:
        for node, agent in agents.items():
            output = cast("IO[bytes]", agent.stdout)
            selector.register(output, selectors.EVENT_READ, (node, Lines()))
        while selector.get_map() and time.monotonic() < until:
            _pass_user_signals(agents)
            tick()
            wait = min(until, end_others_at) - time.monotonic()
            for key, _ in selector.select(min(_POLL_SECONDS, max(0.0, wait))):
                node = key.data[0]
                code = _take_events(key, agents[node], on_event, phase)
                if code is not None:
                    codes[node] = code
                    selector.unregister(key.fileobj)
            if any(codes.values()) and not is_told:
                end_others_at = min(end_others_at, time.monotonic() + FAILURE_GRACE)
            if time.monotonic() > end_others_at:
                end_others_at, is_told = math.inf, True
                for key in selector.get_map().values():
                    agents[key.data[0]].send_signal(signal.SIGTERM)
    return {**dict.fromkeys(agents, _FAILED), **codes}


def _pass_user_signals(agents: Mapping[str, processes.Process]) -> None:
    for number in signals.take_user_signals():
        for agent in agents.values():
            agent.send_signal(number)


def _take_events(
    key: selectors.SelectorKey, agent: processes.Process, on_event: OnEvent, phase: str
) -> int | None:
    node, lines = key.data
    code: int | None = None
    chunk = os.read(key.fd, _CHUNK)
    for line in filter(None, lines.feed(chunk or b"\n")):
        event = read_agent_line(line, node, phase)
        if isinstance(event, Answer) and event.event == phase:
            code = 0 if event.ok else _FAILED
        on_event(event)
    return agent.wait() if not chunk and code is None else code


def _stop_all(agents: Mapping[str, processes.Process], grace: float) -> None:
    _tell_to_end(agents)
    for agent in agents.values():
        cast("IO[bytes]", agent.stdout).close()  # one that cannot write would wait for ever
    for agent in agents.values():
        processes.stop(agent, grace)
