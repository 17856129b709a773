"""Whether all ranks were given the same: a rank with other rows or options spoils the work of all.

It would not be noticed otherwise: the ranks average what they have, whatever it is, or wait for
each other in different collectives.
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
"""Those that decide which steps there are, and what is done in each; ``out`` is rank 0's affair."""


def require(world: World, options: Options, rows: Mapping[str, str]) -> None:
    """Go on only if every rank has the options and rows that rank 0 has.

    Args:
        world: the ranks.
        options: this rank's.
        rows: what is known of its rows, in words, by what they are for.

    Raises:
        TrainerError: on every rank, naming those that differ, and in what.
    """
    mine = {f"--{name.replace('_', '-')}": str(getattr(options, name)) for name in _OPTIONS}
    mine |= rows
    first = dist.by_first(world, lambda: mine)

    def compare() -> None:
        other = [
            f"{name} {value} (rank 0: {first[name]})"
            for name, value in mine.items()
            if first[name] != value
        ]
        if other:
            raise TrainerError(
                f"not what rank 0 has: {', '.join(other)}",
                hint="start all ranks with the same command; see whether the data on that node is "
                "another copy",
            )

    dist.together(world, compare)


def described(rows: Rows) -> str:
    """How many rows there are, and a digest of their labels: numbers that no processor rounds."""
    labels = ",".join(map(str, rows.labels.tolist()))
    return f"{len(rows)}, labels {hashlib.sha256(labels.encode()).hexdigest()[:8]}"
