"""The driver's part in ``verify --deep``: every node looked at closely, then all ranks talk.

No fault of one node keeps the others from being looked at: the problems of the probe, of the close
look and of the all-reduce are reported together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..checks import findings, network_agreement, reachability
from ..checks.findings import Problems
from ..checks.network_agreement import Clock
from ..launch import commands
from ..protocol import output
from ..protocol.problem import Problem
from ..system import network as net
from .state import State

COMMAND = ("-m", "trainer", "all-reduce")
ALL_REDUCE_SECONDS = 1800
"""After that a launcher is ended that none of the ranks' own time limits has ended."""


def look(state: State) -> None:
    """Let every node look closely; ``state.answers`` then has this beside the probe's answers."""
    probed, job = state.answers, state.job
    real = job.allocation != "local"  # one machine has one clock, one resolver and no distance
    extra: dict[str, Any] = {}
    if real:
        facts = state.facts[job.nodes[0]]
        head = [facts["address"], int(facts["port"]) or net.port_for(job.id)]
        extra = {"head": head, "names": reachability.resolution(job.nodes)}
    clocks: dict[str, Clock] = {}
    sent = time.time()

    def hear(event: Mapping[str, Any]) -> None:
        if event["event"] == "clock":
            clocks[str(event["node"])] = Clock(sent, float(event["clock"]), time.time())

    state.ask("deep", lambda node: {**state.found(node), **extra}, hear)
    looked = state.answers
    damage: Problems = {
        node: [Problem.from_json(raw) for raw in answer.get("damage", [])]
        for node, answer in looked.items()
    }
    for node, answer in looked.items():
        if "damage" in answer:
            found = "is damaged" if answer["damage"] else "is as it was built, every file"
            state.tell(node, f"{node} deep: the environment {found}")
    network = _network(state, looked, extra, clocks) if real else []
    state.answers = _together(probed, looked, damage, *network)


def _network(
    state: State,
    looked: Mapping[str, Mapping[str, Any]],
    asked: Mapping[str, Any],
    clocks: Mapping[str, Clock],
) -> list[Problems]:
    """What is wrong between the nodes; what was measured goes into the result."""
    said = {node: answer["network"] for node, answer in looked.items() if "network" in answer}
    offsets = {node: network_agreement.offset(clock) for node, clock in clocks.items()}
    state.result["deep"] = {
        "connect_seconds": {
            node: answer["seconds"] for node, answer in said.items() if "seconds" in answer
        },
        "clocks": {
            node: {"ahead": round(one.seconds, 3), "give_or_take": round(one.uncertainty, 3)}
            for node, one in offsets.items()
        },
    }
    return [
        findings.unreachable(state.job.nodes[0], said),
        findings.names_apart(asked["names"], said),
        network_agreement.skewed(clocks),
    ]


def all_reduce(state: State) -> None:
    """Let the ranks of all nodes without a problem talk; in the end ``answers`` has it all."""
    before = state.answers
    nodes = tuple(node for node, answer in before.items() if answer["ok"])
    found: Problems = {}
    why = _pointless(state, nodes)
    result: dict[str, Any] | None = None
    if why:
        state.emit({"event": "note", "text": f"the all-reduce is left out: {why}"})
    else:
        result, found = _measure(state, nodes)
    deep = {**state.result.get("deep", {}), "all_reduce": result, "skipped": why}
    state.result["deep"] = deep
    state.answers = _together(before, {}, found)


def _pointless(state: State, nodes: tuple[str, ...]) -> str:
    """Why no ranks are started; empty where they can be, and have something to say."""
    if not nodes:
        return "every node has a problem"
    if any(not state.answers[node].get("torch") for node in nodes):
        return "torch is not in the bundle"
    if len(nodes) * state.nproc < 2:
        return "there is only one rank, and it takes two"
    return ""


def _measure(state: State, nodes: tuple[str, ...]) -> tuple[dict[str, Any] | None, Problems]:
    """Start the ranks on some of the nodes; what they measured, and what is wrong."""
    gpus = {node: int(state.facts[node]["host"]["gpus"]) for node in nodes}
    try:
        backend = commands.choose_backend(state.job.launch.backend, gpus)
    except ValueError as exc:
        problem = Problem("the backend cannot be used", "", str(exc), "use --backend gloo")
        return None, {node: [problem] for node in nodes if not gpus[node]}
    # Nobody joins these ranks later, and none is started again.
    alone = replace(state.job.launch, command=COMMAND, elastic=None, max_restarts=0)
    head = state.facts[nodes[0]]
    extra = {
        "job": replace(state.job, nodes=nodes, launch=alone).to_json(),
        "own": True,
        "limit": ALL_REDUCE_SECONDS,
        "shared": False,
        "group": {
            "address": head["address"],
            "port": int(head["port"]) or net.port_for(state.job.id),
            "backend": backend,
            "nproc": state.nproc,
        },
    }
    printed: dict[tuple[str, int], list[str]] = {}

    def hear(event: Mapping[str, Any]) -> None:
        if event["event"] == "output" and event.get("rank") is not None:
            place = str(event["node"]), int(event["rank"])
            printed.setdefault(place, []).extend(output.shown(event))

    state.answers = {}
    ranks = {node: rank for rank, node in enumerate(nodes)}
    state.ask_some(
        "launch",
        nodes,
        lambda node: {**state.found(node), **extra, "node_rank": ranks[node]},
        hear,
    )
    result = findings.measured(line for lines in printed.values() for line in lines)
    ended = ", ".join(node for node, answer in state.answers.items() if not answer["ok"])
    if result is not None:
        # It is written when every rank has had the right sum: what comes after is tidying up.
        if ended:
            text = f"the ranks have measured all, but did not end well on {ended}: see the logs"
            state.emit({"event": "note", "text": text})
        return result, {}
    found = findings.blamed(printed, state.answers)
    return None, found or {nodes[0]: [findings.silence(nodes[0], state.job.log_dir)]}


def _together(
    first: Mapping[str, Mapping[str, Any]],
    second: Mapping[str, Mapping[str, Any]],
    *more: Problems,
) -> dict[str, dict[str, Any]]:
    """Each node's answers as one, with all its problems, each told once."""
    joined = {}
    for node, answer in first.items():
        other = second.get(node, {})
        raws = [*other.get("problems", [])]
        raws += [problem.to_json() for found in more for problem in found.get(node, [])]
        raws = [*raws, *(raw for raw in answer["problems"] if raw not in raws)]
        ok = bool(answer["ok"] and other.get("ok", True) and not raws)
        lost = bool(answer.get("lost") or other.get("lost"))
        joined[node] = {**answer, **other, "ok": ok, "lost": lost, "problems": raws}
    return joined
