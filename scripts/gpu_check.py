#!/usr/bin/env python3
"""Proves on a machine with NVIDIA GPUs what other machines can only test in parts.

    scripts/gpu_check                            with the torch of python3, a build for CUDA
    scripts/gpu_check --python /env/bin/python   with another Python's

``scripts/gpu_check`` makes the test suite's environment for stager's own part; where that cannot be
had, run this file with any Python that has stager's dependencies. Each line is one thing: ok,
FAILED, or skipped for want of a second GPU. It writes to a temporary folder only.

Exit status: 0 all is proved, 1 something failed, 2 a wrong command line, 4 there is no NVIDIA GPU
here, so that nothing was tried.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from bundle.driver.cuda import describe_gpus  # noqa: E402
from bundle.launch.commands import choose_backend, choose_nproc  # noqa: E402
from bundle.node.machine import Question, host_facts  # noqa: E402
from bundle.protocol.enumerations import FailureClass  # noqa: E402
from stager.diagnosis.diagnosis import diagnose  # noqa: E402
from stager.logs.job_files import find_job_files  # noqa: E402

NO_GPU = 4
"""Exit status where there is no GPU."""
_SECONDS = 600.0
"""Time limit of each program."""
_XID = "[17.9] NVRM: Xid (PCI:0000:4f:00): 79, pid=1, name=python, GPU has fallen off the bus.\n"
_RANK = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from trainer.engine import run as precision
from trainer.network import dist
world = dist.start(dist.read_world(os.environ))
import torch, torch.distributed
numbers = torch.full((1 << 20,), world.rank + 1.0, device=world.device)
torch.distributed.all_reduce(numbers)
ours = torch.cuda.current_device() if world.backend == "nccl" else -1
print("SEEN " + json.dumps({
    "rank": world.rank, "local_rank": world.local_rank, "backend": world.backend,
    "size": world.size, "device": ours, "on": str(numbers.device), "sum": numbers[0].item(),
    "mixed": precision.is_bfloat16("auto", world.device),
    "capability": torch.cuda.get_device_capability(ours)[0] if ours >= 0 else 0}), flush=True)
torch.distributed.destroy_process_group()
"""
_GREEDY = """
import torch
kept = []
while True:
    kept.append(torch.ones(1 << 28, device="cuda"))
"""


class Failed(Exception):
    """Something is not as it should be; the message says what was seen."""


class Machine:
    """A machine with GPUs, and the Python whose torch uses them."""

    def __init__(self, python: str, scratch: Path) -> None:
        """Look at the machine."""
        self.python, self.scratch = python, scratch
        self.gpus = host_facts().gpus

    def run(self, *arguments: str) -> str:
        """Run a program under the other Python and return its output.

        Raises:
            Failed: it fails, or takes too long.
        """
        done = self._run(arguments)
        if done.returncode:
            raise Failed(f"exit status {done.returncode}: {_end(done.stdout)}")
        return done.stdout

    def fails(self, *arguments: str) -> str:
        """Run a program that must fail; return its output.

        Raises:
            Failed: it does not fail.
        """
        done = self._run(arguments)
        if not done.returncode:
            raise Failed("the program did not fail")
        return done.stdout

    def _run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.python, *arguments],
                cwd=REPO,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise Failed(str(exc)) from exc

    def torchrun(self, *arguments: str) -> str:
        """Run a program in one rank for each GPU."""
        count = str(choose_nproc(None, {"here": self.gpus}, cpus=1))
        begin = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count)
        return self.run(*begin, *arguments)

    def train(self, name: str, *options: str, launched: bool) -> dict[str, float]:
        """Train the smallest workload; return its metrics."""
        out = self.scratch / name
        arguments = ("-m", "trainer", "mlp", "--epochs", "2", "--out", str(out), *options)
        if launched:
            self.torchrun(*arguments)
        else:
            self.run(*arguments)
        metrics: dict[str, float] = json.loads((out / "metrics.json").read_text("utf-8"))
        return metrics

    def diagnosed(self, name: str, text: str) -> FailureClass | None:
        """Return the class of the failure that a log of this text shows."""
        folder = self.scratch / name
        folder.mkdir()
        (folder / "train.4711.node01.0.out").write_text(text, encoding="utf-8")
        first = diagnose(find_job_files(str(folder), folder)).first
        return None if first is None else first.kind


def torch_sees_the_gpus(machine: Machine) -> str:
    """The Python has a torch for CUDA, which sees as many GPUs as preflight counts."""
    program = (
        "import torch; print(torch.cuda.device_count(), torch.__version__, torch.version.cuda)"
    )
    count, version, cuda = machine.run("-c", program).split()[-3:]
    _require(int(count) == machine.gpus, f"torch sees {count} GPUs, preflight {machine.gpus}")
    return f"{count} GPUs, torch {version}, CUDA {cuda}"


