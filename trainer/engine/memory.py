"""The memory of GPUs that a run has taken."""

from __future__ import annotations


def peak(device: str) -> dict[str, int]:
    """Return the most bytes that this process had of one GPU at a time, under its name in metrics.

    Args:
        device: the device of this process, as PyTorch names it; on CPUs there is nothing to say.
    """
    if device != "cuda":
        return {}
    import torch

    gpus = range(torch.cuda.device_count())
    return {"peak_gpu_memory_bytes": max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)}
