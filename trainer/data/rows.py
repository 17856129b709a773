"""Labelled rows in memory, and the choice of those of a run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..config import Options, TrainerError, format_count

_MOST_HELD_OUT = 1000


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Labelled rows, all in memory."""

    inputs: Tensor  # shape (rows, ...)
    labels: Tensor  # the class of each, from 0: whole numbers, shape (rows,)

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, numbers: Sequence[int]) -> Rows:
        """Return the rows with these numbers."""
        return Rows(inputs=self.inputs[list(numbers)], labels=self.labels[list(numbers)])


def choose_rows(
    options: Options, rows: int, others: int | None, noun: str, source: object
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the numbers of the rows to train on and to hold out, the same on every rank.

    ``others`` counts the rows that the source has apart; None holds out the last of ``rows``. A
    subset is sampled from the whole file, and keeps its order: files are often sorted by class.
    """
    if others is None:
        count = options.held_out or min(_MOST_HELD_OUT, rows // 7)
        if count >= rows:
            every = f"{format_count(rows, noun)} of {source}"
            message = f"--held-out {count} leaves none of the {every} to train on"
            raise TrainerError(message, hint="hold out fewer")
        held_out = range(rows - count, rows)
        rows -= count
    else:
        held_out = range(min(options.held_out or others, others))
    if options.subset is None or options.subset >= rows:
        return range(rows), held_out
    return sorted(random.Random(options.seed).sample(range(rows), options.subset)), held_out  # noqa: S311
