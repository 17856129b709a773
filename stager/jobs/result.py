"""The outcome of a job, as its events come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bundle.protocol.job import Job
from bundle.protocol.problem import Problem

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
    result: dict[str, Any] = field(default_factory=dict)
    """The driver's last event; empty when it ended without one."""
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each node's answer to the probe."""
    plan: dict[str, Any] = field(default_factory=dict)
    """The plan of the transfer, with the reason."""
    collected: list[dict[str, Any]] = field(default_factory=list)
    """Results that were brought back."""
    before: metrics.Times = field(init=False)
    """The figures that earlier jobs have left, by the times of their files."""

    def __post_init__(self) -> None:
        """Note the figures that exist before the job."""
        self.before = metrics.times(Path(self.job.run_dir), self.job.outputs)

    @property
    def ok(self) -> bool:
        """Return whether every node did its part."""
        return bool(self.result.get("ok"))

    @property
    def interrupted(self) -> bool:
        """Return whether the user ended it; a job that Slurm ends has failed."""
        return bool(self.result.get("interrupted")) and not self.ended_by

    @property
    def ended_by(self) -> str:
        """The reason why Slurm ended it: ``time-limit``, ``cancelled``...; empty for none."""
        return str(self.result.get("ended_by") or "")

    @property
    def repaired(self) -> dict[str, Any]:
        """The damage to environments on the nodes that was repaired, by node."""
        return dict(self.result.get("repaired") or {})

    @property
    def logs_lost(self) -> list[dict[str, Any]]:
        """Output of ranks that no log has: node, rank (None where unknown), how much."""
        lost = self.result.get("logs_lost")
        return list(lost) if isinstance(lost, list) else []

    @property
    def problems(self) -> dict[str, list[Problem]]:
        """Its problems, by node."""
        listed = self.result.get("problems", {})
        return {node: [Problem.from_json(raw) for raw in raws] for node, raws in listed.items()}

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
        return [str(note) for note in self.result.get("notes", [])]

    @property
    def trained(self) -> tuple[metrics.Figures, ...]:
        """The figures that its program has written, see :func:`stager.jobs.metrics.figures`."""
        return metrics.figures(Path(self.job.run_dir), self.job.outputs, self.before)

    def take(self, event: Mapping[str, Any]) -> None:
        """Learn from one event."""
        kind = event.get("event")
        if kind == "job":
            self._begin(event)
        elif kind == "result":
            self.result = dict(event)
        elif kind == "probe":
            self.probes[event["node"]] = dict(event)
        elif kind == "plan":
            self.plan = dict(event)
        elif kind == "collected":
            self.collected.append(dict(event))

    def _begin(self, event: Mapping[str, Any]) -> None:
        """Learn the job's number and nodes; an attempt before Slurm requeued it does not count."""
        self.result = {}
        self.job = replace(
            self.job,
            id=str(event["job_id"]),
            nodes=tuple(event["nodes"]),
            log_dir=str(event.get("log_dir") or self.job.log_dir),
        )
