"""One training run on this rank: its task, the rows of each step, its position.

Every row is seen once an epoch, for any number of ranks. The order of rows is a function of seed
and epoch, so a run can resume from a position alone, also with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import Options, require_fitting_batch
from ..data.rows import Rows
from ..network import dist
from ..network.dist import World
from . import sync

_WARMUP = 0.1  # the fraction of all rows over which the rate rises
_EPOCHS = 1 << 20  # more epochs than any run has: the seeds of different runs stay apart


class Position(NamedTuple):
    """A position in a run."""

    epoch: int = 0  # whole epochs that are done
    row: int = 0  # rows of the next one that are done, over all ranks
    step: int = 0


class Share(NamedTuple):
    """The work of one rank in one step."""

    rows: Tensor  # the numbers of its rows, at least one: shape (n,)
    weights: Tensor  # 1 for each, and 0 for one that only keeps a rank without rows busy
    total: int  # rows of the step over all ranks


class Order:
    """The order of rows in each epoch; ``batch`` counts the rows of one step over all ranks."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.rows, self.batch = rows, batch
        self._seed = seed
        self._epoch, self._order = -1, None

    @property
    def steps(self) -> int:
        """Steps of a whole epoch; the last one may be a shorter one."""
        return -(-self.rows // self.batch)

    def share(self, at: Position, rank: int, size: int) -> Share:
        """Return the work of rank ``rank`` of ``size``: the ranks take turns with the rows.

        A rank without rows in a last, short step works on another's, which does not count.
        """
        step = self._shuffle(at.epoch)[at.row : at.row + self.batch]
        mine = step[rank::size]
        if len(mine):
            return Share(mine, torch.ones(len(mine)), len(step))
        return Share(step[:1], torch.zeros(1), len(step))

    def advance(self, at: Position) -> Position:
        """Return the position after the step at a position."""
        row = at.row + self.batch
        epoch, row = (at.epoch, row) if row < self.rows else (at.epoch + 1, 0)
        return Position(epoch, row, at.step + 1)

    def _shuffle(self, epoch: int) -> Tensor:
        if self._order is None or epoch != self._epoch:
            source = torch.Generator().manual_seed(self._seed * _EPOCHS + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.rows, generator=source)
        return self._order


@dataclass(frozen=True, kw_only=True)
class Task:
    """The model of a workload, its rows, and how it learns."""

    model: nn.Module
    train: Rows
    held_out: Rows
    lr: float
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]  # its rate is set before each step
    augment: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """Changes inputs while training, by the numbers of their rows and the epoch alone."""


class Run:
    """One training run on this rank: its task, its model on the device, its position."""

    def __init__(self, task: Task, options: Options, world: World) -> None:
        """Prepare the run on all ranks; TrainerError on every rank if the options do not fit."""
        self.task, self.options, self.world = task, options, world
        rows = {"rows to train on": task.train, "rows held out": task.held_out}
        facts = {name: sync.describe_rows(of) for name, of in rows.items()}
        sync.require_same_inputs(world, options, facts)
        task.model.to(world.device)
        is_fast = float(is_bfloat16(options.precision, world.device))
        self.mixed = dist.sum_over_ranks(world, [is_fast])[0] == world.size
        self.sync: sync.Alone = dist.run_on_all_ranks(
            world, lambda: sync.synchronise_model(options.sync, task.model, world, mixed=self.mixed)
        )
        self.optimizer: Optimizer = task.optimizer(task.model.parameters())
        dist.run_on_all_ranks(world, lambda: require_fitting_batch(options, len(task.train)))
        self.order = Order(len(task.train), options.batch_size * world.size, options.seed)
        self.at = Position()
        self.best = -1.0  # the highest accuracy so far
        self.stopping = False  # True on all ranks if some rank has received a signal to stop
        self.reading = self.stepping = 0.0  # seconds of this rank for rows, and for steps in all

    @property
    def steps(self) -> int:
        """Steps of the whole run, as far as is known now."""
        left = -(-(self.order.rows - self.at.row) // self.order.batch)
        return self.at.step + left + (self.options.epochs - self.at.epoch - 1) * self.order.steps

    def set_rate(self) -> float:
        """Set the rate of the next step: a linear rise over a tenth, then a fall to zero."""
        rows = self.order.rows
        done = (self.at.epoch * rows + self.at.row) / (self.options.epochs * rows)
        height = (1 - done) / (1 - _WARMUP) if done >= _WARMUP else 0.1 + 0.9 * done / _WARMUP
        lr = (self.options.lr or self.task.lr) * height
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


def is_bfloat16(setting: str, device: str) -> bool:
    """Return True if a run computes in bfloat16 on this device; ``auto``: where that is fast."""
    if setting != "auto":
        return setting == "bfloat16"
    if device == "cuda":
        # From 8.0 on in hardware; `is_bf16_supported` also counts GPUs that emulate it.
        return torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
    # Without these instructions it is emulated, and several times as slow.
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return known is not None and bool(known())
