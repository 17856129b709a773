"""The results of ``verify``, ``run`` and ``script`` as scripts and Python programs get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.protocol.job import Job
from bundle.protocol.words import Launcher

from ..diagnosis.failure import FirstFailure
from .metrics import Figures
from .result import Outcome

_ENVELOPE = ("v", "event", "job_id", "time", "phase")
"""The keys of every event, which no result repeats."""


@dataclass(frozen=True, kw_only=True)
class NodeCheck:
    """The check of one node."""

    node: str
    """The node."""
    ok: bool
    """True if the environment works there."""
    python: str
    """The version of Python; empty if it was not reached."""
    packages: dict[str, str]
    """Versions of the packages that matter, by name."""
    origin_ok: bool
    """True if each of them is imported from the environment."""
    interface: str
    """The network interface that the ranks use."""
    address: str
    """The address on it."""
    seconds: float | None
    """Duration of the check; None if there was none."""
    problems: tuple[str, ...]
    """The problems, in words."""


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """The result of ``stager verify``."""

    ok: bool
    """True if every node can run the job."""
    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    job_id: str
    """The job's number."""
    nodes: tuple[NodeCheck, ...]
    """The check of each node."""
    log_dir: Path
    """The directory of the logs."""
    seconds: dict[str, float]
    """Duration of each phase."""
    left_out: tuple[str, ...]
    """Nodes that the job went on without."""
    ended_by: str
    """The reason why Slurm ended the job; empty for none."""
    bytes_broadcast: int
    """Bytes sent to the nodes."""
    plan: dict[str, object] | None
    """The plan of the transfer; None where there was none."""
    deep: dict[str, object] | None
    """What ``--deep`` found and measured; None without it."""
    repaired: dict[str, object]
    """The damage to environments that was repaired, by node."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of ``stager run``."""

    ok: bool
    """True if every rank ended well."""
    job_id: str
    """The job's number."""
    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    nodes: tuple[str, ...]
    """The nodes, in the order of their ranks."""
    world_size: int | None
    """The number of ranks; None if none were started."""
    launcher: Launcher
    """The program that started the ranks."""
    backend: str | None
    """``gloo`` or ``nccl``; None if no ranks were started."""
    exit_codes: dict[str, int | None]
    """The exit status of the ranks of each node."""
    log_dir: Path
    """The directory of the logs."""
    bytes_broadcast: int
    """Bytes sent to the nodes."""
    seconds: dict[str, float]
    """Duration of each phase."""
    first_failure: FirstFailure | None
    """The failure that the others follow from; None if the job ended well."""
    consequences: tuple[int, ...]
    """Ranks that failed because of it."""
    task_codes: dict[str, object]
    """The exit status of each task, by node, where ``srun`` starts the ranks."""
    left_out: tuple[str, ...]
    """Nodes that the job went on without."""
    ended_by: str
    """The reason why Slurm ended the job; empty for none."""
    collected: tuple[dict[str, object], ...]
    """Results that were brought back."""
    plan: dict[str, object] | None
    """The plan of the transfer; None where there was none."""
    trained: tuple[Figures, ...]
    """The figures that the program has written into its outputs."""
    logs_lost: tuple[dict[str, object], ...]
    """Output of ranks that is in no log."""
    notes: tuple[str, ...]
    """Notes for the user, though nothing failed."""
    repaired: dict[str, object]
    """The damage to environments that was repaired, by node."""


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A batch job that Slurm has accepted: the result of ``--batch`` without ``--wait``."""

    ok: bool = True
    """True: a refused job is an error."""
    submitted: bool = True
    """True."""
    job_id: str
    """Its number."""
    log_dir: Path
    """The directory of its logs."""
    log: Path
    """The log of the batch script."""
    events: Path
    """The driver's events, one in each line."""


@dataclass(frozen=True, kw_only=True)
class ScriptResult:
    """The result of ``stager script``."""

    script: str
    """The batch script."""


def submitted_job(job: Job, number: str) -> SubmittedJob:
    """Return a batch job under the number that Slurm has given it."""
    log_dir = Path(job.log_dir)
    return SubmittedJob(
        job_id=number,
        log_dir=log_dir,
        log=log_dir / f"{job.name}.{number}.batch.out",
        events=log_dir / f"events.{number}.jsonl",
    )


def verify_result(outcome: Outcome) -> VerifyResult:
    """Return the result of ``stager verify``."""
    return VerifyResult(
        ok=outcome.ok,
        bundle=outcome.bundle,
        id=outcome.job.bundle_id,
        job_id=outcome.job.id,
        nodes=tuple(_node_check(outcome, node) for node in outcome.job.nodes),
        log_dir=Path(outcome.job.log_dir),
        seconds=outcome.result["seconds"],
        left_out=tuple(outcome.result.get("left_out", [])),
        ended_by=outcome.ended_by,
        bytes_broadcast=outcome.result["bytes_broadcast"],
        plan=_plan(outcome),
        deep=outcome.result.get("deep"),
        repaired=outcome.repaired,
    )


def run_result(outcome: Outcome) -> RunResult:
    """Return the result of ``stager run``."""
    diagnosis = outcome.diagnosis
    return RunResult(
        ok=outcome.ok,
        job_id=outcome.job.id,
        bundle=outcome.bundle,
        id=outcome.job.bundle_id,
        nodes=outcome.job.nodes,
        world_size=outcome.result.get("world_size"),
        launcher=outcome.job.launch.launcher,
        backend=outcome.result.get("backend"),
        exit_codes=outcome.result.get("exit_codes", {}),
        log_dir=Path(outcome.job.log_dir),
        bytes_broadcast=outcome.result["bytes_broadcast"],
        seconds=outcome.result["seconds"],
        first_failure=None if diagnosis is None else diagnosis.first,
        consequences=() if diagnosis is None else diagnosis.consequences,
        task_codes=outcome.result.get("task_codes", {}),
        left_out=tuple(outcome.result.get("left_out", [])),
        ended_by=outcome.ended_by,
        collected=tuple(_bare(event) for event in outcome.collected),
        plan=_plan(outcome),
        trained=outcome.trained,
        logs_lost=tuple(outcome.logs_lost),
        notes=tuple(outcome.notes),
        repaired=outcome.repaired,
    )


def _plan(outcome: Outcome) -> dict[str, object] | None:
    """Return the plan of the transfer; None where there was none."""
    plan = outcome.plan or outcome.result.get("plan")
    return _bare(plan) if plan else None


def _bare(event: Mapping[str, Any]) -> dict[str, object]:
    """Return an event without the keys of every event."""
    return {key: value for key, value in event.items() if key not in _ENVELOPE}


def _node_check(outcome: Outcome, node: str) -> NodeCheck:
    """Return the check of a node, from its answer to the probe and its problems."""
    probe = outcome.probes.get(node, {})
    problems = outcome.problems.get(node, [])
    return NodeCheck(
        node=node,
        ok=bool(probe.get("ok")) and not problems,
        python=probe.get("python", ""),
        packages=probe.get("packages", {}),
        origin_ok=bool(probe.get("origin_ok")),
        interface=probe.get("interface", ""),
        address=probe.get("address", ""),
        seconds=probe.get("seconds"),
        problems=tuple(str(problem) for problem in problems),
    )
