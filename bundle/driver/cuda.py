"""The NVIDIA driver that a CUDA version needs, and the drivers and GPUs that nodes have.

As in https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/, as of CUDA 13.2. Since CUDA 11 a
program runs with the first driver of its major version; PTX needs that of its minor version.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Optional

from ..protocol.messages import Gpu, GpuFacts
from ..protocol.problem import Problem, ProblemCode
from .findings import group_nodes, shorten_names

Version = tuple[int, ...]
GpusByNode = Mapping[str, Optional[GpuFacts]]  # None for no driver
MINIMAL: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest driver for any program of a major version of CUDA."""
_DRIVERS = """\
11.0 450.51.05 11.1 455.23    11.2 460.27.03 11.3 465.19.01 11.4 470.42.01 11.5 495.29.05
11.6 510.39.01 11.7 515.43.04 11.8 520.61.05 12.0 525.60.13 12.1 530.30.02 12.2 535.54.03
12.3 545.23.06 12.4 550.54.14 12.5 555.42.02 12.6 560.28.03 12.8 570.26    12.9 575.51.03
13.0 580.65.06 13.1 590.44.01 13.2 595.45.04"""
OWN: Mapping[tuple[int, int], str] = {
    (int(major), int(minor)): driver
    for major, minor, driver in re.findall(r"(\d+)\.(\d+) (\S+)", _DRIVERS)
}  # the first driver with all that a version of CUDA can do
_RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")
_BUILD = re.compile(r"cu(\d{2})(\d)(?:\D.*)?")  # the local version of a build for CUDA: ``cu128``


class CudaNeed(NamedTuple):
    """The CUDA version of a bundle."""

    version: tuple[int, int]
    package: str  # the package that it is known from: ``torch 2.9.0+cu128``

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


def find_driver_problem(node: str, facts: GpuFacts | None, need: CudaNeed | None) -> Problem | None:
    """Return the problem of a node whose driver is too old; None for none, or if unknown."""
    if facts is None or need is None or not facts.driver:
        return None
    known = filter(None, (MINIMAL.get(need.version[0]), OWN.get(need.version)))
    minimal = min(known, key=parse_version, default=None)
    if minimal is None or find_newest_cuda(facts) >= parse_version(minimal):
        return None
    values = {"driver": facts.driver, "cuda": need.text, "needed": minimal, "package": need.package}
    return Problem(ProblemCode.OLD_GPU_DRIVER, node, values)


def parse_version(version: str) -> Version:
    """Return the numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def find_newest_cuda(facts: GpuFacts) -> Version:
    """Return the version of the driver, or of the newer library that stands in for it."""
    return max(parse_version(facts.driver), parse_version(facts.library))


def list_driver_notes(nodes: GpusByNode, need: CudaNeed | None) -> list[str]:
    """Return notes on the drivers and GPUs of nodes that can run the bundle."""
    notes = [
        f"{node}: the NVIDIA driver does not work: {facts.fault}"
        for node, facts in nodes.items()
        if facts is not None and facts.fault
    ]
    if need is not None:
        notes += _note_unfit_drivers(nodes, need)
    return [*notes, *_note_different_gpus(nodes)]


def _note_different_gpus(nodes: GpusByNode) -> Iterator[str]:
    gpus = {node: () if facts is None else facts.gpus for node, facts in nodes.items()}
    if len({frozenset(map(_describe_gpu, own)) for own in gpus.values()}) > 1:
        kinds = {node: describe_gpus(own) or "no NVIDIA GPU" for node, own in gpus.items()}
        parts = [
            f"{shorten_names(named)}: {kind}" for kind, named in group_nodes(kinds.items()).items()
        ]
        yield f"the nodes' GPUs differ, and the slowest sets the pace: {'; '.join(parts)}"


def _note_unfit_drivers(nodes: GpusByNode, need: CudaNeed) -> Iterator[str]:
    absent = [node for node, facts in nodes.items() if facts is None]
    if absent:
        yield (
            f"{shorten_names(absent)}: no NVIDIA driver, so what {need.package} is for, CUDA "
            f"{need.text}, cannot be used there"
        )
    own = OWN.get(need.version, "")
    older = [
        node
        for node, facts in nodes.items()
        if facts is not None and facts.driver and find_newest_cuda(facts) < parse_version(own)
        if find_driver_problem(node, facts, need) is None
    ]
    if older:
        yield (
            f"{shorten_names(older)}: the driver is older than the one of CUDA {need.text} "
            f"({own}): built kernels run, what the driver must compile (PTX) does not"
        )


def format_gpu_line(node: str, facts: GpuFacts) -> str:
    """Return what the preflight's log says of a node: ``hpc07 driver=570.124.06 gpus=4 x ...``."""
    gpus = describe_gpus(facts.gpus) or "none"
    return f"{node} driver={facts.driver or 'unknown'} gpus={gpus}"


def describe_gpus(gpus: Collection[Gpu]) -> str:
    """Return GPUs in words: ``4 x NVIDIA A100-SXM4-80GB (80 GiB)``."""
    counts = Counter(map(_describe_gpu, gpus))
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def _describe_gpu(gpu: Gpu) -> str:
    size = f" ({round(gpu.memory / (1 << 30))} GiB)" if gpu.memory else ""
    mig = f" as MIG {'+'.join(gpu.mig)}" if gpu.mig else ""
    return gpu.name + size + mig
