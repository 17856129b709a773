"""The areas: what is damaged, what is promised, and how many rounds a run gives each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from .rounds import Round
from .world import World

MODULES = (
    "wheels", "bundles", "lies", "roots", "store", "environments", "kills", "limits", "concurrent",
    "settings", "logs", "jobs", "relay", "slurm", "transfer",
)  # fmt: skip
"""The files in ``areas/``, in the order of the table; each is one area of that name."""


@dataclass(frozen=True)
class Area:
    """One kind of fault; what must hold then is said at the top of its file."""

    play: Callable[[Round], str]  # plays one round; returns an outcome, or raises ``Broken``
    rounds: int  # how many rounds a full run plays
    sample: int  # how many of them the sample in the test suite plays
    seconds: float = 60  # after which a round counts as hanging
    root: bool = False  # whether only root can play it
    apart: bool = False  # whether its rounds share what is started once: one process plays them
    begin: Callable[[World], None] | None = None
    end: Callable[[World], None] | None = None

    @property
    def name(self) -> str:
        return self.play.__module__.rpartition(".")[2]

    @property
    def promise(self) -> str:
        return importlib.import_module(self.play.__module__).__doc__ or ""


def areas(names: tuple[str, ...] = ()) -> list[Area]:
    """Return the named areas, or all of them, in the order of the table."""
    package = __name__.rpartition(".")[0]
    return [importlib.import_module(f"{package}.areas.{name}").AREA for name in names or MODULES]
