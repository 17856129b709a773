"""The driver's part in ``verify --deep``: each node is checked closely, then all ranks communicate.

No fault of one node keeps the others from being checked: the problems of the probe, of the deep
check and of the all-reduce are reported together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..checks import findings, network_agreement, reachability
from ..checks.findings import Problems
from ..checks.network_agreement import ClockReading
from ..launch.choices import choose_backend
from ..protocol import output
from ..protocol.events import AllReduceMeasured, ClockOffset, DeepReport
from ..protocol.problem import Problem, ProblemCode
from ..protocol.requests import DeepRequest, GroupSettings, LaunchRequest
from ..protocol.words import Allocation
from ..system import network
from .state import Answer, State
from .transports.transport import Event

COMMAND = ("-m", "trainer", "all-reduce")
ALL_REDUCE_SECONDS = 1800
"""The time after which a launcher is ended that none of the ranks' own time limits has ended."""


def check_nodes(state: State) -> None:
    """Let every node check itself; ``state.answers`` then has this beside the probe's answers."""
    probed, job = state.answers, state.job
    # One machine has one clock and one resolver.
    between_nodes = job.allocation is not Allocation.LOCAL
    head, names = None, None
    if between_nodes:
        head = _address_of(state, job.nodes[0])
        resolved = reachability.resolution(job.nodes)
        names = {name: tuple(addresses) for name, addresses in resolved.items()}
    clocks: dict[str, ClockReading] = {}
    sent = time.time()

    def on_event(event: Event) -> None:
        if event["event"] == "clock":
            clocks[str(event["node"])] = ClockReading(sent, float(event["clock"]), time.time())

    state.ask(
        "deep", lambda node: DeepRequest(*state.placed(node), head=head, names=names), on_event
    )
    checked = state.answers
    found = [_damage(checked)]
    for node, answer in checked.items():
        if "damage" in answer:
            finding = "is damaged" if answer["damage"] else "is as it was built, every file"
            state.log_line(node, f"{node} deep: the environment {finding}")
    if names is not None:
        found += _network(state, names, clocks)
    state.answers = _merged(probed, checked, found)


def _address_of(state: State, node: str) -> tuple[str, int]:
    """Return the address and the port on which a node listens when it is the head."""
    facts = state.facts[node]
    return facts["address"], int(facts["port"]) or network.port_for(state.job.id)


def _damage(checked: Mapping[str, Answer]) -> Problems:
    return {
        node: [Problem.from_json(raw) for raw in answer.get("damage", [])]
        for node, answer in checked.items()
    }


def _network(
    state: State, names: Mapping[str, Sequence[str]], clocks: Mapping[str, ClockReading]
) -> list[Problems]:
    """Return what is wrong between the nodes; the measurements go into the result."""
    reports = {
        node: answer["network"] for node, answer in state.answers.items() if "network" in answer
    }
    deep = DeepReport(
        connect_seconds={
            node: report["seconds"] for node, report in reports.items() if "seconds" in report
        },
        clocks={node: _clock_offset(clock) for node, clock in clocks.items()},
    )
    state.result = replace(state.result, deep=deep)
    return [
        findings.unreachable(state.job.nodes[0], reports),
        findings.names_apart(names, reports),
        network_agreement.skewed(clocks),
    ]


def _clock_offset(clock: ClockReading) -> ClockOffset:
    offset = network_agreement.offset(clock)
    return ClockOffset(round(offset.seconds, 3), round(offset.uncertainty, 3))


def all_reduce(state: State) -> None:
    """Let ranks of all nodes without a problem communicate; ``answers`` then has everything."""
    before = state.answers
    nodes = tuple(node for node, answer in before.items() if answer["ok"])
    measured = _Measured()
    why = _reason_to_skip(state, nodes)
    if why:
        state.note(f"the all-reduce is left out: {why}")
    else:
        measured = _measure(state, nodes)
    before_it = state.result.deep or DeepReport()
    deep = replace(before_it, all_reduce=measured.result, skipped=why)
    state.result = replace(state.result, deep=deep)
    state.answers = _merged(before, {}, [measured.problems])


