"""The driver's part in ``verify --deep``: each node is checked closely, then all ranks communicate.

No fault of one node keeps the others from being checked: the problems of the probe, of the deep
check and of the all-reduce are reported together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..checks import deep
from ..launch.commands import choose_backend
from ..protocol import messages
from ..protocol.enumerations import Allocation, PhaseName
from ..protocol.events import AllReduceMeasured, ClockOffset, DeepReport, RankOutput
from ..protocol.job import Job
from ..protocol.messages import (
    Answer,
    DeepAnswer,
    DeepRequest,
    GroupSettings,
    LaunchAnswer,
    LaunchRequest,
    NodeClock,
)
from ..protocol.problem import Problem, ProblemCode
from ..system import network
from . import findings
from .findings import ClockReading, Problems
from .state import State
from .transports.transport import Event

COMMAND = ("-m", "trainer", "all-reduce")
ALL_REDUCE_SECONDS = 1800
"""The time after which a launcher is ended that none of the ranks' own time limits has ended."""


def check_nodes(state: State) -> None:
    """Let every node check itself; ``state.answers`` then has this beside the probe's answers."""
    probed, job = state.answers, state.job
    head: tuple[str, int] | None = None
    names: dict[str, tuple[str, ...]] | None = None
    if job.allocation is not Allocation.LOCAL:  # one machine has one clock and one resolver
        head = _find_address(state, job.nodes[0])
        names = names_to_compare(job)
    clocks = _ask_nodes(state, head, names)
    found = _list_damage(state)
    if names is not None:
        found += _compare_networks(state, names, clocks)
    checked = state.get_answers(DeepAnswer)
    state.answers = {
        node: _add_problems(checked.get(node, DeepAnswer(node)), found, probe)
        for node, probe in probed.items()
    }


def names_to_compare(job: Job) -> dict[str, tuple[str, ...]]:
    """Return the names of nodes, with their addresses here, that all nodes are to look up.

    What only the user's ``ssh`` knows is no name for the ranks.
    """
    resolved = deep.resolve_names(name.rpartition("@")[2] for name in job.nodes)
    by_ssh = job.allocation is Allocation.SSH
    return {name: tuple(places) for name, places in resolved.items() if places or not by_ssh}


def _ask_nodes(
    state: State, head: tuple[str, int] | None, names: dict[str, tuple[str, ...]] | None
) -> dict[str, ClockReading]:
    clocks: dict[str, ClockReading] = {}
    sent = time.time()

    def take(event: Event) -> None:
        if isinstance(event, NodeClock):
            clocks[event.node] = ClockReading(sent, event.clock, time.time())

    def request(node: str) -> DeepRequest:
        return DeepRequest(**state.place(node), head=head, names=names)

    state.ask(PhaseName.DEEP, request, take)
    return clocks


def _list_damage(state: State) -> list[Problems]:
    found: list[Problems] = []
    for node, answer in state.get_answers(DeepAnswer).items():
        if answer.damage is None:
            continue
        found.append({node: list(answer.damage)})
        finding = "is damaged" if answer.damage else "is as it was built, every file"
        state.log_line(node, f"{node} deep: the environment {finding}")
    return found


def _find_address(state: State, node: str) -> tuple[str, int]:
    facts = state.facts[node]
    return facts.address, facts.port or network.choose_port(state.job.id)


def _compare_networks(
    state: State, names: Mapping[str, Sequence[str]], clocks: Mapping[str, ClockReading]
) -> list[Problems]:
    answers = state.get_answers(DeepAnswer).items()
    reports = {node: answer.network for node, answer in answers if answer.network is not None}
    seconds = {node: report.seconds for node, report in reports.items()}
    offsets = {node: findings.measure_clock_offset(clock) for node, clock in clocks.items()}
    deep = DeepReport(
        connect_seconds={node: taken for node, taken in seconds.items() if taken is not None},
        clocks={
            node: ClockOffset(round(offset.seconds, 3), round(offset.uncertainty, 3))
            for node, offset in offsets.items()
        },
    )
    state.result = replace(state.result, deep=deep)
    return [
        findings.find_unreachable_nodes(state.job.nodes[0], reports),
        findings.find_differing_names(names, reports),
        findings.find_skewed_clocks(clocks),
    ]


