"""The outcome of a job: its events, its metrics, and its result for scripts and Python programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

from bundle.protocol import log_names
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Launcher, PhaseName
from bundle.protocol.events import (
    AttemptBegins,
    DeepReport,
    JobBegins,
    JobEnds,
    OutputLoss,
    OutputsCollected,
    PhaseBegins,
    Record,
    TransferPlan,
)
from bundle.protocol.job import Job
from bundle.protocol.messages import ProbeAnswer, Started
from bundle.protocol.problem import Problem
from bundle.results import patterns

from ..core.files import open_regular
from ..diagnosis.failure import Diagnosis, FirstFailure
from ..logs.job_files import list_job_files
from ..logs.job_record import JobRecord

# The program may write anything there: only a regular file is read, and of its content only finite
# numbers under ordinary names are taken.

NAME = "metrics.json"
"""The file that ``python -m trainer`` writes into its output folder, and any program may."""

_LARGEST = 1 << 16  # bytes; a longer file is a log and no summary
_NAME = re.compile(r"[\w.@/ -]{1,60}")

Times = Mapping[str, int]
"""The time each file was last written, in nanoseconds, by its path below the run directory."""


def find_output_files(run_dir: str, outputs: Sequence[str], name: str) -> list[str]:
    """Return where outputs may have a file of a name, as paths below the run directory."""
    paths: list[str] = []
    for pattern in map(patterns.split_pattern, outputs):
        if pattern is None:
            continue
        places = set() if pattern else {name}
        with suppress(ValueError, OSError):
            places |= patterns.expand_pattern(run_dir, pattern)
        end = f"/{name}"
        paths += [one if f"/{one}".endswith(end) else one + end for one in sorted(places)]
    return list(dict.fromkeys(paths))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures in one output."""

    path: Path
    metrics: dict[str, float]


def read_output_times(run_dir: Path, outputs: Sequence[str]) -> Times:
    """Return the files that exist before a job, so that they are not taken for its own."""
    written = {}
    for path in find_output_files(str(run_dir), outputs, NAME):
        with suppress(OSError, ValueError):
            written[path] = (run_dir / path).lstat().st_mtime_ns
    return written


def read_figures(run_dir: Path, outputs: Sequence[str], before: Times) -> tuple[Figures, ...]:
    """Return the figures in each output that this job has written."""
    now = read_output_times(run_dir, outputs)
    written = [run_dir / path for path in sorted(now) if before.get(path) != now[path]]
    read = [Figures(path=path.parent, metrics=_read(path)) for path in written]
    return tuple(figures for figures in read if figures.metrics)


def format_figures(figures: Figures) -> str:
    """Return the figures in a line, the best known first."""
    metrics = figures.metrics
    forms = {
        "accuracy": "accuracy {:.3g}",
        "loss": "loss {:.3g}",
        "samples_per_second": "{:,.0f} samples/s",
    }
    words = [form.format(metrics[name]) for name, form in forms.items() if name in metrics]
    others = [f"{name} {value:g}" for name, value in list(metrics.items())[:4]]
    shown = "".join(char if char.isprintable() else "?" for char in str(figures.path))
    return f"{', '.join(words or others)}: {shown}"


def _read(path: Path) -> dict[str, float]:
    """Return the numbers in a file; empty if it is not a regular file of JSON."""
    if path.is_symlink():  # it could lead anywhere
        return {}
    try:
        with open_regular(path) as file:
            data = file.read(_LARGEST + 1)
        raw = json.loads(data) if len(data) <= _LARGEST else None
    except (OSError, ValueError, RecursionError):
        return {}
    figures = raw.items() if isinstance(raw, dict) else ()
    return {name: value for name, value in figures if _NAME.fullmatch(name) and is_number(value)}


