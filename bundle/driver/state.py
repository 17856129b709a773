"""The state of a job as the driver knows it; each phase adds to it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from ..format.archive import BundleFile
from ..launch.commands import choose_nproc
from ..launch.program_variables import is_moving
from ..protocol import events, messages
from ..protocol.codec import encode
from ..protocol.enumerations import Launcher, PhaseName
from ..protocol.events import DriverEvent, JobEnds, JobStacks, NodesLate, RankOutput, Remark
from ..protocol.job import ONE_A_CPU, Job
from ..protocol.messages import Answer, LaunchAnswer, PreflightAnswer
from ..protocol.problem import Problem, ProblemCode
from ..redaction.known_values import SecretMask
from ..results.selection import OutputEntry
from ..system import signals
from . import output
from .findings import Names, format_probe_line, group_nodes, shorten_names
from .logs import DRIVER, Logs, format_attempt_mark
from .output import Display, OutputLogs
from .plan import Plan
from .retries import Failure
from .transports.transport import Delivery, Ended, Event, OnEvent, Transfer, Transport

_JOINED = ("problems", "failures", "tail", "left", "vanished", "lingering", "joined", "alone")
"""The fields of which a node's answer has those of all its tasks."""


def _join_answers(first: Answer | None, second: Answer) -> Answer:
    if first is None:
        return second
    return replace(
        first,
        ok=first.ok and second.ok,
        lost=first.lost or second.lost,
        unreachable=first.unreachable or second.unreachable,
        tasks=first.tasks + second.tasks,
        exit_code=first.exit_code or second.exit_code or 0,
        **_join_fields(first, second),
    )


def _join_fields(first: Answer, second: Answer) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: (*getattr(first, name), *getattr(second, name, ()))
        for name in _JOINED
        if hasattr(first, name)
    }
    if isinstance(first, LaunchAnswer) and isinstance(second, LaunchAnswer):
        fields["stopped"] = second.stopped if first.lost else first.stopped
        if second.first_rank is not None:
            fields["first_rank"] = second.first_rank
        if first.code is not None and second.code is not None:
            fields["code"] = replace(second.code, begun=min(first.code.begun, second.code.begun))
    return fields


_OWN = re.compile(
    r"""
    (?<=^--node-rank=)\d+$
    | (?<=^--local-addr=).+$
    | (?<=^--rdzv-conf=is_host=)[01]$
    | (?<=/jobs/)[^/]+(?=/)  # the job's directory, which has the node's rank
    """,
    re.VERBOSE,
)  # the parts of a command's words that follow from the node, see :mod:`bundle.launch.commands`


def drop_known_command(event: messages.Started, known: set[tuple[str, ...]]) -> messages.Started:
    """Return the event without a command that is known for another node, else add it to these."""
    shared = tuple(_OWN.sub("", word) for word in event.argv)
    if shared in known:
        return replace(event, argv=())
    known.add(shared)
    return event


_A = TypeVar("_A", bound=Answer)
RequestFor = Callable[[str], messages.AgentRequest]  # returns the request of a node