def _reason_to_skip(state: State, nodes: tuple[str, ...]) -> str:
    """Return why no ranks are started; empty where an all-reduce can be done."""
    if not nodes:
        return "every node has a problem"
    if any(not state.answers[node].get("torch") for node in nodes):
        return "torch is not in the bundle"
    if len(nodes) * state.nproc < 2:
        return "there is only one rank, and it takes two"
    return ""


@dataclass(frozen=True)
class _Measured:
    """The outcome of an all-reduce."""

    result: AllReduceMeasured | None = None
    """The measurements; None where there are none."""
    problems: Problems = field(default_factory=dict)
    """The problems of each node."""


def _measure(state: State, nodes: tuple[str, ...]) -> _Measured:
    """Start the ranks on some of the nodes, and wait for what they measure."""
    all_gpus = state.gpus()
    gpus = {node: all_gpus[node] for node in nodes}
    try:
        backend = choose_backend(state.job.launch.backend, gpus)
    except ValueError as exc:
        problem = Problem(ProblemCode.BACKEND_UNUSABLE, "", {"why": str(exc)})
        return _Measured(problems={node: [problem] for node in nodes if not gpus[node]})
    printed = _run_ranks(state, nodes, backend)
    result = findings.measured(itertools.chain.from_iterable(printed.values()))
    if result is None:
        problems = findings.blamed(printed, state.answers)
        silence = {nodes[0]: [findings.silence(nodes[0], state.job.log_dir)]}
        return _Measured(problems=problems or silence)
    # It is written when every rank has had the right sum: what comes after is tidying up.
    failed = state.failed()
    if failed:
        where = ", ".join(failed)
        state.note(f"the ranks have measured all, but did not end well on {where}: see the logs")
    return _Measured(result)


def _run_ranks(
    state: State, nodes: tuple[str, ...], backend: str
) -> dict[tuple[str, int], list[str]]:
    """Run the all-reduce; return the lines that each rank printed, by its node and number."""
    # Nobody joins these ranks later, and none is started again.
    launch = replace(state.job.launch, command=COMMAND, elastic=None, max_restarts=0)
    address, port = _address_of(state, nodes[0])
    job = replace(state.job, nodes=nodes, launch=launch)
    group = GroupSettings(address, port, backend, state.nproc)
    printed: dict[tuple[str, int], list[str]] = {}

    def on_event(event: Event) -> None:
        if event["event"] == "output" and event.get("rank") is not None:
            rank = str(event["node"]), int(event["rank"])
            printed.setdefault(rank, []).extend(output.shown(event))

    def request(node: str) -> LaunchRequest:
        asked = LaunchRequest(*state.placed(node), group=group, shared=False, own=True)
        return replace(asked, job=job, node_rank=nodes.index(node), limit=ALL_REDUCE_SECONDS)

    state.answers = {}
    state.ask_some("launch", nodes, request, on_event)
    return printed


def _merged(
    first: Mapping[str, Answer], second: Mapping[str, Answer], found: list[Problems]
) -> dict[str, Answer]:
    """Return two answers of each node as one, with the problems found besides, each once."""
    return {
        node: _with_problems(answer, second.get(node, {}), _found_on(node, found))
        for node, answer in first.items()
    }


def _found_on(node: str, found: list[Problems]) -> list[dict[str, str]]:
    return [problem.to_json() for problems in found for problem in problems.get(node, [])]


def _with_problems(first: Answer, second: Answer, found: list[dict[str, str]]) -> Answer:
    problems = [*second.get("problems", []), *found]
    problems += [problem for problem in first["problems"] if problem not in problems]
    ok = first["ok"] and second.get("ok", True) and not problems
    lost = bool(first.get("lost") or second.get("lost"))
    return {**first, **second, "ok": bool(ok), "lost": lost, "problems": problems}
