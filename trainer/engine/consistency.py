"""A check that all ranks have the same rows and options.

A difference would not be noticed otherwise: the ranks average what they have, whatever it is, or
wait for each other in different collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config import Options, TrainerError
from ..network import dist

if TYPE_CHECKING:
    from ..network.dist import World
    from ..task import Rows

_OPTIONS = (
    *("workload", "epochs", "subset", "held_out", "batch_size", "lr", "seed"),
    *("sync", "precision", "save_every"),
)
"""Options that decide the steps and their content; ``out`` matters on rank 0 alone."""


def require(world: World, options: Options, rows: Mapping[str, str]) -> None:
    """Continue only if every rank has the options and rows of rank 0.

    Raises:
        TrainerError: on every rank, with the ranks that differ, and the differences.
    """
    mine = {f"--{name.replace('_', '-')}": str(getattr(options, name)) for name in _OPTIONS}
    mine |= rows
    first = dist.by_first(world, lambda: mine)

    def compare() -> None:
        differences = [
            f"{name} {value} (rank 0: {first[name]})"
            for name, value in mine.items()
            if first[name] != value
        ]
        if differences:
            raise TrainerError(
                f"not what rank 0 has: {', '.join(differences)}",
                hint="start all ranks with the same command; check whether the data on that "
                "node is a different copy",
            )

    dist.together(world, compare)


def described(rows: Rows) -> str:
    """Return the number of rows and a digest of their labels, which no processor rounds."""
    labels = ",".join(map(str, rows.labels.tolist()))
    return f"{len(rows)}, labels {hashlib.sha256(labels.encode()).hexdigest()[:8]}"
