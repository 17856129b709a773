"""The choice to compute in bfloat16 where that is accurate enough (automatic mixed precision)."""

from __future__ import annotations


def mixed(setting: str, device: str) -> bool:
    """Return True if a run computes in bfloat16 on this rank's device."""
    import torch

    if device == "cuda":
        # From 8.0 on in hardware; `is_bf16_supported` also counts GPUs that emulate it.
        supported = torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
    else:
        # Without these instructions it is emulated, and several times as slow.
        known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        supported = known is not None and known()
    return decide(setting, supported=supported)


def decide(setting: str, *, supported: bool) -> bool:
    """Return True for bfloat16; ``auto`` uses it if the hardware has it."""
    if setting == "auto":
        return supported
    return setting == "bfloat16"
