"""Whether to compute in bfloat16 where that is accurate enough (automatic mixed precision)."""

from __future__ import annotations


def mixed(asked: str, device: str) -> bool:
    """Whether a run computes in bfloat16 on this rank's device."""
    import torch

    if device == "cuda":
        # From 8.0 on in hardware; `is_bf16_supported` also counts GPUs that emulate it.
        supported = torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
    else:
        # Without these instructions it is emulated, and several times as slow.
        known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        supported = known is not None and known()
    return decide(asked, supported=supported)


def decide(asked: str, *, supported: bool) -> bool:
    """``auto`` takes it where the hardware has it; the others are orders."""
    return asked == "bfloat16" or (asked == "auto" and supported)
