"""The driver: runs inside the allocation and takes all nodes through the phases of a job.

It prints JSON lines, ``{"v": 1, "job_id": ..., "time": ..., "event": ..., "node": ...,
"phase": ..., "seconds": ...}``, with the time in seconds since the epoch by the driver's clock:
``job`` first, ``begin`` and ``end`` of each phase, what each agent answers, what is decided on the
way (``plan``, ``left-out``, ``late``, ``collected``, ``note``), and at last one ``result``. It
keeps them as ``events.<jobid>.jsonl`` beside the logs, and writes what the ranks print to one log a
rank.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..checks import preflight
from ..format.archive import BundleFile
from ..format.manifest import room_for
from ..launch import commands
from ..protocol.job import Job
from ..protocol.problem import NodeError, Problem
from ..system import open_files, signals
from . import collect, staging
from .logs import Logs
from .state import NodesFailed, State
from .transports import slurm_commands
from .transports.local import LocalTransport
from .transports.transport import Transport

EXIT_JOB = 3
EXIT_INTERRUPTED = 130

_ENDINGS = {
    "time-limit": Problem(
        "the job ran into its time limit",
        "",
        "Slurm ended it",
        "ask for more with --time or [cluster] time, or let it do less",
    ),
    "cancelled": Problem("the job was cancelled", "", "scancel, or the queue's owner", ""),
    "preempted": Problem(
        "the job was preempted",
        "",
        "a job with a higher priority took its nodes",
        "submit it again, or with --batch and --requeue",
    ),
    "requeued": Problem(
        "Slurm put the job back into the queue",
        "",
        "scontrol requeue, or a node that cannot go on",
        "wait: it starts again by itself",
    ),
    "node-failure": Problem(
        "Slurm lost a node of the job",
        "",
        "the allocation ended with it",
        "start again; leave the node out with --exclude",
    ),
}


def drive(job: Job, transport: Callable[[Job], Transport] | None = None) -> int:
    """Take the job through its phases; returns the exit status, 0 or 3 (130 when interrupted).

    Raises:
        NodeError: there is no allocation, or the log directory cannot be written.
    """
    signals.end_on_signals()
    open_files.raise_open_files()
    if job.allocation == "slurm":
        job = slurm_commands.bind(job, os.environ)
    state = State(job, Logs(job))
    problems: dict[str, list[dict[str, str]]] = {}
    interrupted = False
    try:
        with contextlib.ExitStack() as kept_open:
            try:
                state.bundle = _open(job, kept_open)
            finally:
                state.emit({"event": "job", "nodes": list(job.nodes), "log_dir": job.log_dir})
            state.transport = (transport or _transport(job))(job)
            for phase in _phases(job):
                _timed(state, phase)
                if state.plan is not None and job.dry_run:
                    break
    except NodesFailed as exc:
        problems = {node: list(answer["problems"]) for node, answer in exc.answers.items()}
    except NodeError as exc:
        problems = {job.nodes[0]: [exc.problem.to_json()]}
    except signals.Stopped:
        interrupted = True
        problems = {node: found for node in state.answers if (found := _known_before(state, node))}
    signals.ignore_signals()
    try:
        return _conclude(state, problems, interrupted)
    finally:
        if state.begun:
            state.transport.close()


def _transport(job: Job) -> Callable[[Job], Transport]:
    if job.allocation == "local":
        return LocalTransport
    from .transports.slurm import SlurmTransport

    return SlurmTransport


def _open(job: Job, kept_open: contextlib.ExitStack) -> BundleFile | None:
    """The bundle, in use until the job ends; None where only other nodes can see it."""
    try:
        return kept_open.enter_context(BundleFile(job.bundle, job.bundle_id))
    except NodeError:
        if job.allocation == "slurm" and not os.path.exists(job.bundle):
            return None
        raise


def _conclude(state: State, problems: dict[str, list[dict[str, str]]], interrupted: bool) -> int:
    """Bring the results home, tidy up, and say how it went."""
    if interrupted and state.begun:
        state.transport.hurry()
    ended_by = state.transport.ended_by() if (problems or interrupted) and state.begun else ""
    collect.come_home(state, standing=not ended_by)
    if ended_by:
        ending = replace(_ENDINGS[ended_by], where=f"job {state.job.id}")
        interrupted = False
        listed = problems.setdefault(state.lost_node or state.job.nodes[0], [])
        listed.insert(0, ending.to_json())
    lost = state.losses()
    if lost and not problems and not interrupted:
        problems = state.loss_problems(lost)
    ok = not problems and not interrupted
    state.emit(
        {
            "event": "result",
            "ok": ok,
            "interrupted": interrupted,
            "ended_by": ended_by,
            "problems": problems,
            "left_out": sorted(state.left_out),
            "logs_lost": lost,
            "logs_fault": state.logs.fault,
            "bytes_broadcast": state.bytes_sent,
            "seconds": state.seconds,
            **state.result,
        }
    )
    return EXIT_INTERRUPTED if interrupted else 0 if ok else EXIT_JOB


def _known_before(state: State, node: str) -> list[dict[str, str]]:
    """The problems that a node had told of before the job was interrupted."""
    answer = state.answers[node]
    return [] if answer.get("stopped") else list(answer.get("problems", []))


def _phases(job: Job) -> tuple[Callable[[State], None], ...]:
    if job.action == "clean":
        return (_clean,)
    checked = (_preflight, _place, _unpack, _probe)
    if _deep_too(job):
        return (*checked, _deep, _all_reduce)
    return (*checked, _launch) if job.action == "run" else checked


def _deep_too(job: Job) -> bool:
    return job.deep and job.action == "verify"


def _timed(state: State, phase: Callable[[State], None]) -> None:
    name = phase.__name__.lstrip("_")
    started = time.monotonic()
    state.emit({"event": "begin", "phase": name})
    try:
        phase(state)
    finally:
        state.seconds[name] = round(time.monotonic() - started, 3)
        state.emit({"event": "end", "phase": name, "seconds": state.seconds[name]})


def _preflight(state: State) -> None:
    """Look before anything is sent: every problem of every node at once."""
    manifest = state.bundle.manifest if state.bundle is not None else None
    asked: dict[str, Any] = {}
    if manifest is not None:
        asked["heads"] = [layer.head for layer in manifest.layers]
        wheel = manifest.decompressor
        asked["room"] = [room_for([layer]) for layer in manifest.layers]
        asked["own_room"] = room_for([], manifest)
        asked["size"] = os.path.getsize(state.job.bundle)
        asked["wheel"] = None if wheel is None else [wheel.name, wheel.size]
    with collect.marked(state.job) as marker:
        state.ask("preflight", lambda node: {**asked, "marker": marker})
    state.facts = dict(state.answers)
    lines = []
    for node, facts in state.facts.items():
        lines.append(preflight.line(node, facts))
        if "damage" in facts:
            lines.append(f"{node} damage: {_note_damage(state, node, facts['damage'])}")
        lines += [f"{node} problem: {Problem.from_json(raw)}" for raw in facts["problems"]]
    looked = [float(facts.get("check_seconds", 0.0)) for facts in state.facts.values()]
    state.result["check_seconds"] = max(looked, default=0.0)
    state.logs.preflight(lines)
    state.leave_out_or_fail()
    state.choose_nproc()


def _note_damage(state: State, node: str, raw: dict[str, str]) -> str:
    """Say what is wrong with the environment on a node; returns that."""
    text = str(Problem.from_json(raw))
    state.emit({"event": "note", "warning": True, "text": f"{node}: {text}"})
    return text


def _place(state: State) -> None:
    """Plan what must travel; the sending is part of the unpacking."""
    staging.decide(state)


def _unpack(state: State) -> None:
    """Make the environment on every node."""
    staging.carry_out(state)
    for node, answer in state.answers.items():
        if answer["ok"]:
            how = "reused" if answer["reused"] else "staged"
            state.tell(node, f"{node} {how} -> {answer['path']}")
        if "mended" in answer:
            state.result.setdefault("repaired", {})[node] = answer["mended"]
            if "damage" not in state.facts[node]:
                _note_damage(state, node, answer["mended"])
    state.leave_out_or_fail()


def _probe(state: State) -> None:
    """Check on every node that the environment is what was built, and runs."""
    head = state.facts[state.job.nodes[0]]["address"]
    state.ask("probe", lambda node: {**state.found(node), "head": head})
    for node, answer in state.answers.items():
        if "line" in answer:
            state.tell(node, str(answer["line"]))
    if not _deep_too(state.job):  # else what is wrong is told together with why
        state.leave_out_or_fail()


def _deep(state: State) -> None:
    """Look closely at every node, also where the probe has found something."""
    from . import deep_check

    deep_check.look(state)


def _all_reduce(state: State) -> None:
    """Let ranks talk on the nodes that are well, then tell all problems of all nodes."""
    from . import deep_check

    deep_check.all_reduce(state)
    state.leave_out_or_fail()


def _launch(state: State) -> None:
    """Start the ranks, and wait for all of them."""
    _start_ranks(state)
    while state.leave_out_unreachable():
        _start_ranks(state)
    state.result["notes"] = _notes(state)
    if state.job.launch.elastic is not None:
        state.leave_out_or_fail()  # the group may have gone on without them
    state.fail_if_any()


def _start_ranks(state: State) -> None:
    """Start the ranks on the nodes that there are, and wait for what becomes of them."""
    job, head = state.job, state.facts[state.job.nodes[0]]
    gpus = {node: int(facts["host"]["gpus"]) for node, facts in state.facts.items()}
    try:
        backend = commands.choose_backend(job.launch.backend, gpus)
    except ValueError as exc:
        fix = "use --backend gloo"
        raise NodeError(Problem("the backend cannot be used", "", str(exc), fix)) from exc
    if not head.get("port"):  # it has become the head after another one was left out
        why = "none of its addresses, or none of the job's ports, can be used"
        fix = "name the interface with --interface, or exclude the node"
        raise NodeError(Problem("the head cannot be reached", job.nodes[0], why, fix))
    group = {
        "address": head["address"],
        "port": head["port"],
        "backend": backend,
        "nproc": state.nproc,
        "on_cpus": commands.must_use_cpus(backend, gpus),
    }
    if group["on_cpus"]:
        _say_on_cpus(state)
    shared = all(facts["proj"] for facts in state.facts.values())
    state.result |= {"world_size": state.nproc * len(job.nodes), "backend": backend}
    state.apart = not shared
    settled = job.launch.elastic is None and not job.launch.max_restarts  # else ranks change nodes
    if settled and job.min_nodes is None:
        state.begin_logs()

    def hear(event: Mapping[str, Any]) -> None:
        nonlocal settled
        if settled and event["event"] == "started":  # before, ranks may still get other numbers
            state.begin_logs()
            settled = False

    asked = {"group": group, "shared": shared}
    try:
        state.ask("launch", lambda node: {**state.found(node), **asked}, hear)
    finally:  # also of a job that is interrupted: something may have failed before
        state.result |= _outcome(state)


def _say_on_cpus(state: State) -> None:
    """Say which variable is set for accelerate, unless the user has set it or has no use for it."""
    layers = state.bundle.manifest.layers if state.bundle else None
    if commands.USE_CPU in os.environ or (
        layers is not None and not any(layer.name == "accelerate" for layer in layers)
    ):
        return
    why = "not every node has a GPU, and without it accelerate's ranks would not meet"
    state.emit({"event": "note", "text": f"{commands.USE_CPU}=true: {why}"})


def _outcome(state: State) -> dict[str, Any]:
    answers = state.answers
    codes = {node: int(answer.get("exit_code", 1)) for node, answer in answers.items()}
    found = {
        "exit_codes": codes,
        "task_codes": state.task_codes,
        "failures": _listed(state, "failures"),
        "tails": {node: answer["tail"] for node, answer in answers.items() if answer.get("tail")},
        "stopped": [node for node, answer in answers.items() if answer.get("stopped")],
        "lingering": _listed(state, "lingering"),
        "vanished": _listed(state, "vanished"),
    }
    if found["failures"]:  # else nobody asks who ended first
        found["left"] = _listed(state, "left")
    return found


def _listed(state: State, key: str) -> list[Any]:
    return [one for answer in state.answers.values() for one in answer.get(key, [])]


def _notes(state: State) -> list[str]:
    """What a user should know of a job that went well otherwise."""
    alone, world = _listed(state, "alone"), int(state.result["world_size"])
    if world < 2 or not alone or _listed(state, "joined"):
        return []
    return [
        f"no rank joined a process group of torch.distributed: each of the {world} ranks ran by "
        "itself; if they were to train together, the program has to call "
        "torch.distributed.init_process_group (Hugging Face's Trainer and Accelerate do so where "
        "they take the run for a distributed one)"
    ]


def _clean(state: State) -> None:
    """Remove environments that nobody uses."""
    state.ask("clean", lambda node: {})
    state.fail_if_any()
