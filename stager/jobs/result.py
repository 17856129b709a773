"""The outcome of a job, as its events come, and the reports about it for scripts."""

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

_ENVELOPE = ("v", "event", "job_id", "time", "phase")
"""The keys of every event, which no report repeats."""


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
    def trained(self) -> list[dict[str, Any]]:
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


def verify_report(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of ``stager verify``."""
    return {
        "ok": outcome.ok,
        "bundle": str(outcome.bundle),
        "id": outcome.job.bundle_id,
        "job_id": outcome.job.id,
        "nodes": [_node_report(outcome, node) for node in outcome.job.nodes],
        "log_dir": outcome.job.log_dir,
        "seconds": outcome.result["seconds"],
        "left_out": list(outcome.result.get("left_out", [])),
        "ended_by": outcome.ended_by,
        "bytes_broadcast": outcome.result["bytes_broadcast"],
        "plan": _plan_report(outcome),
        "deep": outcome.result.get("deep"),
        "repaired": outcome.repaired,
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
        "world_size": outcome.result.get("world_size"),
        "launcher": outcome.job.launch.launcher,
        "backend": outcome.result.get("backend"),
        "exit_codes": outcome.result.get("exit_codes", {}),
        "log_dir": outcome.job.log_dir,
        "bytes_broadcast": outcome.result["bytes_broadcast"],
        "seconds": outcome.result["seconds"],
        "first_failure": None if failure is None else failure.to_json(),
        "consequences": list(outcome.diagnosis.consequences) if outcome.diagnosis else [],
        "task_codes": outcome.result.get("task_codes", {}),
        "left_out": list(outcome.result.get("left_out", [])),
        "ended_by": outcome.ended_by,
        "collected": [_bare(event) for event in outcome.collected],
        "plan": _plan_report(outcome),
        "trained": outcome.trained,
        "logs_lost": outcome.logs_lost,
        "notes": outcome.notes,
        "repaired": outcome.repaired,
    }


def _plan_report(outcome: Outcome) -> dict[str, Any] | None:
    """Return the plan of the transfer; None where there was none."""
    plan = outcome.plan or outcome.result.get("plan")
    return _bare(plan) if plan else None


def _bare(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event without the keys of every event."""
    return {key: value for key, value in event.items() if key not in _ENVELOPE}


def _node_report(outcome: Outcome, node: str) -> dict[str, Any]:
    probe = outcome.probes.get(node, {})
    problems = outcome.problems.get(node, [])
    return {
        "node": node,
        "ok": bool(probe.get("ok")) and not problems,
        "python": probe.get("python", ""),
        "packages": probe.get("packages", {}),
        "origin_ok": bool(probe.get("origin_ok")),
        "interface": probe.get("interface", ""),
        "address": probe.get("address", ""),
        "seconds": probe.get("seconds"),
        "problems": [str(problem) for problem in problems],
    }
