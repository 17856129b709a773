"""Jobs on a real Slurm with the real PyTorch stack: how a test starts one and what it then sees."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.cluster import Cluster
from tests.support.torch_project import STAGER, Ran, TorchProject

PATIENCE = 1000.0  # seconds after which a job is taken to hang; on a busy machine it takes minutes


@dataclass(frozen=True, kw_only=True)
class SlurmRan(Ran):
    @property
    def id(self) -> str:
        return str(self.report["job_id"])

    def files(self) -> list[Path]:
        return list(self.logs.glob(f"*.{self.id}.node*.out"))

    def lines(self) -> list[str]:
        return [line for path in self.files() for line in path.read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        text = (self.logs / f"events.{self.id}.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return [event for event in found if event["event"] == kind]

    def ranks(self) -> list[str]:
        return sorted(line for line in self.lines() if line.startswith("[RANK "))


@dataclass(frozen=True, kw_only=True)
class SlurmTorch:
    """A built project, the cluster that its jobs run on, and a directory that all nodes see."""

    project: TorchProject  # the project; its bundle lies where all nodes see it
    cluster: Cluster
    work: Path  # where this test's jobs are started from; ``logs`` in it gets the logs

    @property
    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in self.project.env.items() if k != "STAGER_NODE_ROOT"}
        return {**kept, **self.cluster.env}

    def argv(self, action: str, *arguments: str | Path) -> list[str]:
        """The command line of a job; three nodes unless it says how many."""
        options = ["--json", "--log-dir", str(self.work / "logs")]
        options += ["--bundle", str(self.project.bundle)]
        if "--nodes" not in arguments:
            options += ["--nodes", "3"]
        return [STAGER, action, *options, *map(str, arguments)]

    def job(
        self, action: str, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> SlurmRan:
        argv, variables = self.argv(action, *arguments), {**self.env, **(env or {})}
        done = processes.run(argv, cwd=self.work, env=variables, seconds=PATIENCE)
        return SlurmRan.of(done, self.work / "logs")

    def start(self, action: str, *arguments: str | Path) -> subprocess.Popen[str]:
        return processes.start(self.argv(action, *arguments), cwd=self.work, env=self.env)

    def clean(self) -> None:
        for node in self.cluster.nodes:
            self.cluster.on(node, ["sh", "-c", "rm -rf /tmp/stager-*"])
