"""AG News on four real hosts over ssh, with the real stack: trained, brought home, cleaned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import until
from tests.support.provoking import Said
from tests.support.ssh_hosts import SshHosts
from tests.support.torch_project import SETTINGS, TorchProject

pytestmark = [pytest.mark.slow, pytest.mark.network]

ALL = ("--hosts", "node[01-04]", "--nodes", "4", "--nproc-per-node", "1")
SHORT = ("--subset", "600", "--epochs", "1")
"""A few steps: how well it learns is looked at on Slurm and on one machine."""


@dataclass(frozen=True)
class Training:
    """A project that no host sees, and the hosts."""

    hosts: SshHosts
    root: Path
    """Its folder."""
    data: Path
    """The folder of AG News, which every host sees."""
    logs: Path
    """Where the logs of its jobs go."""

    def command(self) -> list[str]:
        """The command line of a training."""
        argv = ["run", *ALL, "--transfer", "relay", "--log-dir", str(self.logs)]
        argv += ["--", "-m", "trainer", "tiny-bert", "--out", "out"]
        argv += ["--data", str(self.data / "ag_news.csv"), "--held-out", "1000"]
        return [*argv, "--vocab", str(self.data / "bert_uncased_vocab.txt")]

    def clean(self) -> Said:
        """Take the environments off the hosts: gigabytes of memory."""
        return self.hosts.stager("clean", "--nodes-only", "--all", *ALL[:4], folder=self.root)


@pytest.fixture
def training(
    hosts: SshHosts,
    torch_project: TorchProject,
    data_dir: Path,
    own_place: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Training]:
    """The settings of the acceptance tests under Slurm and on one machine, and outputs."""
    for name, value in torch_project.env.items():
        if name not in ("PATH", "STAGER_NODE_ROOT"):
            monkeypatch.setenv(name, value)
    root = hosts.hidden / "training"
    if not root.exists():
        root.mkdir()
        (root / "stager.toml").write_text(f'[project]\noutputs = ["out"]\n{SETTINGS}')
        (root / "pylock.toml").write_bytes((torch_project.root / "pylock.toml").read_bytes())
        built = hosts.stager("build", "--offline", "--no-prove", folder=root, timeout=600)
        assert built.code == 0, built.talk
    made = Training(hosts, root, data_dir, tmp_path)
    yield made
    made.clean()


@pytest.mark.full
def test_ag_news_trained_on_four_hosts_comes_home(training: Training) -> None:
    hosts, root = training.hosts, training.root
    ran = hosts.end(hosts.start(*training.command(), *SHORT, folder=root), timeout=600)
    assert ran.code == 0, ran.talk
    assert ran.report["world_size"] == 4
    assert ran.report["nodes"] == list(hosts.nodes)
    metrics = json.loads((root / "out" / "metrics.json").read_text())
    assert metrics["world_size"] == 4
    logs = [path.read_text() for path in training.logs.glob("*.node0*.out")]
    named = sorted(line for log in logs for line in re.findall(r"^\[RANK \d\].*", log, re.M))
    assert named == [f"[RANK {rank}] WORLD_SIZE=4" for rank in range(4)]
    [events] = training.logs.glob("events.*.jsonl")
    told = [json.loads(line) for line in events.read_text().splitlines()]
    [plan] = [event for event in told if event["event"] == "plan"]
    assert [group["how"] for group in plan["groups"]] == ["relay"]
    cleaned = training.clean()
    assert cleaned.code == 0, cleaned.talk
    for node in hosts.nodes:
        assert hosts.on(node, "sh", "-c", "ls -d /tmp/*/envs/*", check=False) == ""


@pytest.mark.full
def test_a_host_that_is_lost_while_it_trains(training: Training) -> None:
    hosts = training.hosts
    started = hosts.start(*training.command(), "--epochs", "90", folder=training.root)

    def learns() -> bool:
        logs = [log.read_text() for log in training.logs.glob("*.node01.*.out")]
        return started.poll() is not None or any("step 10/" in text for text in logs)

    try:
        assert until(learns, 900)
        assert started.poll() is None, hosts.end(started).talk
        hosts.lose("node03")
        done = hosts.end(started)
    finally:
        hosts.restore()
    assert done.code == 3, done.talk
    assert done.report["first_failure"]["node"] == "node03", done.talk
    assert until(lambda: not any(hosts.agents(node) for node in ("node01", "node02", "node04")))
