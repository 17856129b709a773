"""What the driver knows so far about a job; each phase adds to it."""

from __future__ import annotations

import collections
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any

from ..format.archive import BundleFile
from ..launch import commands as launch
from ..protocol import output
from ..protocol.job import Job
from ..protocol.problem import Problem
from ..transfer.plan import Plan
from .logs import Logs
from .transports.transport import Delivery, Ended, Transfer, Transport

if TYPE_CHECKING:
    from ..results.receive import Received

LISTED = ("failures", "tail", "left", "vanished", "lingering", "joined", "alone")
"""What the answers of a launch list; those of several tasks of a node are put together."""

Extra = Callable[[str], "dict[str, Any]"]
_ON_THE_WAY = "it did not come through srun whole, and was not there any more to be sent again"

Hear = Callable[[Mapping[str, Any]], None]


class NodesFailed(Exception):
    """Some nodes could not do their part.

    Attributes:
        answers: what they said, by node.
    """

    def __init__(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(", ".join(answers))
        self.answers = answers


@dataclass
class State:
    """Everything about one job, as far as it has come."""

    job: Job
    """The job; its nodes get fewer when some are left out."""
    logs: Logs
    """Its files."""
    transport: Transport = field(init=False)
    """How nodes are reached."""
    bundle: BundleFile | None = None
    """The bundle, open; None where the driver cannot see it."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The preflight's answer of each node."""
    plan: Plan | None = None
    """How the nodes come by their environments."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time taken by phase."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The answers to the phase at hand, by node."""
    task_codes: dict[str, int] = field(default_factory=dict)
    """Exit status of each task of the launch, by its number."""
    bytes_sent: int = 0
    """How much was broadcast."""
    sendings: list[str] = field(default_factory=list)
    """Where files were sent to, well or not."""
    nproc: int = 1
    """Ranks on each node."""
    apart: bool = False
    """Whether ranks ran in directories of their nodes' own."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Nodes that the job goes on without, and why."""
    result: dict[str, Any] = field(default_factory=dict)
    """What the last phases add to the result."""
    _received: collections.Counter[tuple[str, int | None]] = field(
        default_factory=collections.Counter
    )
    """Bytes that came from each node's ranks, and from its launcher (None)."""
    _missing: dict[tuple[str, int | None], dict[str, Any]] = field(default_factory=dict)
    """What has not come, by node and rank."""
    _counted: set[tuple[Any, str]] = field(default_factory=set)
    """The nodes and tasks that have said how much they have sent."""
    _first_tasks: dict[str, int] = field(default_factory=dict)
    _late: dict[str, int] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether nodes can be reached."""
        return hasattr(self, "transport")

    @property
    def lost_node(self) -> str:
        """A node that has not answered; empty if all have."""
        return next((node for node, one in self.answers.items() if one.get("lost")), "")

    def emit(self, event: Mapping[str, Any]) -> None:
        """Print an event, and keep it; what ranks print goes to their own logs."""
        if event["event"] == "output":
            self._log(event, output.decoded(event))
            event = {**event, "head": self._is_heads(event)}
            if not (event["head"] or self.job.show_all):
                return  # nobody would look at it
            event = output.readable(event)
        now = round(time.time(), 3)
        line = json.dumps({"v": 1, "job_id": self.job.id, "time": now, **event})
        if event["event"] != "output":
            self.logs.event(line)
        try:
            print(line, flush=True)
        except BrokenPipeError:
            # Whoever listened has gone: end as after a signal, and let the rest go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            signal.raise_signal(signal.SIGTERM)

    def _log(self, event: Mapping[str, Any], data: bytes) -> None:
        """Write output to its log."""
        node, rank = str(event["node"]), event.get("rank")
        if "rank" in event:  # else an agent's own complaint, which no rank has sent
            self._received[node, rank] += len(data)
        task = self.first_task(node) if rank is None else int(rank)
        self.logs.output(node, task, data, (node, rank))

    def _is_heads(self, event: Mapping[str, Any]) -> bool:
        """Return whether output is the first node's: that of the first ranks, where they move.

        Ranks that may be started again are dealt to nodes by torchrun, a node's worth at a time.
        """
        rank, launch = event.get("rank"), self.job.launch
        if rank is not None and (launch.max_restarts or launch.elastic):
            return int(rank) < self.nproc
        return bool(event["node"] == self.job.nodes[0])

    def losses(self) -> list[dict[str, Any]]:
        """Return what ranks have written and no log has: node, rank, and how much."""
        unkept = {who: count for who, count in self.logs.lost.items() if count > 0}
        return [
            *self._missing.values(),
            *(
                {"node": node, "rank": rank, "bytes": count, "why": self.logs.fault}
                for (node, rank), count in sorted(unkept.items())
            ),
        ]

    def loss_problems(self, losses: list[dict[str, Any]]) -> dict[str, list[dict[str, str]]]:
        """Return what is lost as problems, by node; no problem is what was of a node left out.

        That may have crashed amid a message, and the job has gone on without it.
        """
        found: dict[str, list[dict[str, str]]] = {}
        for one in losses:
            node = str(one["node"])
            if node in self.left_out:
                continue
            fix = "the ranks have ended as their exit codes say; run it again if the logs matter"
            problem = Problem(output.lost(one), node, str(one["why"]), fix)
            found.setdefault(node, []).append(problem.to_json())
        return found

    def tell(self, node: str, line: str) -> None:
        """Write a line of the node's own to its log."""
        self.logs.lines(node, self.first_task(node), [line])

    def begin_logs(self) -> None:
        """Let every rank have a log, also one that will say nothing."""
        for node in self.job.nodes:
            first = self.first_task(node)
            for task in range(first, first + self.nproc):
                self.logs.begin(node, task)

    def first_task(self, node: str) -> int:
        """The number of a node's first rank; its log also takes what concerns the node."""
        if node in self._first_tasks:
            return self._first_tasks[node]
        return self.job.nodes.index(node) * self.nproc if node in self.job.nodes else 0

    def choose_nproc(self) -> None:
        """Decide how many ranks each node gets."""
        gpus = {node: int(facts["host"]["gpus"]) for node, facts in self.facts.items()}
        self.nproc = launch.choose_nproc(self.job.launch.nproc_per_node, gpus)

    def found(self, node: str) -> dict[str, Any]:
        """What the preflight found out about a node that later phases need."""
        return {key: self.facts[node][key] for key in ("root", "python")}

    def ask(self, phase: str, extra: Extra, hear: Hear | None = None) -> None:
        """Let every node's agent do a phase; ``answers`` then has one for each node.

        Args:
            phase: one of :data:`bundle.agent.agent.PHASES`.
            extra: what a node is asked besides.
            hear: called with each event as it comes.
        """
        self.answers = {}
        self.ask_some(phase, self.job.nodes, extra, hear)

    def deliver(self, parcel: Transfer, nodes: tuple[str, ...], extra: Extra) -> Delivery:
        """Send a file to some nodes and let them unpack it; adds to ``answers``."""
        requests = self._requests(nodes, extra)
        delivery = self.transport.deliver(parcel, requests, self._note("unpack"))
        if not delivery.failed:
            self._settle("unpack", delivery.ended)
        return delivery

    def ask_some(
        self, phase: str, nodes: tuple[str, ...], extra: Extra, hear: Hear | None = None
    ) -> None:
        """Let some nodes' agents do a phase; adds to ``answers``."""
        requests = self._requests(nodes, extra)
        self._settle(phase, self.transport.run(phase, requests, self._note(phase, hear)))

    def fetch(self, node: str, place: str) -> Received:
        """Bring the outputs from one node into the run directory.

        Raises:
            NodeError: they cannot be put there, or did not come at all.
        """
        from ..results.receive import receive

        job = self.job
        request = self._requests((node,), lambda name: {**self.found(name), "place": place})
        received: list[Received] = []

        def take(stream: IO[bytes]) -> None:
            received.append(receive(stream, job.run_dir, job.outputs, node))

        self.transport.fetch("collect", request, take)
        return received[0]

    def fail_if_any(self) -> None:
        """Stop when a node has a problem; all nodes' problems are reported together."""
        bad = {node: answer for node, answer in self.answers.items() if not answer["ok"]}
        if bad:
            raise NodesFailed(bad)

    def leave_out_or_fail(self) -> None:
        """Go on without the nodes that have a problem if enough remain; else stop."""
        bad = {node: answer for node, answer in self.answers.items() if not answer["ok"]}
        good = tuple(node for node in self.job.nodes if node not in bad)
        elastic = self.job.launch.elastic
        least = self.job.min_nodes or (elastic[0] if elastic else len(self.job.nodes))
        if not bad:
            return
        if len(good) < max(1, least):
            raise NodesFailed(bad)
        texts = {
            node: [str(Problem.from_json(raw)) for raw in answer["problems"]]
            for node, answer in bad.items()
        }
        self.left_out |= texts
        self.emit({"event": "left-out", "nodes": texts})
        self.job = replace(self.job, nodes=good)
        self.facts = {node: self.facts[node] for node in good if node in self.facts}
        self.answers = {node: self.answers[node] for node in good}

    def leave_out_unreachable(self) -> bool:
        """Leave out the nodes that kept the ranks of all others from beginning; False for none.

        Raises:
            NodesFailed: too few would be left; only those nodes are to blame.
        """
        if not any(answer.get("unreachable") for answer in self.answers.values()):
            return False
        well = {"ok": True, "problems": []}
        self.answers = {
            node: answer if answer.get("unreachable") else well
            for node, answer in self.answers.items()
        }
        self.leave_out_or_fail()
        for known in (self.task_codes, self._missing, self._received, self._counted):
            known.clear()  # of a launch in which no rank was
        return True

    def _requests(self, nodes: tuple[str, ...], extra: Extra) -> dict[str, dict[str, Any]]:
        job = self.job.to_json()
        return {
            node: {
                "v": 1,
                "job": job,
                "node": node,
                "node_rank": self.job.nodes.index(node),
                "nodes_here": self.transport.nodes_here,
                **extra(node),
            }
            for node in nodes
        }

    def _note(self, phase: str, hear: Hear | None = None) -> Callable[[dict[str, Any]], None]:
        def note(event: dict[str, Any]) -> None:
            if hear is not None:
                hear(event)
            if phase == "launch":
                self._count(event)
            if event["event"] == "late":
                self._late = {str(node): int(event["seconds"]) for node in event["nodes"]}
            if event["event"] == phase:
                node = str(event["node"])
                if "exit_code" in event:
                    task = int(event.get("task", self.job.nodes.index(node)))
                    self.task_codes[str(task)] = int(event["exit_code"])
                before = self.answers.get(node)
                self.answers[node] = event if before is None else _both(before, event)
            self.emit({"phase": phase, **event})

        return note

    def _count(self, event: Mapping[str, Any]) -> None:
        """Compare what a node's ranks have written with what has come."""
        node, source = str(event.get("node", "")), (event.get("node"), str(event.get("task", "")))
        if event["event"] == "lost" and source not in self._counted:
            frames = int(event["frames"]) + int(event.get("unknown", 0))
            frames += int(self._missing.get((node, None), {}).get("frames", 0))
            lost = {"node": node, "rank": None, "frames": frames, "why": _ON_THE_WAY}
            self._missing[node, None] = lost
        if "sent" in event:
            self._counted.add(source)
        for key, count in dict(event.get("sent") or {}).items():
            rank = int(key) if key else None
            missing = int(count) - self._received.pop((node, rank), 0)
            if missing > 0:
                lost = {"node": node, "rank": rank, "bytes": missing, "why": _ON_THE_WAY}
                self._missing[node, rank] = lost

    def _settle(self, phase: str, ended: Mapping[str, Ended]) -> None:
        """Note the nodes that have not answered, and put the answers in the nodes' order."""
        tasks = self.nproc if phase == "launch" and self.job.launch.launcher == "srun" else 1
        for node, end in ended.items():
            answer = self.answers.get(node)
            if answer is not None and answer.get("tasks", 1) >= tasks:
                continue
            fix = end.fix or f"see its log in {self.job.log_dir}"
            lost = Problem(f"{phase} gave no answer", node, end.why, fix)
            silent = {
                "ok": False,
                "lost": True,
                "exit_code": end.code,
                "problems": [lost.to_json()],
                "unreachable": end.unreachable,
            }
            self.answers[node] = silent if answer is None else _both(answer, silent)
            first = self.job.nodes.index(node) * tasks
            for task in range(first, first + tasks) if phase == "launch" else ():
                self.task_codes.setdefault(str(task), end.code)
        for node, seconds in self._late.items() if phase == "launch" else ():
            late = {"ok": False, "problems": [_hanging(node, seconds).to_json()]}
            self.answers[node] = {**self.answers[node], **late}
        order = [node for node in self.job.nodes if node in self.answers]
        self.answers = {node: self.answers[node] for node in order}


def _hanging(node: str, seconds: int) -> Problem:
    return Problem(
        what="the ranks did not end",
        where=node,
        why=f"other nodes had ended {seconds} s before; a thread, an exit handler or a process "
        "pool may hang",
        fix="end them before the program ends, or give them longer with SLURM_WAIT=SECONDS",
    )


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The answers of two tasks of one node as one; the first that failed gives the status."""
    codes = [one["exit_code"] for one in (first, second) if one.get("exit_code")]
    return {
        **second,
        **first,
        "ok": first["ok"] and second["ok"],
        "lost": bool(first.get("lost") or second.get("lost")),
        "tasks": first.get("tasks", 1) + second.get("tasks", 1),
        "exit_code": codes[0] if codes else 0,
        "problems": [*first["problems"], *second["problems"]],
        **{key: [*first.get(key, []), *second.get(key, [])] for key in LISTED},
    }
