"""The NVIDIA driver that a CUDA version needs, and the drivers that nodes have.

The numbers are those of NVIDIA's CUDA Toolkit release notes for Linux, "CUDA Toolkit and Minimum
Required Driver Version for CUDA Minor Version Compatibility" and "CUDA Toolkit and Corresponding
Driver Versions" (https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/), as of CUDA 13.2. Since
CUDA 11 a program of any minor version runs with the first driver of its major version; what it
brings as PTX, for the driver to compile, needs the driver of its own minor version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..protocol.messages import GpuFacts
from ..protocol.problem import Problem, ProblemCode

Version = tuple[int, ...]
MINIMAL: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest driver for any program of a major version of CUDA."""
OWN: Mapping[tuple[int, int], str] = {
    (11, 0): "450.51.05",
    (11, 1): "455.23",
    (11, 2): "460.27.03",
    (11, 3): "465.19.01",
    (11, 4): "470.42.01",
    (11, 5): "495.29.05",
    (11, 6): "510.39.01",
    (11, 7): "515.43.04",
    (11, 8): "520.61.05",
    (12, 0): "525.60.13",
    (12, 1): "530.30.02",
    (12, 2): "535.54.03",
    (12, 3): "545.23.06",
    (12, 4): "550.54.14",
    (12, 5): "555.42.02",
    (12, 6): "560.28.03",
    (12, 8): "570.26",
    (12, 9): "575.51.03",
    (13, 0): "580.65.06",
    (13, 1): "590.44.01",
    (13, 2): "595.45.04",
}
"""The first driver with all that a version of CUDA can do."""
_RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")
_BUILD = re.compile(r"cu(\d{2})(\d)(?:\D.*)?")
"""The local version of a build for CUDA: ``cu128``."""


@dataclass(frozen=True)
class CudaNeed:
    """The CUDA version of a bundle."""

    version: tuple[int, int]
    """Major and minor."""
    package: str
    """The package that it is known from: ``torch 2.9.0+cu128``."""

    @property
    def text(self) -> str:
        """The version as NVIDIA writes it: ``12.8``."""
        return ".".join(map(str, self.version))


def find_cuda_need(packages: Iterable[tuple[str, str]]) -> CudaNeed | None:
    """Return the newest CUDA version that some packages are built for; None if there is none."""
    needs = []
    for name, version in packages:
        public, _, local = version.partition("+")
        match = _BUILD.fullmatch(local)
        if match:
            needs.append(CudaNeed((int(match[1]), int(match[2])), f"{name} {version}"))
        elif _RUNTIME.fullmatch(name) and public.count("."):
            major, minor = parse_version(public)[:2]
            needs.append(CudaNeed((major, minor), f"{name} {version}"))
    return max(needs, key=lambda need: need.version, default=None)


def driver_problem(node: str, facts: GpuFacts | None, need: CudaNeed | None) -> Problem | None:
    """Return the problem of a node whose driver is too old; None for none, or if unknown."""
    if facts is None or need is None or not facts.driver:
        return None
    minimal = minimal_driver(need.version)
    if minimal is None or newest_cuda(facts) >= parse_version(minimal):
        return None
    values = {
        "driver": facts.driver,
        "cuda": need.text,
        "needed": minimal,
        "package": need.package,
    }
    return Problem(ProblemCode.OLD_GPU_DRIVER, node, values)


def minimal_driver(version: tuple[int, int]) -> str | None:
    """Return the oldest driver that runs a version of CUDA; None where that is not known."""
    known = [MINIMAL.get(version[0]), OWN.get(version)]
    return min((driver for driver in known if driver), key=parse_version, default=None)


def parse_version(version: str) -> Version:
    """Return the numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def newest_cuda(facts: GpuFacts) -> Version:
    """Return the version of the driver, or of the newer library that stands in for it."""
    return max(parse_version(facts.driver), parse_version(facts.library))
