"""What a node finds out about its NVIDIA driver and GPUs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from bundle.node import machine
from bundle.protocol.messages import Gpu, GpuFacts
from tests.support.gpu_machines import CLOSED_MODULE, OPEN_MODULE, nvidia_smi, proc
from tests.support.processes import until

A100 = "NVIDIA A100-SXM4-40GB"
GIB40 = 40960 << 20
MIG_LISTING = f"""GPU 0: {A100} (UUID: GPU-1)
  MIG 3g.20gb     Device  0: (UUID: MIG-1)
  MIG 2g.10gb     Device  1: (UUID: MIG-2)
GPU 1: {A100} (UUID: GPU-2)"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program that gets no processor for a while answer all the same."""
    monkeypatch.setattr(machine, "_SECONDS", 300.0)


def found(folder: Path, kernel: Path = Path("/nowhere"), **env: str) -> GpuFacts | None:
    """The facts of a machine whose programs are in a folder."""
    path = f"{folder}{os.pathsep}{os.defpath}"
    return machine.Question({"PATH": path, **env}, kernel).answer()


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    nvidia_smi(tmp_path, "NVIDIA-SMI has failed", code=9)
    assert found(tmp_path) is None


def test_two_gpus_one_of_them_in_parts(tmp_path: Path) -> None:
    rows = f"{A100}, 40960, 535.129.03, Enabled\n{A100}, 40960, 535.129.03, Disabled"
    nvidia_smi(tmp_path, rows, MIG_LISTING)
    parts = Gpu(A100, GIB40, ("3g.20gb", "2g.10gb"))
    assert found(tmp_path) == GpuFacts("535.129.03", gpus=(parts, Gpu(A100, GIB40)))


@pytest.mark.parametrize("module", [OPEN_MODULE, CLOSED_MODULE])
def test_the_kernel_knows_the_driver_and_the_names(tmp_path: Path, module: str) -> None:
    """There is no ``nvidia-smi``, or it knows less than is asked."""
    kernel = proc(tmp_path / "proc", "525.60.13", "Tesla V100", "Tesla V100", module=module)
    names = (Gpu("Tesla V100"), Gpu("Tesla V100"))
    assert found(tmp_path, kernel) == GpuFacts("525.60.13", gpus=names)
    nvidia_smi(tmp_path, 'Field "mig.mode.current" is not a valid field to query.', code=2)
    assert found(tmp_path, kernel) == GpuFacts("525.60.13", gpus=names)
    fault = "Failed to initialize NVML: Driver/library version mismatch"
    nvidia_smi(tmp_path, fault, code=18)
    assert found(tmp_path, kernel) == GpuFacts("525.60.13", gpus=names, fault=fault)


def test_nobody_waits_for_a_driver_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_SECONDS", 0.2)
    nvidia_smi(tmp_path, "", body="exec sleep 900")
    kernel = proc(tmp_path / "proc", "570.26")
    facts = found(tmp_path, kernel)  # the test would last as long as the program
    assert facts == GpuFacts("570.26", fault="nvidia-smi gave no answer in 0.2 s")


def test_a_newer_library_stands_in_for_the_driver(tmp_path: Path) -> None:
    kernel = proc(tmp_path / "proc", "535.54.03")
    for version in ("535.54.03", "580.65.06"):
        folder = tmp_path / version
        folder.mkdir()
        (folder / f"libcuda.so.{version}").touch()
        (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    both = f"/nowhere::{tmp_path}/580.65.06:{tmp_path}/535.54.03"
    assert found(tmp_path, kernel, LD_LIBRARY_PATH=both) == GpuFacts("535.54.03", "580.65.06")
    own = f"{tmp_path}/535.54.03"
    assert found(tmp_path, kernel, LD_LIBRARY_PATH=own) == GpuFacts("535.54.03")


@pytest.mark.parametrize("memory", ["\u00b2", "9" * 5000, "many"])
def test_rows_that_make_no_sense_are_no_gpus_of_a_driver(tmp_path: Path, memory: str) -> None:
    nvidia_smi(tmp_path, f"A, {memory}, [N/A], [N/A]")
    assert found(tmp_path) is None
    kernel = proc(tmp_path / "proc", "570.26")
    assert found(tmp_path, kernel) == GpuFacts("570.26", gpus=(Gpu("A"),))


def test_a_flood_is_not_read_to_its_end(tmp_path: Path) -> None:
    """It is ended with what it started."""
    nvidia_smi(tmp_path, "", body=f"yes {tmp_path}; sleep 300")
    kernel = proc(tmp_path / "proc", "570.26")
    facts = found(tmp_path, kernel)
    assert facts == GpuFacts("570.26", fault="nvidia-smi wrote more than 1 MiB")
    assert until(lambda: not _running(str(tmp_path).encode()))


def _running(word: bytes) -> list[Path]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().split(b"\0")[:2] == [b"yes", word]:
                found.append(path)
    return found
