"""Code that ``torch.compile`` makes on one node of a real Slurm is there on all, and later."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.support.object_files import ELF
from tests.support.processes import until
from tests.support.slurm_torch import SlurmRan, SlurmTorch

pytestmark = [pytest.mark.slow, pytest.mark.network]

PRETENDS = """\
import os, pathlib, sys
import torch.distributed as dist

dist.init_process_group()
folder = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
print("found", sorted(path.name for path in folder.rglob("*.so")), flush=True)
dist.barrier()
for name in sys.argv[1:]:
    (folder / "fxgraph" / name).mkdir(parents=True)
    (folder / "fxgraph" / name / f"{name}.so").write_bytes(ELF + bytes(399_936))
dist.destroy_process_group()
""".replace("ELF", repr(ELF))
COMPILES = """\
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group()
torch.manual_seed(0)
torch.set_num_threads(1)
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
head = torch.compile(lambda x: (x * 3 if "changed" in sys.argv else x * 2).sin().mean())
model, batch = torch.compile(body), torch.randn(8, 16, 64)
for step in range(2):
    begun = time.perf_counter()
    head(model(batch)).backward()
    if dist.get_rank() == 0:
        print(f"step {step} took {time.perf_counter() - begun:.2f} s", flush=True)
dist.destroy_process_group()
"""


def run(job: SlurmTorch, program: str, nodes: str, *words: str) -> SlurmRan:
    (job.work / "script.py").write_text(program)
    count = str(nodes.count(",") + 1)
    asked = ("--nodes", count, "--nodelist", nodes, "--nproc-per-node", "1")
    ran = job.job("run", *asked, "--", "script.py", *words)
    assert ran.code == 0, ran.stderr
    return ran


def compiled(ran: SlurmRan) -> dict[str, Any]:
    [event] = ran.events("compiled")
    return event


@pytest.mark.full
def test_all_nodes_get_what_one_has_compiled(slurm_torch: SlurmTorch) -> None:
    slurm_torch.clean()
    made = compiled(run(slurm_torch, PRETENDS, "node01", "one"))
    assert (made["used_kernels"], made["new_kernels"], made["new_bytes"]) == (0, 1, 400_000)
    ran = run(slurm_torch, PRETENDS, "node01,node02,node03", "two")
    made = compiled(ran)
    assert [line for line in ran.lines() if line.startswith("found")] == ["found ['one.so']"] * 3
    assert sorted(made["sent_to"]) == ["node02", "node03"]
    assert (len(made["used_from"]), made["new_kernels"]) == (1, 1)
    ran = run(slurm_torch, PRETENDS, "node02")
    assert "found ['one.so', 'two.so']" in ran.lines()
    assert (compiled(ran)["sent_to"], compiled(ran)["new_kernels"]) == ([], 0)
    assert "compiled code of jobs" in ran.stderr


@pytest.mark.full
def test_a_long_job_keeps_what_it_has_compiled_while_it_runs(slurm_torch: SlurmTorch) -> None:
    slurm_torch.clean()
    store = slurm_torch.project.bundle.parents[1]
    for folder in store.glob("compiled-*"):
        shutil.rmtree(folder)
    program = PRETENDS + 'import time\nprint("step 1", flush=True)\ntime.sleep(600)\n'
    (slurm_torch.work / "script.py").write_text(program)
    asked = ("--nodes", "1", "--nproc-per-node", "1")
    job = slurm_torch.start("run", *asked, "--", "script.py", "one")
    try:
        until(lambda: list(store.glob("compiled-*/*/*.code")), seconds=200)
    finally:
        job.terminate()
        job.wait(60)
    made = compiled(run(slurm_torch, PRETENDS, "node03"))
    assert (made["used_kernels"], made["new_kernels"]) == (1, 0)


@pytest.mark.full
def test_a_model_is_compiled_once(slurm_torch: SlurmTorch) -> None:
    """Prints what it measures: see docs/performance.md."""
    slurm_torch.clean()
    times: dict[str, tuple[float, int, int]] = {}
    for what, nodes, words in (
        ("cold", "node01", ()),
        ("warm", "node01", ()),
        ("on nodes that never compiled", "node02,node03", ()),
        ("a line was changed", "node01,node02,node03", ("changed",)),
        ("again", "node03", ("changed",)),
    ):
        ran = run(slurm_torch, COMPILES, nodes, *words)
        [first] = [line for line in ran.lines() if line.startswith("step 0 took")]
        event = compiled(ran)
        seconds = float(first.split()[3])
        times[what] = (seconds, event["used_kernels"], event["new_kernels"])
    print(json.dumps(times))
    assert [new for _, _, new in times.values()][1:3] == [0, 0]
    assert 0 < times["a line was changed"][2] < times["cold"][2]
    assert times["again"][2] == 0
