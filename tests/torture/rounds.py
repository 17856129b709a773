"""One round: what an area is given, and how it ends."""

from __future__ import annotations

import random
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import World

REFUSED = "refused"
HEALED = "healed"
SAME = "same"
BROKEN = "broken"
OUTCOMES = (REFUSED, HEALED, SAME, BROKEN)


class Broken(Exception):
    def __init__(self, promise: str, evidence: object = "") -> None:
        super().__init__(promise)
        self.promise = promise
        self.evidence = str(evidence)


class NotHere(Exception):
    """This machine cannot play the area; the message says why."""


@dataclass
class Round:
    area: str
    seed: int  # the run's
    number: int
    world: World  # what has been prepared once for all rounds
    folder: Path  # a directory of its own, empty at the start, removed at the end
    did: Callable[[str], None] = lambda what: None  # takes each thing that is done, for people
    counts: Counter[str] = field(default_factory=Counter)  # outcomes of each fault, if it has many

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}:{self.area}:{self.number}")
        self.project, self.offline = self.folder / "project", self.folder / "offline"
        self.nodes, self.logs = self.folder / "nodes", self.folder / "home" / "slurm_logs"

    def use(self, *names: str) -> None:
        """Copy parts of the prepared world into the round: project, offline, nodes, home."""
        self.nodes.mkdir(exist_ok=True)
        for name in names:
            source, place = self.world.template / name, self.folder / name
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)

    def strike(self, faults: Sequence[Callable[..., object]], *what: Any) -> object:
        """Let one of some faults happen, by chance; note its name, and what it returns."""
        fault = self.rng.choice(faults)
        done = fault(*what)
        name = called(fault)
        self.did(f"{name}: {done}" if isinstance(done, str) else name)
        return done

    def forget_builds(self) -> None:
        for path in self.offline.iterdir():
            if path.name != "wheels":
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def called(fault: Callable[..., object]) -> str:
    return fault.__name__.strip("_").replace("_", " ")


def require(kept: bool, promise: str, evidence: object = "") -> None:
    if not kept:
        raise Broken(promise, evidence)


def repeat(area: str, seed: int, number: int) -> str:
    return shlex.join(["scripts/torture", area, "--seed", str(seed), "--round", str(number)])
