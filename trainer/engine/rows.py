"""The rows of each rank in each step: every row once an epoch, for any number of ranks.

The order is a function of the seed and the epoch, and the rows of a step are those at a position
in it. So a run can resume from a position alone, also with another number of ranks than before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_EPOCHS = 1 << 20
"""More epochs than any run has: the seeds of different runs stay apart."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in a run."""

    epoch: int = 0
    """Number of whole epochs that are done."""
    row: int = 0
    """Rows of the next one that are done, over all ranks."""
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Share:
    """The work of one rank in one step."""

    rows: Tensor
    """The numbers of its rows, at least one: whole numbers, shape (n,)."""
    weights: Tensor
    """1 for each row, and 0 for one that only keeps a rank without rows busy: shape (n,)."""
    total: int


class Order:
    """The order of rows in each epoch."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        """Describe the order; ``batch`` counts the rows of one step over all ranks."""
        self.rows, self.batch = rows, batch
        self._seed = seed
        self._epoch, self._order = -1, None

    @property
    def steps(self) -> int:
        """Steps of a whole epoch; the last one may be a shorter one."""
        return -(-self.rows // self.batch)

    def share(self, at: Position, rank: int, size: int) -> Share:
        """Return the work of rank ``rank`` of ``size`` in the step at a position.

        The ranks take turns with the rows. In a last, short step a rank may have none: it works on
        one of another's, which does not count, as all ranks have to take part.
        """
        import torch

        order = self._get_order_of_epoch(at.epoch)
        step = order[at.row : at.row + self.batch]
        mine = step[rank::size]
        weights = torch.ones(max(1, len(mine)))
        if not len(mine):
            mine, weights = step[:1], torch.zeros(1)
        return Share(rows=mine, weights=weights, total=len(step))

    def get_position_after(self, at: Position) -> Position:
        """Return the position after the step at a position."""
        row = at.row + self.batch
        if row >= self.rows:
            return Position(epoch=at.epoch + 1, row=0, step=at.step + 1)
        return Position(epoch=at.epoch, row=row, step=at.step + 1)

    def _get_order_of_epoch(self, epoch: int) -> Tensor:
        import torch

        if self._order is None or epoch != self._epoch:
            source = torch.Generator().manual_seed(self._seed * _EPOCHS + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.rows, generator=source)
        return self._order
