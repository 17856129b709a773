"""One training run on this rank: its task, its model on the device, its position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import Options, require_fitting_batch
from ..network import dist
from ..network.dist import World
from ..task import Task
from . import sync
from .rows import Order, Position

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Run:
    """One training run on this rank."""

    def __init__(self, task: Task, options: Options, world: World) -> None:
        """Prepare the run on all ranks; TrainerError on every rank if the options do not fit."""
        self.task, self.options, self.world = task, options, world
        rows = {"rows to train on": task.train, "rows held out": task.held_out}
        sync.require_same_inputs(
            world, options, {name: sync.describe_rows(of) for name, of in rows.items()}
        )
        task.model.to(world.device)
        self.mixed = dist.is_true_on_all(world, is_bfloat16(options.precision, world.device))
        self.sync: sync.Alone = dist.run_on_all_ranks(
            world, lambda: sync.synchronise_model(options.sync, task.model, world, mixed=self.mixed)
        )
        self.optimizer: Optimizer = task.optimizer(task.model)
        dist.run_on_all_ranks(world, lambda: require_fitting_batch(options, len(task.train)))
        batch = options.batch_size * world.size
        self.order = Order(len(task.train), batch, options.seed)
        self.at = Position()
        self.best = -1.0
        """The highest accuracy so far."""
        self.stopping = False
        """True if some rank has received a signal to stop; the same on all."""
        self.reading = self.stepping = 0.0
        """Seconds that this rank spent on preparing rows, and on its steps in all."""

    @property
    def done(self) -> float:
        """The fraction of the whole run that is done (0 to 1)."""
        rows = self.order.rows
        return (self.at.epoch * rows + self.at.row) / (self.options.epochs * rows)

    @property
    def steps(self) -> int:
        """Steps of the whole run, as far as is known now."""
        left = -(-(self.order.rows - self.at.row) // self.order.batch)
        return self.at.step + left + (self.options.epochs - self.at.epoch - 1) * self.order.steps


def is_bfloat16(setting: str, device: str) -> bool:
    """Return True if a run computes in bfloat16 on this device; ``auto``: where that is fast."""
    import torch

    if setting != "auto":
        return setting == "bfloat16"
    if device == "cuda":
        # From 8.0 on in hardware; `is_bf16_supported` also counts GPUs that emulate it.
        return torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
    # Without these instructions it is emulated, and several times as slow.
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return known is not None and bool(known())