def ranks_have_a_gpu_each(machine: Machine) -> str:
    """NCCL is chosen, there is one rank a GPU, and LOCAL_RANK is its device."""
    backend = choose_backend("auto", {"here": machine.gpus})
    _require(backend == "nccl", f"the backend would be {backend}")
    file = machine.scratch / "rank.py"
    file.write_text(_RANK, encoding="utf-8")
    lines = machine.torchrun(str(file), str(REPO)).splitlines()
    ranks = [json.loads(line.partition("SEEN ")[2]) for line in lines if "SEEN {" in line]
    _require(len(ranks) == machine.gpus, f"{len(ranks)} ranks for {machine.gpus} GPUs")
    total = machine.gpus * (machine.gpus + 1) / 2
    for rank in ranks:
        right = rank["backend"] == "nccl" and rank["device"] == rank["local_rank"]
        _require(right and rank["sum"] == total, f"a rank saw {rank}")
        _require(rank["mixed"] == (rank["capability"] >= 8), f"bfloat16: a rank saw {rank}")
    mixed = "bfloat16" if ranks[0]["mixed"] else "float32, as these GPUs have no bfloat16"
    return f"{len(ranks)} ranks, NCCL all-reduce, LOCAL_RANK is the device, auto is {mixed}"


def peak_memory_is_in_the_metrics(machine: Machine) -> str:
    """Training on all GPUs ends, and says how much of a GPU's memory it took."""
    metrics = machine.train("ddp", launched=True)
    peak = metrics.get("peak_gpu_memory_bytes", 0)
    _require(peak > 0, f"the metrics are {metrics}")
    _require(metrics["world_size"] == machine.gpus, f"the metrics are {metrics}")
    return f"{peak:,.0f} bytes on the first rank's GPU, accuracy {metrics['accuracy']:.3f}"


def bfloat16_trains(machine: Machine) -> str:
    """A run that is told to compute in bfloat16 learns."""
    metrics = machine.train("bf16", "--precision", "bfloat16", launched=True)
    _require(metrics["accuracy"] > 0.8, f"the metrics are {metrics}")
    return f"accuracy {metrics['accuracy']:.3f}"


def data_parallel_trains(machine: Machine) -> str:
    """One process splits its batches over all GPUs."""
    if machine.gpus < 2:
        return "skipped: there is one GPU only"
    metrics = machine.train("dp", "--sync", "dp", launched=False)
    _require(metrics["accuracy"] > 0.8, f"the metrics are {metrics}")
    return f"over {machine.gpus} GPUs, accuracy {metrics['accuracy']:.3f}"


def out_of_memory_is_diagnosed(machine: Machine) -> str:
    """Check that the line is known that torch prints when a GPU's memory is used up."""
    text = machine.fails("-c", _GREEDY)
    kind = machine.diagnosed("oom", text)
    _require(kind is FailureClass.OUT_OF_MEMORY, f"it was called {kind}: {_end(text)}")
    return str(kind)


def an_xid_is_diagnosed(machine: Machine) -> str:
    """A line of the driver in the kernel's log is known; no GPU is broken for it."""
    kind = machine.diagnosed("xid", _XID)
    _require(kind is FailureClass.NODE_FAILURE, f"it was called {kind}")
    return f"{kind} (of a line that was written for this)"


CHECKS: tuple[Callable[[Machine], str], ...] = (
    torch_sees_the_gpus,
    ranks_have_a_gpu_each,
    peak_memory_is_in_the_metrics,
    bfloat16_trains,
    data_parallel_trains,
    out_of_memory_is_diagnosed,
    an_xid_is_diagnosed,
)
"""In this order."""


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def _end(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:])


def main(arguments: Sequence[str]) -> int:
    """Check everything; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="python3", help="a Python whose torch has CUDA")
    python = parser.parse_args(arguments).python
    facts = Question(os.environ).answer()
    if host_facts().gpus == 0:
        print("there is no NVIDIA GPU on this machine (/dev/nvidia*): nothing was tried")
        return NO_GPU
    if facts is not None:
        print(f"driver {facts.driver or 'unknown'}, {describe_gpus(facts.gpus) or 'GPUs unknown'}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        machine = Machine(python, Path(scratch))
        for check in CHECKS:
            name = check.__name__.replace("_", " ")
            try:
                print(f"ok      {name}: {check(machine)}", flush=True)
            except Failed as exc:
                failed += 1
                print(f"FAILED  {name}: {exc}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
