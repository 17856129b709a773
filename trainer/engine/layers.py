"""Layers that PyTorch does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):  # type: ignore[misc]  # torch may be missing where types are checked
    """An inner network whose output is added to its input, and rectified."""

    def __init__(self, inner: nn.Module, around: nn.Module) -> None:
        """Join the two paths; ``around`` brings the input to the shape that ``inner`` gives."""
        super().__init__()
        self.inner, self.around = inner, around

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute it; same number of rows as ``inputs``."""
        return nn.functional.relu(self.inner(inputs) + self.around(inputs))


class Precise(nn.Module):  # type: ignore[misc]  # as above
    """A model that is computed in bfloat16 where that is accurate enough.

    In the model and not around its call, as DataParallel calls it in threads of its own.
    """

    def __init__(self, inner: nn.Module, device: str) -> None:
        """Wrap a model for a kind of device, ``cpu`` or ``cuda``."""
        super().__init__()
        self.inner, self._device = inner, device

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute it."""
        with torch.autocast(self._device, dtype=torch.bfloat16):
            return self.inner(inputs)
