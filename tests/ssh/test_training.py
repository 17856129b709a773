"""AG News on four real hosts over ssh, with the real stack: trained, brought home, cleaned."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.ssh_hosts import SshHosts
from tests.support.torch_project import SETTINGS, TorchProject

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.network]

ALL = ("--hosts", "node[01-04]", "--nodes", "4")


def test_ag_news_trained_on_four_hosts_comes_home(
    hosts: SshHosts,
    torch_project: TorchProject,
    data_dir: Path,
    own_place: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few steps: how well it learns is looked at on Slurm and on one machine."""
    for name, value in torch_project.env.items():
        if name not in ("PATH", "STAGER_NODE_ROOT"):
            monkeypatch.setenv(name, value)
    root = hosts.hidden / "training"
    root.mkdir()
    (root / "stager.toml").write_text(f'[project]\noutputs = ["out"]\n{SETTINGS}')
    (root / "pylock.toml").write_bytes((torch_project.root / "pylock.toml").read_bytes())
    built = hosts.stager("build", "--offline", "--no-prove", folder=root, timeout=600)
    assert built.code == 0, built.talk
    options = (*ALL, "--nproc-per-node", "1", "--transfer", "relay", "--log-dir", str(tmp_path))
    command = ["-m", "trainer", "tiny-bert", "--out", "out", "--subset", "600", "--epochs", "1"]
    command += ["--data", str(data_dir / "ag_news.csv"), "--held-out", "1000"]
    command += ["--vocab", str(data_dir / "bert_uncased_vocab.txt")]
    try:
        ran = hosts.stager("run", *options, "--", *command, folder=root)
    finally:
        hosts.clean(ALL[1], root)  # gigabytes of memory
    assert ran.code == 0, ran.talk
    assert (ran.report["world_size"], ran.report["nodes"]) == (4, list(hosts.nodes))
    assert json.loads((root / "out" / "metrics.json").read_text())["world_size"] == 4
    logs = [path.read_text() for path in tmp_path.glob("*.node0*.out")]
    named = sorted(line for log in logs for line in re.findall(r"^\[RANK \d\].*", log, re.M))
    assert named == [f"[RANK {rank}] WORLD_SIZE=4" for rank in range(4)]
    [events] = tmp_path.glob("events.*.jsonl")
    told = [json.loads(line) for line in events.read_text().splitlines()]
    [plan] = [event for event in told if event["event"] == "plan"]
    assert [group["how"] for group in plan["groups"]] == ["relay"]
    for node in hosts.nodes:
        assert hosts.on(node, "sh", "-c", "ls -d /tmp/*/envs/*", check=False) == ""
