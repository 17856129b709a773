"""The outcome of a job, as its events come, and the reports about it for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bundle.protocol.answers import ProbeAnswer
from bundle.protocol.codec import encode
from bundle.protocol.events import JobBegins, JobEnds, OutputLoss, OutputsCollected, TransferPlan
from bundle.protocol.job import Job
from bundle.protocol.problem import Problem
from bundle.protocol.records import Record

from ..diagnosis.failure import Diagnosis, FirstFailure
from ..logs.files import of_job
from . import metrics


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a job."""

    job: Job
    """The job; with the allocation's id and nodes as soon as they are known."""
    bundle: Path
    """The bundle that was used."""
    result: JobEnds | None = None
    """The driver's last event; None when it ended without one."""
    probes: dict[str, ProbeAnswer] = field(default_factory=dict)
    """Each node's answer to the probe."""
    plan: TransferPlan | None = None
    """The plan of the transfer, with the reason; None where there was none."""
    collected: list[OutputsCollected] = field(default_factory=list)
    """Results that were brought back."""
    before: metrics.Times = field(init=False)
    """The figures that earlier jobs have left, by the times of their files."""

    def __post_init__(self) -> None:
        """Note the figures that exist before the job."""
        self.before = metrics.times(Path(self.job.run_dir), self.job.outputs)

    @property
    def ok(self) -> bool:
        """Return whether every node did its part."""
        return self.ending.ok

    @property
    def ending(self) -> JobEnds:
        """The driver's last event; without one, that of a job that never began."""
        return self.result or JobEnds(ok=False)

    @property
    def interrupted(self) -> bool:
        """Return whether the user ended it; a job that Slurm ends has failed."""
        return self.ending.interrupted and not self.ended_by

    @property
    def ended_by(self) -> str:
        """The reason why Slurm ended it: ``time-limit``, ``cancelled``...; empty for none."""
        return self.ending.ended_by

    @property
    def repaired(self) -> Mapping[str, Problem]:
        """The damage to environments on the nodes that was repaired, by node."""
        return self.ending.repaired or {}

    @property
    def logs_lost(self) -> tuple[OutputLoss, ...]:
        """Output of ranks that no log has."""
        return self.ending.logs_lost

    @property
    def problems(self) -> Mapping[str, tuple[Problem, ...]]:
        """Its problems, by node."""
        return self.ending.problems

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """Its diagnosis, made once when it has ended; None for a job that ended well.

        For a job that its user ended this is what had failed before.
        """
        if self.ok:
            return None
        # Imported only where something failed: it takes a while.
        from ..diagnosis.diagnose import diagnose

        files = of_job(Path(self.job.log_dir), self.job.id)
        return diagnose(files, self.result)

    @property
    def first_failure(self) -> FirstFailure | None:
        """The failure that came first."""
        return None if self.diagnosis is None else self.diagnosis.first

    @property
    def notes(self) -> list[str]:
        """Notes for its user though nothing failed."""
        return list(self.ending.notes or ())

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The figures that its program has written, see :func:`stager.jobs.metrics.figures`."""
        return metrics.figures(Path(self.job.run_dir), self.job.outputs, self.before)

    def take(self, record: Record) -> None:
        """Learn from one event."""
        event = record.event
        if isinstance(event, JobBegins):
            self._begin(event, record.job_id)
        elif isinstance(event, JobEnds):
            self.result = event
        elif isinstance(event, ProbeAnswer):
            self.probes[event.node] = event
        elif isinstance(event, TransferPlan):
            self.plan = event
        elif isinstance(event, OutputsCollected):
            self.collected.append(event)

    def _begin(self, event: JobBegins, job_id: str) -> None:
        """Learn the job's number and nodes; an attempt before Slurm requeued it does not count."""
        self.result = None
        self.job = replace(
            self.job,
            id=job_id,
            nodes=event.nodes,
            log_dir=event.log_dir or self.job.log_dir,
        )


def verify_report(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of ``stager verify``."""
    return {
        "ok": outcome.ok,
        "bundle": str(outcome.bundle),
        "id": outcome.job.bundle_id,
        "job_id": outcome.job.id,
        "nodes": [_node_report(outcome, node) for node in outcome.job.nodes],
        "log_dir": outcome.job.log_dir,
        "seconds": outcome.ending.seconds,
        "left_out": list(outcome.ending.left_out),
        "ended_by": outcome.ended_by,
        "bytes_broadcast": outcome.ending.bytes_broadcast,
        "plan": _plan_report(outcome),
        "deep": None if outcome.ending.deep is None else encode(outcome.ending.deep, short=True),
        "repaired": _repaired(outcome),
    }


def run_report(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of ``stager run``."""
    failure = outcome.first_failure
    return {
        "ok": outcome.ok,
        "job_id": outcome.job.id,
        "bundle": str(outcome.bundle),
        "id": outcome.job.bundle_id,
        "nodes": list(outcome.job.nodes),
        "world_size": outcome.ending.world_size,
        "launcher": outcome.job.launch.launcher,
        "backend": outcome.ending.backend,
        "exit_codes": outcome.ending.exit_codes or {},
        "log_dir": outcome.job.log_dir,
        "bytes_broadcast": outcome.ending.bytes_broadcast,
        "seconds": outcome.ending.seconds,
        "first_failure": None if failure is None else failure.to_json(),
        "consequences": list(outcome.diagnosis.consequences) if outcome.diagnosis else [],
        "task_codes": outcome.ending.task_codes or {},
        "left_out": list(outcome.ending.left_out),
        "ended_by": outcome.ended_by,
        "collected": [encode(event, short=True) for event in outcome.collected],
        "plan": _plan_report(outcome),
        "trained": outcome.trained,
        "logs_lost": [encode(loss, short=True) for loss in outcome.logs_lost],
        "notes": outcome.notes,
        "repaired": _repaired(outcome),
    }


def _repaired(outcome: Outcome) -> dict[str, Any]:
    """Return the damage that was repaired, by node."""
    return {node: problem.to_json() for node, problem in outcome.repaired.items()}


def _plan_report(outcome: Outcome) -> dict[str, Any] | None:
    """Return the plan of the transfer; None where there was none."""
    plan = outcome.plan or outcome.ending.plan
    return None if plan is None else encode(plan, short=True)


def _node_report(outcome: Outcome, node: str) -> dict[str, Any]:
    probe = outcome.probes.get(node)
    problems = outcome.problems.get(node, ())
    return {
        "node": node,
        "ok": probe is not None and probe.ok and not problems,
        "python": probe.python if probe else "",
        "packages": probe.packages if probe else {},
        "origin_ok": probe is not None and probe.origin_ok,
        "interface": probe.interface if probe else "",
        "address": probe.address if probe else "",
        "seconds": probe.seconds if probe else None,
        "problems": [str(problem) for problem in problems],
    }
