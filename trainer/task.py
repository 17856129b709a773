"""The input of the training loop: a model, rows, and the settings of learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    Augment = Callable[[Tensor, Tensor, int], Tensor]
    """Given inputs, the numbers of their rows and the epoch, returns them changed a little."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Labelled rows, all in memory."""

    inputs: Tensor
    """Shape (rows, ...)."""
    labels: Tensor
    """The class of each, from 0: whole numbers, shape (rows,)."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training job."""

    model: Module
    train: Rows
    held_out: Rows
    lr: float
    optimizer: Callable[[Module], Optimizer]
    """Makes the optimizer of the model's parameters; its rate is set before each step."""
    warmup: float = 0.1
    """The fraction of all rows over which the rate rises (0 to 1)."""
    augment: Augment | None = None
    """Changes inputs while training; a function of row and epoch alone."""