class NodesFailed(Exception):
    """Some nodes could not do their part; ``answers`` are theirs."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        super().__init__(", ".join(answers))
        self.answers = answers


class State:
    """Everything about one job, as far as it has come."""

    transport: Transport

    def __init__(self, job: Job, logs: Logs) -> None:
        self.job, self.logs = job, logs  # the job's nodes get fewer when some are left out
        self.spares: Names = ()  # nodes without ranks, once decided; no nodes of the job
        self._size = len(job.nodes) - job.spares  # nodes that get ranks, unless fewer do
        self.bundle: BundleFile | None = None  # None where the driver cannot see it
        self.facts: dict[str, PreflightAnswer] = {}
        self.plan: Plan | None = None
        self.seconds: dict[str, float] = {}
        self.answers: dict[str, Answer] = {}  # the answers to the current phase, by node
        self.task_codes: dict[str, int] = {}  # exit status of each task of the launch
        self.bytes_sent = 0
        self.send_seconds: float | None = None  # None if none was sent
        self.sent_folders: list[str] = []  # in ``incoming/``, whether all arrived or not
        self.missing_spares = 0  # asked for, but not in the allocation
        self.nproc = 1
        self.attempt = 0  # times that ranks were started before that failed then
        self.separate_run_dirs = False  # true if ranks ran in directories of their nodes' own
        self.sent_results: dict[str, OutputEntry] | None = None  # None before it is decided
        self.keep_compiled_code: Callable[[], None] = lambda: None  # once it has ended well
        self.left_out: dict[str, tuple[str, ...]] = {}
        self.result = JobEnds(ok=False)  # replaced by each phase
        self.output = OutputLogs(logs)
        self.display = Display(job.id)
        self._mask = SecretMask(os.environ, job.launch.pass_env)
        self._commands: set[tuple[str, ...]] = set()
        self._ranks: tuple[tuple[str, ...], tuple[str, ...], dict[str, int]] = (), (), {}
        """Nodes of the job, spare ones, and the rank of each."""
        self._late: dict[str, int] = {}  # nodes whose ranks did not end, and the seconds

    @property
    def has_transport(self) -> bool:
        """True once nodes can be reached."""
        return hasattr(self, "transport")

    @property
    def lost_node(self) -> str:
        """A node that was lost, or has not answered; empty if all have."""
        lost = self.transport.lost_node if self.has_transport else ""
        return lost or next((node for node, answer in self.answers.items() if answer.lost), "")

    def emit(self, event: DriverEvent) -> None:
        """Print an event of the driver, and keep it."""
        self._keep(event.to_json())

    def note(self, text: str, *, warning: bool = False) -> None:
        """Emit a remark for the user."""
        self.emit(Remark(text, warning))

    def note_nodes(self, texts: Iterable[tuple[str, str]], *, warning: bool = False) -> None:
        """Emit each text once, behind the names of the nodes that it is about."""
        for text, named in group_nodes(texts).items():
            self.note(f"{shorten_names(named)}: {text}", warning=warning)

    def take(self, phase: str, event: Event) -> None:
        """Print an event of an agent, and keep it; what ranks print goes to their own logs."""
        if isinstance(event, messages.RankStates):  # the watch keeps what it asked for
            return
        if not isinstance(event, RankOutput):
            self._keep({"phase": phase, **event.to_json()})
            return
        task = self.first_task(event.node) if event.rank is None else event.rank
        head = event.node == self.job.nodes[0]
        if event.rank is not None and is_moving(self.job.launch):  # torchrun deals them by node
            head = event.rank < self.nproc
        with signals.defer_signals():  # a part of it would be lost
            self.output.write(event, task)
            if head or self.job.show_all:
                self.display.output(phase, event, head=head)

    def keep_stacks(self, stacks: JobStacks) -> None:
        """Write the file of the ranks' stacks."""
        fields = encode(stacks)
        nodes = cast("dict[str, object]", fields.pop("nodes"))  # in events these are only names
        hidden = {**self._mask.hide_secrets(fields), "nodes": self._mask.hide_secrets(nodes)}
        self.logs.stacks(json.dumps({"v": messages.VERSION, **hidden}) + "\n")

    def _keep(self, event: Mapping[str, object]) -> None:
        line = output.format_line(self.job.id, time.time(), self._mask.hide_secrets(event))
        with signals.defer_signals():
            self.logs.event(line)
            self.display.event(line)

    def log_line(self, node: str, line: str) -> None:
        """Write a line about a node to the node's log."""
        data = line.encode(errors="backslashreplace")  # a name may be no text
        self.logs.output(node, self.first_task(node), data + b"\n", DRIVER)

    def mark_attempt(self) -> None:
        """Write a line to the logs of all ranks: what follows is of another attempt."""
        mark = format_attempt_mark(self.attempt).encode()
        for node in self.job.nodes:
            for task in self.list_tasks(node):
                self.logs.output(node, task, mark, DRIVER)

    def create_rank_logs(self, *nodes: str) -> None:
        """Create a log for every rank of some nodes, also for one that will write nothing."""
        for node in nodes:
            for task in self.list_tasks(node):
                self.logs.begin(node, task)

    def list_tasks(self, node: str) -> range:
        """Return the numbers of a node's ranks."""
        first = self.first_task(node)
        return range(first, first + self.nproc)

    def first_task(self, node: str) -> int:
        """Return the number of a node's first rank; its log also takes what concerns the node."""
        try:
            return self.node_rank(node) * self.nproc
        except KeyError:  # left out meanwhile
            return 0

    def gpus(self) -> dict[str, int]:
        """Return the number of GPUs of each node."""
        return {node: facts.host.gpus if facts.host else 0 for node, facts in self.facts.items()}

    def choose_nproc(self) -> None:
        """Decide how many ranks each node gets."""
        asked, fewest = self.job.launch.nproc_per_node, 1
        if asked == ONE_A_CPU:
            cpus = [facts.host.cpus for facts in self.facts.values() if facts.host]
            fewest = min(cpus, default=1) // self.transport.nodes_here
        self.nproc = choose_nproc(asked, self.gpus(), fewest)

    def common(self, node: str) -> tuple[Job, str, int, int]:
        """Return the fields that all requests to a node begin with."""
        return self.job, node, self.node_rank(node), self.transport.nodes_here

    def place(self, node: str) -> tuple[Job, str, int, int, str, str]:
        """Return these fields with the node root and the interpreter that preflight has found."""
        facts = self.facts[node]
        return (*self.common(node), facts.root, facts.python)

    def node_rank(self, node: str) -> int:
        """Return the rank of a node among the job's; KeyError where the job does not use it."""
        nodes, spares, ranks = self._ranks
        if nodes is not self.job.nodes or spares is not self.spares:
            ranks = {name: rank for rank, name in enumerate((*self.job.nodes, *self.spares))}
            self._ranks = self.job.nodes, self.spares, ranks
        return ranks[node]

    def get_answers(self, kind: type[_A]) -> dict[str, _A]:
        """Return the answers to the current phase, which are of this class, by node."""
        return {node: answer for node, answer in self.answers.items() if isinstance(answer, kind)}

    def ask(
        self,
        phase: str,
        request: RequestFor,
        on_event: OnEvent | None = None,
        nodes: Names | None = None,
    ) -> None:
        """Let all agents, or those of some nodes, do a phase; ``answers`` then has one of each."""
        self.answers = {}
        requests = {node: request(node) for node in (self.job.nodes if nodes is None else nodes)}
        if requests:
            listener = self._make_listener(phase, on_event)
            self._add_missing_answers(phase, self.transport.run(phase, requests, listener))

    def deliver(self, transfer: Transfer, nodes: Names, request: RequestFor) -> Delivery:
        """Send a file to some nodes and let them unpack it; adds to ``answers``."""
        requests = {node: request(node) for node in nodes}
        listener = self._make_listener(PhaseName.UNPACK)
        delivery = self.transport.deliver(transfer, requests, listener)
        ended = delivery.ended
        if delivery.failed and not transfer.token:  # the others have not had their turn
            ended = {node: ended[node] for node in delivery.settled}
        self._add_missing_answers(PhaseName.UNPACK, ended)
        return delivery

    def fail_if_any(self) -> None:
        """Stop when a node has a problem; all nodes' problems are reported together."""
        failed = self.find_failed()
        if failed:
            raise NodesFailed(failed)

    @property
    def _fewest_nodes(self) -> int:
        elastic = self.job.launch.elastic or (self._size,)
        return max(1, self.job.min_nodes or elastic[0])

    def leave_out_or_fail(self, *, fills_places: bool = True) -> None:
        """Go on without nodes that have a problem, with spare ones for them, if enough remain."""
        failed = self.find_failed()
        if not failed:
            return
        nodes, spares = self._fill_places(failed, self.spares if fills_places else ())
        if len(nodes) < self._fewest_nodes:
            raise NodesFailed(failed)
        self._note_left_out(failed, {node: answer.problems for node, answer in failed.items()})
        if fills_places:
            self.spares = spares
        self.job = replace(self.job, nodes=nodes)
        kept = (*nodes, *self.spares)
        self.facts = {node: self.facts[node] for node in kept if node in self.facts}
        self.answers = {node: self.answers[node] for node in nodes if node in self.answers}

    def _note_left_out(
        self, nodes: Iterable[str], problems: dict[str, tuple[Problem, ...]], reason: str = ""
    ) -> None:
        words = {node: tuple(map(str, problems[node])) for node in nodes if node in problems}
        reasons = {node: words.get(node, (reason,)) for node in nodes}
        self.left_out |= reasons
        self.emit(events.NodesLeftOut(reasons, problems))

    def _fill_places(self, dropped: Collection[str], spares: Names) -> tuple[Names, Names]:
        """Return the nodes with spare ones in the places of others, and the spare ones left."""
        left = list(spares)
        nodes = [
            node if node not in dropped else left.pop(0)
            for node in self.job.nodes
            if node not in dropped or left
        ]
        return tuple(nodes), tuple(left)

    def set_spares_aside(self) -> None:
        """Decide which nodes get no ranks: the last ones, where there are more than are needed."""
        nodes = self.job.nodes
        self.job = replace(self.job, nodes=nodes[: self._size], spares=0)
        self.spares = nodes[self._size :]

    def drop_nodes(self, failure: Failure) -> None:
        """Make the nodes of a failed launch, and the spare ones, candidates for another one.

        A node at fault is dropped where the job can do without it, and a suspect where a spare one
        takes its place.
        """
        at_fault = list(filter(failure.at_fault.__contains__, self.job.nodes))
        suspects = list(filter(failure.suspects.__contains__, self.job.nodes))
        dropped = [*at_fault, *suspects][: len(self.spares)]
        dispensable = max(0, len(self.job.nodes) - self._fewest_nodes)
        dropped += at_fault[len(dropped) :][:dispensable]
        nodes, spares = self._fill_places(dropped, self.spares)
        if dropped:
            answers = [self.answers.get(node) for node in dropped]
            problems = {one.node: one.problems for one in answers if one and one.problems}
            self._note_left_out(dropped, problems, failure.cause)
        self.job = replace(self.job, nodes=(*nodes, *spares))
        self.spares = ()
        self.facts = {node: self.facts[node] for node in self.job.nodes}

    def leave_out_unreachable(self) -> bool:
        """Leave out the nodes that kept the ranks of all others from beginning; False for none."""
        if not any(answer.unreachable for answer in self.answers.values()):
            return False
        self.answers = {
            node: answer if answer.unreachable else LaunchAnswer(node)
            for node, answer in self.answers.items()
        }
        self.leave_out_or_fail()
        self.forget_launch()  # no rank has begun
        return True

    def forget_launch(self) -> None:
        """Make ready for another launch: nothing of the one before counts."""
        self.task_codes.clear()
        self._late.clear()
        self.output.begin_launch()

    def has_launch_failed(self) -> bool:
        """Return whether too few nodes have done their part in a launch."""
        failed = self.find_failed()
        if self.job.launch.elastic is None:
            return bool(failed)
        return len(self.job.nodes) - len(failed) < self._fewest_nodes

    def find_failed(self) -> dict[str, Answer]:
        """Return the answers of the nodes that have a problem."""
        return {node: answer for node, answer in self.answers.items() if not answer.ok}

    def _make_listener(self, phase: str, on_event: OnEvent | None = None) -> OnEvent:
        def listen(event: Event) -> None:
            if isinstance(event, messages.ProbeAnswer):
                event = replace(event, line=format_probe_line(event))
            if isinstance(event, messages.Started):
                event = drop_known_command(event, self._commands)
            if on_event is not None:
                on_event(event)
            if phase == PhaseName.LAUNCH:
                self.output.compare(event)
            if isinstance(event, NodesLate):
                self._late = dict.fromkeys(event.nodes, event.seconds)
            if isinstance(event, Answer) and event.event == phase:
                self._add_answer(event)
            self.take(phase, event)

        return listen

    @property
    def _numbers_tasks(self) -> bool:
        return self.job.launch.launcher is Launcher.SRUN

    def _add_answer(self, answer: Answer) -> None:
        node, task = answer.node, answer.task
        if answer.exit_code is not None:
            # Otherwise the step that all phases share may still have nodes that were left out.
            number = task if self._numbers_tasks and task is not None else self.node_rank(node)
            self.task_codes[str(number)] = answer.exit_code
        self.answers[node] = _join_answers(self.answers.get(node), answer)

    def _add_missing_answers(self, phase: str, ended: Mapping[str, Ended]) -> None:
        launches = phase == PhaseName.LAUNCH
        tasks = self.nproc if launches and self._numbers_tasks else 1
        for node, end in ended.items():
            if node not in self.answers or self.answers[node].tasks < tasks:
                self._add_silence(phase, node, end, tasks)
        if launches:
            for node, seconds in self._late.items():
                late = Problem(ProblemCode.RANKS_DID_NOT_END, node, {"seconds": str(seconds)})
                self.answers[node] = replace(self.answers[node], ok=False, problems=(late,))
        nodes = (*self.job.nodes, *self.spares)
        self.answers = {node: self.answers[node] for node in nodes if node in self.answers}

    def _add_silence(self, phase: str, node: str, end: Ended, tasks: int) -> None:
        values = {**end.values, "phase": phase, "log_dir": self.job.log_dir}
        silence = events.find_answer_class(phase)(
            node=node,
            ok=False,
            problems=(Problem(end.problem, node, values),),
            exit_code=end.code,
            lost=True,
            unreachable=end.unreachable,
        )
        self.answers[node] = _join_answers(self.answers.get(node), silence)
        if phase == PhaseName.LAUNCH:
            first = self.node_rank(node) * tasks
            for task in range(first, first + tasks):
                self.task_codes.setdefault(str(task), 1 if end.code is None else end.code)
