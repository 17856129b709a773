"""A training that is killed and run again, on nodes that do not see the home: it resumes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.torch_project import SETTINGS, STAGER, TorchProject

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.network]

HUGGING_FACE = """\
import os, signal
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from trainer.engine.checkpoints import register_safe_types

register_safe_types()  # accelerate names the CPU cpu:0 for several ranks, which torch.load refuses

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

class Fault(TrainerCallback):
    def on_train_begin(self, args, state, control, **more):
        print("begins after step", state.global_step, flush=True)

    def on_step_end(self, args, state, control, **more):
        if state.global_step == 6 and os.environ["RANK"] == "1" and last is None:
            os.kill(os.getpid(), signal.SIGKILL)

data = [{"x": torch.randn(4), "labels": number % 2} for number in range(64)]
last = get_last_checkpoint("out") if os.path.isdir("out") else None
settings = TrainingArguments(
    "out", max_steps=8, save_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True
)
Trainer(Model(), settings, train_dataset=data, callbacks=[Fault()]).train(
    resume_from_checkpoint=last
)
"""
SHARDED = """\
import os, pathlib, signal
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
state = {"step": 0, "weights": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
saved = sorted(pathlib.Path("out").glob("step-*/.metadata"))
if saved:
    dcp.load(state, checkpoint_id=saved[-1].parent)
print("begins after step", state["step"], flush=True)
while state["step"] < 4:
    state["step"] += 1
    state["weights"] += 1
    dcp.save(state, checkpoint_id=f"out/step-{state['step']}")
    if state["step"] == 2 and not saved and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print("sum of weights", state["weights"].full_tensor().sum().item(), flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class AtHome:
    """A project in a home that the nodes do not see."""

    root: Path
    env: dict[str, str]

    def stager(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, JSON and talk of a command."""
        done = subprocess.run(
            [STAGER, arguments[0], "--json", *arguments[1:]],
            cwd=self.root, env=self.env, capture_output=True, text=True, timeout=1000, check=False,
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout or "{}"), done.stderr

    def run(self, launcher: str, *command: str) -> tuple[int, dict[str, Any], str, str]:
        """Exit code, JSON, ranks' logs and talk of a job of two ranks on two nodes."""
        options = ("--nodes", "2", "--nproc-per-node", "1", "--launcher", launcher)
        logs = ("--log-dir", str(self.root.parent / "logs"))
        code, report, talk = self.stager("run", *options, *logs, "--", *command)
        files = (self.root.parent / "logs").glob(f"*.{report.get('job_id')}.node*.out")
        return code, report, "".join(path.read_text() for path in files), talk

    def outputs(self) -> list[str]:
        """What is at home of ``out`` and its numbered copies."""
        return sorted(path.name for path in self.root.glob("out*"))


def built(root: Path, torch_project: TorchProject, cluster: Cluster) -> AtHome:
    """Build the project in a folder from the lock and the layers of the other tests with torch."""
    kept = {k: v for k, v in torch_project.env.items() if k != "STAGER_NODE_ROOT"}
    home = AtHome(root, {**kept, **cluster.env})
    home.root.mkdir(parents=True)
    (home.root / "stager.toml").write_text(f'[project]\noutputs = ["out"]\n{SETTINGS}')
    (home.root / "pylock.toml").write_bytes((torch_project.root / "pylock.toml").read_bytes())
    for name, text in (("hf.py", HUGGING_FACE), ("dcp.py", SHARDED)):
        (home.root / name).write_text(text)
    code, _, talk = home.stager("build", "--offline", "--no-prove")
    assert code == 0, talk
    return home


@pytest.fixture(scope="module")
def at_home(veiled: Cluster, private_home: Path, torch_project: TorchProject) -> Iterator[AtHome]:
    """The project in a home that the nodes do not see."""
    home = built(private_home / "training" / "project", torch_project, veiled)
    for node in veiled.nodes:
        assert veiled.on(node, ["ls", str(private_home)]).stdout == ""
    yield home
    home.stager("clean", "--nodes-only", "--all", "--nodes", "3")  # gigabytes of memory
    shutil.rmtree(home.root.parent)


@pytest.fixture
def shared_home(at_home: AtHome, veiled: Cluster, torch_project: TorchProject) -> AtHome:
    """The project in a folder that the nodes see; its environment is on them already."""
    return built(veiled.shared / "training" / "project", torch_project, veiled)


@pytest.fixture(autouse=True)
def no_results(at_home: AtHome) -> None:
    """Begin without results of another test."""
    for path in at_home.root.glob("out*"):
        shutil.rmtree(path)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_hugging_faces_trainer_goes_on_at_the_step_of_its_checkpoint(
    at_home: AtHome, launcher: str
) -> None:
    code, report, logs, talk = at_home.run(launcher, "hf.py")
    assert (code, report["first_failure"]["rank"]) == (3, 1), talk
    assert logs.count("begins after step 0") == 2, logs
    assert (at_home.root / "out" / "checkpoint-4").is_dir()
    code, report, logs, talk = at_home.run(launcher, "hf.py")
    assert code == 0, talk
    assert logs.count("begins after step 4") == 2, logs
    assert "sending earlier results to the nodes: out (" in talk
    assert at_home.outputs() == ["out"]
    state = json.loads((at_home.root / "out" / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["global_step"] == 8
    [collected] = report["collected"]
    assert (collected["renamed"], collected["problems"]) == ({}, [])
    assert (at_home.root / "out" / "checkpoint-8" / "rng_state_1.pth").is_file(), collected


@pytest.mark.parametrize("home", ["at_home", "shared_home"])
def test_a_checkpoint_that_each_node_has_written_a_part_of(
    home: str, request: pytest.FixtureRequest
) -> None:
    project: AtHome = request.getfixturevalue(home)
    code, report, logs, talk = project.run("torchrun", "dcp.py")
    assert (code, report["first_failure"]["rank"]) == (3, 1), talk
    assert logs.count("begins after step 0") == 2, logs
    code, report, logs, talk = project.run("torchrun", "dcp.py")
    assert code == 0, talk
    assert logs.count("begins after step 2") == 2, logs
    assert logs.count("sum of weights 32.0") == 2, logs
    assert project.outputs() == ["out"]
    shards = {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for step in (1, 2, 3, 4):
        assert {*os.listdir(project.root / "out" / f"step-{step}")} == shards
    others = [collected["others"] for collected in report["collected"]]
    assert others == ([["node02"]] if home == "at_home" else [])
