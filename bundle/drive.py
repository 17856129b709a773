"""The driver: runs inside the allocation and takes all nodes through the phases of a job.

It prints JSON lines, ``{"v": 1, "event": ..., "node": ..., "phase": ..., "seconds": ...}``:
``begin`` and ``end`` of each phase, what each agent answers, and at last one ``result``. It keeps
them as ``events.<jobid>.jsonl`` beside the logs, and writes what the ranks print to one log a node.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from . import agent, launch
from .archive import BundleFile
from .job import Job
from .local import LocalTransport
from .problem import NodeError, Problem

EXIT_JOB = 3
EXIT_INTERRUPTED = 130


class Transport(Protocol):
    """How nodes are reached: all that differs between allocations."""

    nodes_here: int
    """How many nodes share one machine."""

    def place(self, job: Job, nodes: list[str]) -> tuple[str, int]:
        """Bring the bundle to the nodes that lack it; its path there, and the bytes sent."""

    def run(
        self,
        phase: str,
        requests: Mapping[str, Mapping[str, Any]],
        on_event: Callable[[dict[str, Any]], None],
    ) -> dict[str, int]:
        """Run one phase on all given nodes; the agents' exit statuses."""


class Logs:
    """The files of one job under the log directory.

    Attributes:
        lost: why lines could not be kept (a full disk); empty while all is well. A job does not
            fail for want of a log.
    """

    def __init__(self, job: Job) -> None:
        """Create the directory, the event log and the copy of the wrapper.

        Raises:
            NodeError: they cannot be written.
        """
        self.lost = ""
        self._job = job
        self._files: dict[str, IO[bytes]] = {}
        try:
            os.makedirs(job.log_dir, exist_ok=True)
            self._open(self._events)
            with open(os.path.join(job.log_dir, f"run_wrapper.{job.id}.py"), "wb") as handle:
                handle.write(agent.wrapper_source())
        except OSError as exc:
            raise NodeError(
                Problem(
                    what="the log directory cannot be written",
                    where=job.log_dir,
                    why=exc.strerror or str(exc),
                    fix="name another one with --log-dir",
                )
            ) from exc

    @property
    def _events(self) -> str:
        return f"events.{self._job.id}.jsonl"

    def event(self, line: str) -> None:
        """Keep one event."""
        self._append(self._events, [line])

    def lines(self, node: str, lines: list[str]) -> None:
        """Append to a node's log, ``<jobname>.<jobid>.<node>.<task>.out``."""
        task = self._job.nodes.index(node)
        self._append(f"{self._job.name}.{self._job.id}.{node}.{task}.out", lines)

    def preflight(self, lines: list[str]) -> None:
        """Write ``preflight.<jobid>.txt``."""
        self._append(f"preflight.{self._job.id}.txt", lines)

    def _open(self, name: str) -> IO[bytes]:
        # Unbuffered: whoever looks sees all there is, and a failed write leaves nothing behind.
        if name not in self._files:
            path = os.path.join(self._job.log_dir, name)
            self._files[name] = open(path, "ab", buffering=0)  # noqa: SIM115 - as long as the job
        return self._files[name]

    def _append(self, name: str, lines: list[str]) -> None:
        try:
            self._open(name).write("".join(f"{line}\n" for line in lines).encode())
        except OSError as exc:
            self.lost = f"{name}: {exc.strerror or exc}"


@dataclass
class _State:
    """What is known so far; each phase adds to it."""

    job: Job
    logs: Logs
    transport: Transport = field(init=False)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The preflight's answer of each node."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time taken by phase."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The answers to the phase at hand, by node."""
    bundle: str = ""
    """Where nodes find the bundle."""
    bytes_sent: int = 0
    """How much was broadcast."""
    result: dict[str, Any] = field(default_factory=dict)
    """What the last phases add to the result."""

    def emit(self, event: Mapping[str, Any]) -> None:
        """Print an event, and keep it; what ranks print goes to their node's log."""
        if event["event"] == "output":
            event = {**event, "head": event["node"] == self.job.nodes[0]}
        line = json.dumps({"v": 1, "job_id": self.job.id, **event})
        if event["event"] == "output":
            self.logs.lines(str(event["node"]), list(event["lines"]))
        else:
            self.logs.event(line)
        try:
            print(line, flush=True)
        except BrokenPipeError:
            # Whoever listened has gone: end as after a signal, and let the rest go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            signal.raise_signal(signal.SIGTERM)

    def ask(self, phase: str, extra: Callable[[str], dict[str, Any]]) -> dict[str, int]:
        """Let every node's agent do a phase; returns their exit statuses."""
        requests = {
            node: {
                "v": 1,
                "job": self.job.to_json(),
                "node": node,
                "node_rank": rank,
                "nodes_here": self.transport.nodes_here,
                **extra(node),
            }
            for rank, node in enumerate(self.job.nodes)
        }
        self.answers = {}

        def note(event: dict[str, Any]) -> None:
            if event["event"] == phase:
                self.answers[str(event["node"])] = event
            self.emit({"phase": phase, **event})

        codes = self.transport.run(phase, requests, note)
        for node, code in codes.items():
            if node not in self.answers:
                why = f"exit status {code}"
                lost = Problem(
                    f"{phase} gave no answer", node, why, f"look into its log in {self.job.log_dir}"
                )
                self.answers[node] = {"ok": False, "problems": [lost.to_json()]}
        self.answers = {node: self.answers[node] for node in requests}  # in the nodes' order
        return codes

    def fail_if_any(self) -> None:
        """Stop when a node has a problem; all nodes' problems are reported together."""
        bad = {node: answer for node, answer in self.answers.items() if not answer["ok"]}
        if bad:
            raise _NodesFailed(bad)