def all_reduce(state: State) -> None:
    """Let ranks of all nodes without a problem communicate; ``answers`` then has everything."""
    before, result = state.answers, None
    problems: Problems = {}
    nodes = tuple(node for node, answer in before.items() if answer.ok)
    why = _reason_to_skip(state, nodes)
    if why:
        state.note(f"the all-reduce is left out: {why}")
    else:
        result, problems = _measure_all_reduce(state, nodes)
    deep = replace(state.result.deep or DeepReport(), all_reduce=result, skipped=why)
    state.result = replace(state.result, deep=deep)
    state.answers = {node: _add_problems(answer, [problems]) for node, answer in before.items()}


def _reason_to_skip(state: State, nodes: tuple[str, ...]) -> str:
    if not nodes:
        return "every node has a problem"
    answers = state.get_answers(DeepAnswer)
    if not all(node in answers and answers[node].torch for node in nodes):
        return "torch is not in the bundle"
    if len(nodes) * state.nproc < 2:
        return "there is only one rank, and it takes two"
    return ""


def _measure_all_reduce(
    state: State, nodes: tuple[str, ...]
) -> tuple[AllReduceMeasured | None, Problems]:
    all_gpus = state.gpus()
    gpus = {node: all_gpus[node] for node in nodes}
    try:
        backend = choose_backend(state.job.launch.backend, gpus)
    except ValueError as exc:
        problem = Problem(ProblemCode.BACKEND_UNUSABLE, "", {"why": str(exc)})
        return None, {node: [problem] for node in nodes if not gpus[node]}
    printed = _run_ranks(state, nodes, backend)
    result = findings.read_measurement(itertools.chain.from_iterable(printed.values()))
    if result is None:
        problems = findings.find_failed_ranks(printed, state.get_answers(LaunchAnswer))
        values = {"prefix": findings.RESULT.strip(), "log_dir": state.job.log_dir}
        nothing = Problem(ProblemCode.NOTHING_MEASURED, nodes[0], values)
        return None, problems or {nodes[0]: [nothing]}
    # Printed once every rank has the right sum: a later failure is only one of cleaning up.
    failed = state.find_failed()
    if failed:
        where = ", ".join(failed)
        state.note(f"the ranks have measured all, but did not end well on {where}: see the logs")
    return result, {}


def _run_ranks(
    state: State, nodes: tuple[str, ...], backend: str
) -> dict[tuple[str, int], list[str]]:
    """Run the all-reduce; return each rank's output lines by node and number."""
    # Nobody joins these ranks later, and none is started again.
    launch = replace(state.job.launch, command=COMMAND, elastic=None, max_restarts=0)
    address, port = _find_address(state, nodes[0])
    job = replace(state.job, nodes=nodes, launch=launch)
    group = GroupSettings(address, port, backend, state.nproc)
    printed: dict[tuple[str, int], list[str]] = {}

    def take(event: Event) -> None:
        if isinstance(event, RankOutput) and event.rank is not None:
            lines = messages.split_lines(event.data)
            printed.setdefault((event.node, event.rank), []).extend(lines)

    def request(node: str) -> LaunchRequest:
        asked = LaunchRequest(**state.place(node), group=group, shared=False, own=True)
        return replace(asked, job=job, node_rank=nodes.index(node), limit=ALL_REDUCE_SECONDS)

    state.ask(PhaseName.LAUNCH, request, take, nodes)
    return printed


_NO_ANSWER = Answer()
"""An answer without a problem."""


def _add_problems(answer: Answer, found: list[Problems], before: Answer = _NO_ANSWER) -> Answer:
    """Add problems to a node's answer, and those of its earlier answer, each once."""
    problems = [*answer.problems]
    problems += [problem for by_node in found for problem in by_node.get(answer.node, [])]
    problems += [problem for problem in before.problems if problem not in problems]
    return replace(
        answer,
        ok=answer.ok and before.ok and not problems,
        lost=answer.lost or before.lost,
        problems=tuple(problems),
    )
