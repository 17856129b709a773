"""NVIDIA drivers and the CUDA of a bundle: what runs, what does not, and what is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bundle.driver.cuda import CudaNeed, find_cuda_need, find_driver_problem, list_driver_notes
from bundle.protocol.messages import Gpu, GpuFacts
from stager.core.store import Store
from stager.core.values import Wheel
from tests.support.bundles import make_bundle
from tests.support.gpu_machines import nvidia_smi
from tests.support.jobs import drive, job_for
from tests.support.wheelhouse import make_wheel


@pytest.mark.parametrize(
    ("packages", "version"),
    [
        ([("numpy", "2.4.0"), ("torch", "2.13.0+cpu")], None),
        ([("torch", "2.9.0+cu128")], (12, 8)),
        ([("torch", "2.11.0"), ("nvidia-cuda-runtime", "13.0.96")], (13, 0)),
        ([("torch", "2.9.0"), ("nvidia-cuda-runtime-cu12", "12.8.90")], (12, 8)),
        ([("jax", "0.7"), ("nvidia-cuda-runtime-cu12", "12.9.79"), ("x", "1+cu130")], (13, 0)),
        ([("torch", "2.9.0+rocm6.4"), ("flash-attn", "2.8.3+cu12torch2.8")], None),
        ([("torch", "2.9.0+cu126.post1")], (12, 6)),
    ],
)
def test_what_a_bundle_needs(
    packages: list[tuple[str, str]], version: tuple[int, int] | None
) -> None:
    need = find_cuda_need(packages)
    assert (None if need is None else need.version) == version


SIX_NODES = {
    "node01": GpuFacts("580.65.06"),
    "node02": GpuFacts("590.44.01"),
    "node07": GpuFacts("525.60.13"),
    "node08": GpuFacts("470.256.02"),
    "node09": GpuFacts("535.54.03", library="580.95.05"),
    "node10": None,
}


@pytest.mark.parametrize(
    ("version", "too_old"),
    [
        ((13, 9), {"node07", "node08"}),
        ((12, 8), {"node08"}),
        ((11, 8), set()),
        ((14, 0), set()),  # not known yet
    ],
)
def test_the_table_against_six_nodes(version: tuple[int, int], too_old: set[str]) -> None:
    need = CudaNeed(version, "torch 9")
    problems = {node: find_driver_problem(node, facts, need) for node, facts in SIX_NODES.items()}
    assert {node for node, problem in problems.items() if problem} == too_old
    assert not any(find_driver_problem(node, facts, None) for node, facts in SIX_NODES.items())


A100 = Gpu("NVIDIA A100-SXM4-80GB", 81920 << 20)
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20)
PARTED = Gpu("NVIDIA A100-SXM4-80GB", 81920 << 20, ("3g.40gb", "3g.40gb"))
CUDA_128 = CudaNeed((12, 8), "torch 2.9.0+cu128")


def test_six_nodes_of_several_kinds() -> None:
    new, old = "580.65.06", "535.54.03"
    said = list_driver_notes(
        {
            "n1": GpuFacts(new, gpus=(A100, A100)),
            "n2": GpuFacts(new, gpus=(H100,)),
            "n3": GpuFacts(old, gpus=(A100, A100)),
            "n4": GpuFacts(new, gpus=(PARTED,)),
            "n5": GpuFacts("470.1", fault="Driver/library version mismatch"),
            "n6": None,
        },
        CUDA_128,
    )
    assert said == [
        "n5: the NVIDIA driver does not work: Driver/library version mismatch",
        "n6: no NVIDIA driver, so what torch 2.9.0+cu128 is for, CUDA 12.8, cannot be used there",
        "n3: the driver is older than the one of CUDA 12.8 (570.26): built kernels run, what the "
        "driver must compile (PTX) does not",
        "the nodes' GPUs differ, and the slowest sets the pace: "
        "n1, n3: 2 x NVIDIA A100-SXM4-80GB (80 GiB); "
        "n2: 1 x NVIDIA H100 80GB HBM3 (80 GiB); "
        "n4: 1 x NVIDIA A100-SXM4-80GB (80 GiB) as MIG 3g.40gb+3g.40gb; "
        "n5, n6: no NVIDIA GPU",
    ]


def test_nothing_is_sent_where_the_driver_is_too_old(
    store: Store, zstd_wheel: Wheel | None, program: Path, tmp_path: Path
) -> None:
    runtime = make_wheel(tmp_path, "nvidia-cuda-runtime", "13.0.96")
    packed = make_bundle(store, [runtime], decompressor=zstd_wheel, name="accelerated")
    nvidia_smi(tmp_path / "bin", f"{A100.name}, 81920, 525.60.13, [N/A]")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    code, events, _ = drive(program, job_for(packed, tmp_path), PATH=path)
    begun = [event["phase"] for event in events if event["event"] == "begin"]
    assert (code, begun) == (3, ["preflight"])
    what = "has driver 525.60.13, the bundle's CUDA 13.0 needs 580.65.06 or newer"
    found = events[-1]["problems"]
    assert {node: found[node][0]["what"] for node in found} == {"local1": what, "local2": what}
    log = (tmp_path / "logs" / "preflight.4711.txt").read_text()
    assert f"local1 driver=525.60.13 gpus=1 x {A100.name} (80 GiB)" in log
    assert f"local2 problem: local2: {what}; nvidia-cuda-runtime 13.0.96" in log