class _NodesFailed(Exception):
    def __init__(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(", ".join(answers))
        self.answers = answers


def drive(job: Job, transport: Callable[[Job], Transport] = LocalTransport) -> int:
    """Take the job through its phases; returns the exit status, 0 or 3 (130 when interrupted).

    Raises:
        NodeError: the log directory cannot be written.
    """
    agent.end_on_signals()
    state = _State(job, Logs(job))
    problems: dict[str, list[dict[str, str]]] = {}
    interrupted = False
    try:
        with BundleFile(job.bundle, job.bundle_id):  # kept open: in use until the job ends
            state.transport = transport(job)
            for phase in _PHASES if job.action == "run" else _PHASES[:-1]:
                _timed(state, phase)
    except _NodesFailed as exc:
        problems = {node: list(answer["problems"]) for node, answer in exc.answers.items()}
    except NodeError as exc:
        problems = {job.nodes[0]: [exc.problem.to_json()]}
    except agent.Stopped:
        interrupted = True
    agent.ignore_signals()
    ok = not problems and not interrupted
    state.emit(
        {
            "event": "result",
            "ok": ok,
            "interrupted": interrupted,
            "problems": problems,
            "logs_lost": state.logs.lost,
            "bytes_broadcast": state.bytes_sent,
            "seconds": state.seconds,
            **state.result,
        }
    )
    return EXIT_INTERRUPTED if interrupted else 0 if ok else EXIT_JOB


def _timed(state: _State, phase: Callable[[_State], None]) -> None:
    name = phase.__name__.lstrip("_")
    started = time.monotonic()
    state.emit({"event": "begin", "phase": name})
    try:
        phase(state)
    finally:
        state.seconds[name] = round(time.monotonic() - started, 3)
        state.emit({"event": "end", "phase": name, "seconds": state.seconds[name]})


def _preflight(state: _State) -> None:
    """Look before anything is sent: every problem of every node at once."""
    state.ask("preflight", lambda node: {})
    state.facts = state.answers
    lines = []
    for node, facts in state.facts.items():
        words = {key: "ok" if facts.get(key) else "missing" for key in ("proj", "pkgs")}
        lines.append(f"{node} proj={words['proj']} pkgs={words['pkgs']}")
        lines += [f"{node} problem: {Problem.from_json(raw)}" for raw in facts["problems"]]
    state.logs.preflight(lines)
    state.fail_if_any()


def _place(state: _State) -> None:
    """Bring the bundle to the nodes that cannot see it."""
    lacking = [node for node, facts in state.facts.items() if not facts["pkgs"]]
    state.bundle, state.bytes_sent = state.transport.place(state.job, lacking)


def _unpack(state: _State) -> None:
    """Make the environment on every node."""
    state.ask("unpack", lambda node: {**_found(state, node), "bundle": state.bundle})
    for node, answer in state.answers.items():
        if answer["ok"]:
            how = "reused" if answer["reused"] else "staged"
            state.logs.lines(node, [f"{node} {how} -> {answer['path']}"])
    state.fail_if_any()


def _probe(state: _State) -> None:
    """Check on every node that the environment is what was built, and runs."""
    head = state.facts[state.job.nodes[0]]["address"]
    state.ask("probe", lambda node: {**_found(state, node), "head": head})
    for node, answer in state.answers.items():
        if "line" in answer:
            state.logs.lines(node, [str(answer["line"])])
    state.fail_if_any()


def _launch(state: _State) -> None:
    """Start the ranks, and wait for all of them."""
    job, head = state.job, state.facts[state.job.nodes[0]]
    gpus = {node: int(facts["host"]["gpus"]) for node, facts in state.facts.items()}
    try:
        backend = launch.choose_backend(job.launch.backend, gpus)
    except ValueError as exc:
        fix = "use --backend gloo"
        raise NodeError(Problem("the backend cannot be used", "", str(exc), fix)) from exc
    nproc = launch.choose_nproc(job.launch.nproc_per_node, gpus)
    group = {"address": head["address"], "port": head["port"], "backend": backend, "nproc": nproc}
    state.result = {"world_size": nproc * len(job.nodes), "backend": backend}
    codes = state.ask("launch", lambda node: {**_found(state, node), "group": group})
    state.result |= {
        "exit_codes": {
            node: int(answer.get("exit_code", codes[node]))
            for node, answer in state.answers.items()
        },
        "failures": [
            record for answer in state.answers.values() for record in answer.get("failures", [])
        ],
        "tails": {
            node: answer["tail"] for node, answer in state.answers.items() if answer.get("tail")
        },
    }
    state.fail_if_any()


def _found(state: _State, node: str) -> dict[str, Any]:
    """What the preflight found out that later phases need."""
    return {key: state.facts[node][key] for key in ("root", "python")}


_PHASES: tuple[Callable[[_State], None], ...] = (_preflight, _place, _unpack, _probe, _launch)
