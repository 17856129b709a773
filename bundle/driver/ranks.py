"""The ranks of a job: how they are started, and what has become of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..launch.choices import choose_backend, must_use_cpus
from ..launch.variables import USE_CPU
from ..protocol.problem import NodeError, Problem, ProblemCode
from .state import State
from .transports.transport import Event, OnEvent


def start(state: State) -> None:
    """Start the ranks on the nodes of the job, and wait until they end.

    Raises:
        NodeError: they cannot be started with these nodes.
    """
    group = _group(state)
    if group["on_cpus"]:
        _note_cpus(state)
    shared = all(facts["proj"] for facts in state.facts.values())
    world_size = state.nproc * len(state.job.nodes)
    state.result |= {"world_size": world_size, "backend": group["backend"]}
    state.separate_run_dirs = not shared
    request = {"group": group, "shared": shared}
    on_event = _log_starter(state)
    try:
        state.ask("launch", lambda node: {**state.paths(node), **request}, on_event)
    finally:  # also of a job that is interrupted: something may have failed before
        state.result |= _outcome(state)


def _group(state: State) -> dict[str, Any]:
    """Return how the ranks find each other."""
    job, gpus = state.job, state.gpus()
    try:
        backend = choose_backend(job.launch.backend, gpus)
    except ValueError as exc:
        raise NodeError(Problem(ProblemCode.BACKEND_UNUSABLE, "", {"why": str(exc)})) from exc
    head = state.facts[job.nodes[0]]
    if not head.get("port"):  # it has become the head after another one was left out
        raise NodeError(Problem(ProblemCode.HEAD_WITHOUT_ADDRESS, job.nodes[0]))
    return {
        "address": head["address"],
        "port": head["port"],
        "backend": backend,
        "nproc": state.nproc,
        "on_cpus": must_use_cpus(backend, gpus),
    }


def _log_starter(state: State) -> OnEvent:
    """Create the logs of all ranks as soon as their numbers are settled.

    Returns:
        A function that takes the events of the launch.
    """
    launch = state.job.launch
    pending = launch.elastic is None and not launch.max_restarts  # else ranks change nodes
    if pending and state.job.min_nodes is None:
        state.begin_logs()

    def on_event(event: Event) -> None:
        nonlocal pending
        if pending and event["event"] == "started":  # before, ranks may still get other numbers
            state.begin_logs()
            pending = False

    return on_event


def _note_cpus(state: State) -> None:
    """Report the variable set for accelerate, unless the user has set it or has no use for it."""
    if USE_CPU in os.environ or not _may_have_accelerate(state):
        return
    why = "not every node has a GPU, and without it accelerate's ranks would not meet"
    state.note(f"{USE_CPU}=true: {why}")


def _may_have_accelerate(state: State) -> bool:
    if state.bundle is None:
        return True
    return any(layer.name == "accelerate" for layer in state.bundle.manifest.layers)


def _outcome(state: State) -> dict[str, Any]:
    """Return what the result says of the ranks."""
    answers = state.answers
    outcome = {
        "exit_codes": {node: int(answer.get("exit_code", 1)) for node, answer in answers.items()},
        "task_codes": state.task_codes,
        "failures": _listed(answers, "failures"),
        "tails": {node: answer["tail"] for node, answer in answers.items() if answer.get("tail")},
        "stopped": [node for node, answer in answers.items() if answer.get("stopped")],
        "lingering": _listed(answers, "lingering"),
        "vanished": _listed(answers, "vanished"),
    }
    if outcome["failures"]:  # else nobody asks who ended first
        outcome["left"] = _listed(answers, "left")
    return outcome


def _listed(answers: Mapping[str, Mapping[str, Any]], key: str) -> list[Any]:
    """Return the entries of one list in all answers."""
    return [entry for answer in answers.values() for entry in answer.get(key, [])]


def notes(state: State) -> list[str]:
    """Return remarks for the user on a launch that went well otherwise."""
    world_size = int(state.result["world_size"])
    alone = _listed(state.answers, "alone")
    if world_size < 2 or not alone or _listed(state.answers, "joined"):
        return []
    return [
        f"no rank joined a process group of torch.distributed: each of the {world_size} ranks ran "
        "by itself; if they were to train together, the program has to call "
        "torch.distributed.init_process_group (Hugging Face's Trainer and Accelerate do so where "
        "they take the run for a distributed one)"
    ]
