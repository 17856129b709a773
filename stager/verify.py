"""Taking a job to the far side and gathering what comes back: behind ``verify`` and ``run``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundle.job import Job
from bundle.problem import Problem

from .build import offline_root
from .bundling.bundles import node_program
from .config import Config
from .diagnose import FirstFailure, first_failure
from .errors import JobError
from .run import become, stream
from .store import Store

OnEvent = Callable[[Mapping[str, Any]], None]


@dataclass(kw_only=True)
class Outcome:
    """What became of a job."""

    job: Job
    """The job."""
    result: dict[str, Any] = field(default_factory=dict)
    """The driver's last event; empty when it ended without one."""
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each node's answer to the probe."""
    bundle: Path
    """The bundle that was used."""

    @property
    def ok(self) -> bool:
        """Whether every node did its part."""
        return bool(self.result.get("ok"))

    @property
    def interrupted(self) -> bool:
        """Whether it was ended by Ctrl-C or a signal."""
        return bool(self.result.get("interrupted"))

    @property
    def problems(self) -> dict[str, list[Problem]]:
        """What is wrong, by node."""
        listed = self.result.get("problems", {})
        return {node: [Problem.from_json(raw) for raw in raws] for node, raws in listed.items()}

    @property
    def first_failure(self) -> FirstFailure | None:
        """What went wrong first."""
        return None if self.ok or self.interrupted else first_failure(self.result)


def carry_out(job: Job, config: Config, bundle: Path, on_event: OnEvent) -> Outcome:
    """Start the driver and follow it to its end.

    Args:
        job: what to do.
        config: the project's settings; its store keeps the node program.
        bundle: the bundle that the job uses.
        on_event: called with each event as it comes.

    Raises:
        JobError: the driver ended without a result.
        BundleError: the bundle is damaged.
    """
    program = node_program(bundle, Store(offline_root(config)))
    file = Path(job.log_dir) / f"job.{job.id}.json"
    file.write_text(json.dumps(job.to_json(), indent=1) + "\n", encoding="utf-8")
    outcome = Outcome(job=job, bundle=bundle)
    stray: list[str] = []

    def take(line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            stray.append(line)
            return
        if event.get("event") == "result":
            outcome.result = event
        elif event.get("event") == "probe":
            outcome.probes[event["node"]] = event
        on_event(event)

    code = stream([sys.executable, "-I", "-S", str(program), "drive", str(file)], take)
    if not outcome.result:
        raise JobError(
            f"job {job.id} ended without a result (exit status {code})",
            hint=f"see what is above, and the logs in {job.log_dir}",
            context=stray[-15:],
        )
    return outcome


def execute(config: Config, bundle: Path, command: Sequence[str]) -> None:
    """Become a command in the environment of a bundle, unpacked on this machine if need be.

    Raises:
        StagerError: it cannot be started.
    """
    program = node_program(bundle, Store(offline_root(config)))
    hint = getattr(sys, "_base_executable", sys.executable)
    argv = [sys.executable, "-I", "-S", str(program), "exec", "--python", hint]
    become([*argv, str(bundle), config.cluster.node_root, "--", *command])


def verify_report(outcome: Outcome) -> dict[str, Any]:
    """The JSON object of ``stager verify``."""
    return {
        "ok": outcome.ok,
        "bundle": str(outcome.bundle),
        "job_id": outcome.job.id,
        "nodes": [_node_report(outcome, node) for node in outcome.job.nodes],
        "log_dir": outcome.job.log_dir,
        "seconds": outcome.result["seconds"],
    }


def run_report(outcome: Outcome) -> dict[str, Any]:
    """The JSON object of ``stager run``."""
    failure = outcome.first_failure
    return {
        "ok": outcome.ok,
        "job_id": outcome.job.id,
        "bundle": str(outcome.bundle),
        "nodes": list(outcome.job.nodes),
        "world_size": outcome.result.get("world_size"),
        "launcher": outcome.job.launch.launcher,
        "backend": outcome.result.get("backend"),
        "exit_codes": outcome.result.get("exit_codes", {}),
        "log_dir": outcome.job.log_dir,
        "bytes_broadcast": outcome.result["bytes_broadcast"],
        "seconds": outcome.result["seconds"],
        "first_failure": None if failure is None else failure.to_json(),
    }


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
