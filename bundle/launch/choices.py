"""The choices of the driver for all nodes of a launch: backend, ranks a node, threads."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.enumerations import Backend
from ..protocol.job import ONE_A_CPU


def choose_backend(setting: str, gpus: Mapping[str, int]) -> str:
    """Return the backend as set; ``auto`` is ``nccl`` if every node has a GPU, else ``gloo``.

    Raises:
        ValueError: NCCL is set and some nodes have no GPU; the message names them.
    """
    without = sorted(node for node, count in gpus.items() if count == 0)
    if setting == Backend.AUTO:
        return Backend.GLOO if without else Backend.NCCL
    if setting == Backend.NCCL and without:
        raise ValueError(
            f"the nccl backend needs a GPU on every node; none on {', '.join(without)}"
        )
    return setting


def must_use_cpus(backend: str, gpus: Mapping[str, int]) -> bool:
    """Tell whether ranks train on CPUs: the backend is gloo, and not every node has a GPU."""
    return backend == Backend.GLOO and 0 in gpus.values()


def choose_nproc(setting: int | None, gpus: Mapping[str, int], cpus: int) -> int:
    """Return the ranks on each node: as set, else the fewest GPUs of any node, at least 1."""
    if setting is None:
        return max(1, min(gpus.values()))
    return max(1, cpus) if setting == ONE_A_CPU else setting


def choose_threads(setting: int | None, cpus: int, nproc: int) -> int:
    """Return the CPU threads of one rank: as set, else its share of the CPUs, at least 1."""
    if setting is not None:
        return setting
    return max(1, cpus // nproc)