def is_number(value: object, largest: float = sys.float_info.max) -> TypeGuard[float]:
    """Return whether a value of JSON is a number that is not infinite, and no larger than this."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= largest  # NaN is not


# --- The outcome of a job, as its events come ----------------------------------------------------


@dataclass(kw_only=True)
class Outcome(JobRecord):
    """The record of a job that this command follows."""

    job: Job
    """The job; with the allocation's id and nodes as soon as they are known."""
    bundle: Path
    before: Times = field(init=False)
    """The figures that earlier jobs have left, by the times of their files."""

    def __post_init__(self) -> None:
        self.before = read_output_times(Path(self.job.run_dir), self.job.outputs)

    def take(self, record: Record) -> None:
        """Add an event; the first one has the job's number and nodes."""
        super().take(record)
        event = record.event
        if isinstance(event, JobBegins):
            log_dir = event.log_dir or self.job.log_dir
            self.job = replace(self.job, id=record.job_id, nodes=event.nodes, log_dir=log_dir)

    @property
    def end(self) -> JobEnds:
        """The driver's last event; without one, that of a job that never began."""
        return self.result or JobEnds(ok=False)

    @property
    def ok(self) -> bool:
        """Whether every node did its part."""
        return self.end.ok

    @property
    def is_interrupted(self) -> bool:
        """Whether the user ended it; a job that Slurm ends has failed."""
        return self.end.interrupted and not self.end_reason

    @property
    def end_reason(self) -> str:
        """The reason why Slurm ended it: ``time-limit``, ``cancelled``...; empty for none."""
        return self.end.ended_by

    @property
    def problems(self) -> Mapping[str, tuple[Problem, ...]]:
        """Its problems, by node."""
        return self.end.problems

    @property
    def faulty_hosts(self) -> tuple[str, ...]:
        """The hosts with a problem that are no nodes of the job: that of the driver."""
        return tuple(host for host in self.problems if host not in self.job.nodes)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of each phase; ``launch`` ends when all nodes run ranks, and ``train`` begins."""
        spent: dict[str, float] = {}
        waited = self._find_launch_seconds()
        for name, seconds in self.end.seconds.items():
            spent[name] = seconds
            if name == PhaseName.LAUNCH.value and waited is not None:
                spent[name] = min(max(waited, 0.0), seconds)
                spent["train"] = seconds - spent[name]
        return spent

    def _find_launch_seconds(self) -> float | None:
        begun: float | None = None
        started: dict[str, float] = {}
        for record in self.records:
            if isinstance(record.event, PhaseBegins) and record.event.phase is PhaseName.LAUNCH:
                begun, started = record.time, {}
            elif isinstance(record.event, Started) and record.time is not None:
                started.setdefault(record.event.node, record.time)
        return None if begun is None or not started else max(started.values()) - begun

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """Its diagnosis, made once when it has ended; None for a job that ended well."""
        if self.ok:
            return None
        # Imported only where something failed: it takes a while.
        from ..diagnosis.diagnosis import diagnose

        return diagnose(list_job_files(Path(self.job.log_dir), self.job.id), self)

    @property
    def first_failure(self) -> FirstFailure | None:
        """The failure that came first."""
        return None if self.diagnosis is None else self.diagnosis.first

    @property
    def figures(self) -> tuple[Figures, ...]:
        """The figures that its program has written, see :func:`read_figures`."""
        return read_figures(Path(self.job.run_dir), self.job.outputs, self.before)


# --- The results of ``verify``, ``run`` and ``script`` as scripts and Python programs get them


@dataclass(frozen=True, kw_only=True)
class NodeCheck:
    """The check of one node."""

    node: str
    ok: bool
    python: str
    packages: dict[str, str | None]
    origin_ok: bool
    interface: str
    address: str
    seconds: float | None  # None if there was no check
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """What the results of ``stager verify`` and ``stager run`` share."""

    ok: bool  # every node can run the job; of a run, every rank ended well
    job_id: str
    bundle: Path
    id: str
    log_dir: Path
    seconds: dict[str, float]
    send_seconds: float | None  # for sending files, a part of the phase ``unpack``; None for none
    unpack_seconds: float | None  # the longest of a node, without its wait for bytes; None for none
    bytes_broadcast: int
    left_out: tuple[str, ...]
    ended_by: str
    plan: TransferPlan | None
    repaired: dict[str, Problem]


@dataclass(frozen=True, kw_only=True)
class VerifyResult(JobResult):
    """The result of ``stager verify``."""

    nodes: tuple[NodeCheck, ...]
    host_problems: dict[str, tuple[str, ...]]  # of a host that is no node: where the driver ran
    deep: DeepReport | None  # what ``--deep`` found and measured; None without it


@dataclass(frozen=True, kw_only=True)
class RunResult(JobResult):
    """The result of ``stager run``."""

    nodes: tuple[str, ...]  # in the order of their ranks
    world_size: int | None  # None if no ranks were started
    launcher: Launcher
    backend: str | None  # ``gloo`` or ``nccl``; None if no ranks were started
    exit_codes: dict[str, int]
    first_failure: FirstFailure | None  # that the others follow from; None if the job ended well
    consequences: tuple[int, ...]
    restarts: tuple[AttemptBegins, ...]  # further starts of the ranks, each with the failure before
    task_codes: dict[str, int]  # the exit status of each task of the launch, by its number
    collected: tuple[OutputsCollected, ...]
    trained: tuple[Figures, ...]
    logs_lost: tuple[OutputLoss, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A batch job that Slurm has accepted: the result of ``--batch`` without ``--wait``."""

    ok: bool = True
    submitted: bool = True
    job_id: str
    log_dir: Path
    log: Path
    events: Path


