"""The results of ``verify``, ``run`` and ``script`` as scripts and Python programs get them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bundle.protocol import log_names
from bundle.protocol.enumerations import Launcher
from bundle.protocol.events import DeepReport, OutputLoss, OutputsCollected, TransferPlan
from bundle.protocol.job import Job
from bundle.protocol.problem import Problem

from ..diagnosis.failure import FirstFailure
from .metrics import Figures
from .outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class NodeCheck:
    """The check of one node."""

    node: str
    """The node."""
    ok: bool
    """True if the environment works there."""
    python: str
    """The version of Python; empty if it was not reached."""
    packages: dict[str, str | None]
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
    host_problems: dict[str, tuple[str, ...]]
    """The problems, in words, of a host that is no node: where the driver ran."""
    seconds: dict[str, float]
    """Duration of each phase."""
    send_seconds: float | None
    """Time in which files were sent, a part of the phase ``unpack``; None if none was."""
    unpack_seconds: float | None
    """The longest unpacking of a node, without its wait for bytes; None if none unpacked."""
    left_out: tuple[str, ...]
    """Nodes that the job went on without."""
    ended_by: str
    """The reason why Slurm ended the job; empty for none."""
    bytes_broadcast: int
    """Bytes sent to the nodes."""
    plan: TransferPlan | None
    """The plan of the transfer; None where there was none."""
    deep: DeepReport | None
    """What ``--deep`` found and measured; None without it."""
    repaired: dict[str, Problem]
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
    exit_codes: dict[str, int]
    """The exit status of the ranks of each node."""
    log_dir: Path
    """The directory of the logs."""
    bytes_broadcast: int
    """Bytes sent to the nodes."""
    seconds: dict[str, float]
    """Duration of each phase."""
    send_seconds: float | None
    """Time in which files were sent, a part of the phase ``unpack``; None if none was."""
    unpack_seconds: float | None
    """The longest unpacking of a node, without its wait for bytes; None if none unpacked."""
    first_failure: FirstFailure | None
    """The failure that the others follow from; None if the job ended well."""
    consequences: tuple[int, ...]
    """Ranks that failed because of it."""
    task_codes: dict[str, int]
    """The exit status of each task of the launch, by its number."""
    left_out: tuple[str, ...]
    """Nodes that the job went on without."""
    ended_by: str
    """The reason why Slurm ended the job; empty for none."""
    collected: tuple[OutputsCollected, ...]
    """Results that were brought back."""
    plan: TransferPlan | None
    """The plan of the transfer; None where there was none."""
    trained: tuple[Figures, ...]
    """The figures that the program has written into its outputs."""
    logs_lost: tuple[OutputLoss, ...]
    """Output of ranks that is in no log."""
    notes: tuple[str, ...]
    """Notes for the user, though nothing failed."""
    repaired: dict[str, Problem]
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
        log=log_dir / log_names.batch_log(job.name, number),
        events=log_dir / log_names.events(number),
    )


def verify_result(outcome: Outcome) -> VerifyResult:
    """Return the result of ``stager verify``."""
    ending = outcome.ending
    return VerifyResult(
        ok=outcome.ok,
        bundle=outcome.bundle,
        id=outcome.job.bundle_id,
        job_id=outcome.job.id,
        nodes=tuple(_node_check(outcome, node) for node in outcome.job.nodes),
        log_dir=Path(outcome.job.log_dir),
        host_problems={
            host: tuple(map(str, outcome.problems[host])) for host in outcome.faulty_hosts
        },
        seconds=ending.seconds,
        send_seconds=ending.send_seconds,
        unpack_seconds=ending.unpack_seconds,
        left_out=ending.left_out,
        ended_by=ending.ended_by,
        bytes_broadcast=ending.bytes_broadcast,
        plan=outcome.plan or ending.plan,
        deep=ending.deep,
        repaired=dict(outcome.repaired),
    )


def run_result(outcome: Outcome) -> RunResult:
    """Return the result of ``stager run``."""
    diagnosis, ending = outcome.diagnosis, outcome.ending
    return RunResult(
        ok=outcome.ok,
        job_id=outcome.job.id,
        bundle=outcome.bundle,
        id=outcome.job.bundle_id,
        nodes=outcome.job.nodes,
        world_size=ending.world_size,
        launcher=outcome.job.launch.launcher,
        backend=ending.backend,
        exit_codes=ending.exit_codes or {},
        log_dir=Path(outcome.job.log_dir),
        bytes_broadcast=ending.bytes_broadcast,
        seconds=ending.seconds,
        send_seconds=ending.send_seconds,
        unpack_seconds=ending.unpack_seconds,
        first_failure=None if diagnosis is None else diagnosis.first,
        consequences=() if diagnosis is None else diagnosis.consequences,
        task_codes=ending.task_codes or {},
        left_out=ending.left_out,
        ended_by=ending.ended_by,
        collected=tuple(outcome.collected),
        plan=outcome.plan or ending.plan,
        trained=outcome.trained,
        logs_lost=outcome.logs_lost,
        notes=tuple(outcome.notes),
        repaired=dict(outcome.repaired),
    )


def _node_check(outcome: Outcome, node: str) -> NodeCheck:
    probe = outcome.probes.get(node)
    problems = outcome.problems.get(node, ())
    return NodeCheck(
        node=node,
        ok=probe is not None and probe.ok and not problems,
        python=probe.python if probe else "",
        packages=probe.packages if probe else {},
        origin_ok=probe is not None and probe.origin_ok,
        interface=probe.interface if probe else "",
        address=probe.address if probe else "",
        seconds=probe.seconds if probe else None,
        problems=tuple(str(problem) for problem in problems),
    )
