"""The outcome of a job, as its events come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from bundle.protocol.enumerations import PhaseName
from bundle.protocol.events import (
    Event,
    JobBegins,
    JobEnds,
    OutputLoss,
    OutputsCollected,
    PhaseBegins,
    Record,
    TransferPlan,
)
from bundle.protocol.job import Job
from bundle.protocol.messages import ProbeAnswer
from bundle.protocol.problem import Problem
from bundle.protocol.reports import Started

from ..diagnosis.failure import Diagnosis, FirstFailure
from ..logs.job_files import of_job
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
    launch_begun: float | None = None
    """When the launch began, by the driver's clock; None where it did not."""
    started: dict[str, float] = field(default_factory=dict)
    """When each node started its ranks, by the same clock."""
    before: metrics.Times = field(init=False)
    """The figures that earlier jobs have left, by the times of their files."""

    def __post_init__(self) -> None:
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

    @property
    def faulty_hosts(self) -> tuple[str, ...]:
        """The hosts with a problem that are no nodes of the job: that of the driver."""
        return tuple(host for host in self.problems if host not in self.job.nodes)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of each phase; ``launch`` ends as ranks run on all nodes, and ``train`` begins.

        They are one phase where the driver has not told when the ranks started.
        """
        spent: dict[str, float] = {}
        for name, seconds in self.ending.seconds.items():
            spent[name] = seconds
            if name == PhaseName.LAUNCH.value and self.launch_begun is not None and self.started:
                waited = max(self.started.values()) - self.launch_begun
                spent[name] = min(max(waited, 0.0), seconds)
                spent["train"] = seconds - spent[name]
        return spent

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """Its diagnosis, made once when it has ended; None for a job that ended well.

        For a job that its user ended this is what had failed before.
        """
        if self.ok:
            return None
        # Imported only where something failed: it takes a while.
        from ..diagnosis.diagnosis import diagnose

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
    def trained(self) -> tuple[metrics.Figures, ...]:
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
        elif record.time is not None:
            self._take_time(event, record.time)

    def _take_time(self, event: Event, time: float) -> None:
        if isinstance(event, PhaseBegins) and event.phase is PhaseName.LAUNCH:
            self.launch_begun, self.started = time, {}
        elif isinstance(event, Started):
            self.started.setdefault(event.node, time)

    def _begin(self, event: JobBegins, job_id: str) -> None:
        """Set number and nodes; forget the attempt before Slurm requeued the job."""
        self.result, self.plan = None, None
        self.probes, self.launch_begun, self.started = {}, None, {}
        self.job = replace(
            self.job,
            id=job_id,
            nodes=event.nodes,
            log_dir=event.log_dir or self.job.log_dir,
        )