@dataclass(frozen=True, kw_only=True)
class ScriptResult:
    """The result of ``stager script``."""

    script: str


def make_submitted_job(job: Job, number: str) -> SubmittedJob:
    """Return a batch job under the number that Slurm has given it."""
    log_dir = Path(job.log_dir)
    return SubmittedJob(
        job_id=number,
        log_dir=log_dir,
        log=log_dir / log_names.make_batch_log_name(job.name, number),
        events=log_dir / log_names.make_events_name(number),
    )


def _make_job_result(outcome: Outcome) -> JobResult:
    end = outcome.end
    return JobResult(
        ok=outcome.ok,
        job_id=outcome.job.id,
        bundle=outcome.bundle,
        id=outcome.job.bundle_id,
        log_dir=Path(outcome.job.log_dir),
        seconds=end.seconds,
        send_seconds=end.send_seconds,
        unpack_seconds=end.unpack_seconds,
        bytes_broadcast=end.bytes_broadcast,
        left_out=end.left_out,
        ended_by=end.ended_by,
        plan=outcome.plan,
        repaired=end.repaired or {},
    )


def make_verify_result(outcome: Outcome) -> VerifyResult:
    """Return the result of ``stager verify``."""
    return VerifyResult(
        **vars(_make_job_result(outcome)),
        nodes=tuple(_check_node(outcome, node) for node in outcome.job.nodes),
        host_problems={
            host: tuple(map(str, outcome.problems[host])) for host in outcome.faulty_hosts
        },
        deep=outcome.end.deep,
    )


def make_run_result(outcome: Outcome) -> RunResult:
    """Return the result of ``stager run``."""
    diagnosis, end = outcome.diagnosis, outcome.end
    return RunResult(
        **vars(_make_job_result(outcome)),
        nodes=outcome.job.nodes,
        world_size=end.world_size,
        launcher=outcome.job.launch.launcher,
        backend=end.backend,
        exit_codes=end.exit_codes or {},
        first_failure=outcome.first_failure,
        consequences=() if diagnosis is None else diagnosis.consequences,
        restarts=outcome.restarts,
        task_codes=end.task_codes or {},
        collected=tuple(outcome.find_events(OutputsCollected)),
        trained=outcome.figures,
        logs_lost=end.logs_lost,
        notes=end.notes or (),
    )


def _check_node(outcome: Outcome, node: str) -> NodeCheck:
    checked, problems = outcome.probes.get(node), outcome.problems.get(node, ())
    probe = checked or ProbeAnswer(node=node, ok=False)
    return NodeCheck(
        node=node,
        ok=probe.ok and not problems,
        python=probe.python,
        packages=probe.packages,
        origin_ok=probe.origin_ok,
        interface=probe.interface,
        address=probe.address,
        seconds=checked.seconds if checked else None,
        problems=tuple(map(str, problems)),
    )
