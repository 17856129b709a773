"""The memory of GPUs that a run has taken."""

from __future__ import annotations


def peak(device: str) -> dict[str, int]:
    """Return the peak memory of one GPU in bytes, under its name in metrics; empty on CPUs."""
    if device != "cuda":
        return {}
    import torch

    gpus = range(torch.cuda.device_count())
    return {"peak_gpu_memory_bytes": max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)}
