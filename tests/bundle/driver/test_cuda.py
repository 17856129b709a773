"""The table of CUDA versions and drivers, and what a bundle needs of it."""

from __future__ import annotations

import pytest

from bundle.driver import cuda
from bundle.driver.cuda import CudaNeed, driver_problem, needed, parsed
from bundle.protocol.messages import GpuFacts


@pytest.mark.parametrize(
    ("packages", "version"),
    [
        ([("numpy", "2.4.0"), ("torch", "2.13.0+cpu")], None),
        ([("torch", "2.9.0+cu128")], (12, 8)),
        ([("torch", "2.3.1+cu118")], (11, 8)),
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
    need = needed(packages)
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
        ((13, 0), {"node07", "node08"}),
        ((13, 9), {"node07", "node08"}),
        ((12, 8), {"node08"}),
        ((11, 8), set()),
        ((14, 0), set()),  # not known yet
    ],
)
def test_the_table_against_six_nodes(version: tuple[int, int], too_old: set[str]) -> None:
    need = CudaNeed(version, "torch 9")
    problems = {node: driver_problem(node, facts, need) for node, facts in SIX_NODES.items()}
    assert {node for node, problem in problems.items() if problem} == too_old
    assert not any(driver_problem(node, facts, None) for node, facts in SIX_NODES.items())


def test_the_words() -> None:
    need = CudaNeed((13, 0), "torch 2.11.0+cu130")
    problem = driver_problem("node07", SIX_NODES["node07"], need)
    assert str(problem) == (
        "node07: has driver 525.60.13, the bundle's CUDA 13.0 needs 580.65.06 or newer; torch "
        "2.11.0+cu130 is built for it; build for the driver with [environment] torch-backend in "
        "stager.toml (cu126, cu118), or leave the node out with --exclude=node07"
    )


def test_the_table_is_in_order() -> None:
    own = [parsed(cuda.OWN[version]) for version in sorted(cuda.OWN)]
    assert own == sorted(own)
    assert [cuda.minimal_driver(version) for version in ((11, 0), (11, 8), (12, 9), (13, 7))] == [
        *("450.51.05", "450.80.02", "525.60.13", "580.65.06"),
    ]
