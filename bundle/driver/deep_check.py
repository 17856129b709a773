"""The driver's part in ``verify --deep``: each node is checked closely, then all ranks communicate.

No fault of one node keeps the others from being checked: the problems of the probe, of the deep
check and of the all-reduce are reported together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..checks import findings, network_agreement, reachability
from ..checks.findings import Problems
from ..checks.network_agreement import ClockReading
from ..launch.choices import choose_backend
from ..protocol import output
from ..protocol.problem import Problem, ProblemCode
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
    between_nodes = (
        job.allocation is not Allocation.LOCAL
    )  # one machine has one clock and one resolver
    request: dict[str, Any] = {}
    if between_nodes:
        names = reachability.resolution(job.nodes)
        request = {"head": list(_address_of(state, job.nodes[0])), "names": names}
    clocks: dict[str, ClockReading] = {}
    sent = time.time()

    def on_event(event: Event) -> None:
        if event["event"] == "clock":
            clocks[str(event["node"])] = ClockReading(sent, float(event["clock"]), time.time())

    state.ask("deep", lambda node: {**state.paths(node), **request}, on_event)
    checked = state.answers
    found = [_damage(checked)]
    for node, answer in checked.items():
        if "damage" in answer:
            finding = "is damaged" if answer["damage"] else "is as it was built, every file"
            state.log_line(node, f"{node} deep: the environment {finding}")
    if between_nodes:
        found += _network(state, request["names"], clocks)
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
    state.result["deep"] = {
        "connect_seconds": {
            node: report["seconds"] for node, report in reports.items() if "seconds" in report
        },
        "clocks": {node: _clock_json(clock) for node, clock in clocks.items()},
    }
    return [
        findings.unreachable(state.job.nodes[0], reports),
        findings.names_apart(names, reports),
        network_agreement.skewed(clocks),
    ]


def _clock_json(clock: ClockReading) -> dict[str, float]:
    offset = network_agreement.offset(clock)
    return {"ahead": round(offset.seconds, 3), "give_or_take": round(offset.uncertainty, 3)}


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
    deep = state.result.get("deep", {})
    state.result["deep"] = {**deep, "all_reduce": measured.result, "skipped": why}
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

    result: dict[str, Any] | None = None
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
    request = {
        "job": replace(state.job, nodes=nodes, launch=launch).to_json(),
        "own": True,
        "limit": ALL_REDUCE_SECONDS,
        "shared": False,
        "group": {"address": address, "port": port, "backend": backend, "nproc": state.nproc},
    }
    printed: dict[tuple[str, int], list[str]] = {}

    def on_event(event: Event) -> None:
        if event["event"] == "output" and event.get("rank") is not None:
            rank = str(event["node"]), int(event["rank"])
            printed.setdefault(rank, []).extend(output.shown(event))

    def part(node: str) -> dict[str, Any]:
        return {**state.paths(node), **request, "node_rank": nodes.index(node)}

    state.answers = {}
    state.ask_some("launch", nodes, part, on_event)
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
