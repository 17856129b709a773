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
    """A promise was not kept."""

    def __init__(self, promise: str, evidence: object = "") -> None:
        super().__init__(promise)
        self.promise = promise
        self.evidence = str(evidence)


class NotHere(Exception):
    """This machine cannot play the area; the message says why."""


@dataclass
class Round:
    area: str
    seed: int
    """The run's."""
    number: int
    world: World
    """What has been prepared once for all rounds."""
    folder: Path
    """A directory of its own, empty at the start, removed at the end."""
    tell: Callable[[str], None] = lambda what: None
    """Takes each thing that is done, for people."""
    counts: Counter[str] = field(default_factory=Counter)
    """Outcomes of the faults that a round of many has injected; empty for a round of one."""

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}:{self.area}:{self.number}")

    def did(self, what: str) -> None:
        self.tell(what)

    def use(self, *names: str) -> None:
        """Copy parts of the prepared world into the round: project, offline, nodes, home.

        Without ``nodes`` there is a place for node roots, and none in it.
        """
        self.nodes.mkdir(exist_ok=True)
        for name in names:
            shutil.copytree(
                self.world.template / name, self.folder / name, symlinks=True, dirs_exist_ok=True
            )

    def strike(self, faults: Sequence[Callable[..., object]], *what: Any) -> object:
        """Let chance choose one of some faults, let it happen, and note it; return what it does.

        A fault is told by its name, and by what it returns if that is a text.
        """
        fault = self.rng.choice(faults)
        done = fault(*what)
        name = called(fault)
        self.did(f"{name}: {done}" if isinstance(done, str) else name)
        return done

    def forget_builds(self) -> None:
        """Leave only the wheels in the store."""
        for path in self.offline.iterdir():
            if path.name != "wheels":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def offline(self) -> Path:
        return self.folder / "offline"

    @property
    def nodes(self) -> Path:
        """Under which the node root is made."""
        return self.folder / "nodes"

    @property
    def logs(self) -> Path:
        """Where jobs leave their logs."""
        return self.folder / "home" / "slurm_logs"


def called(fault: Callable[..., object]) -> str:
    """Return the name of a function as people read it."""
    return fault.__name__.strip("_").replace("_", " ")


def require(kept: bool, promise: str, evidence: object = "") -> None:
    """Hold a promise.

    Raises:
        Broken: it is not kept.
    """
    if not kept:
        raise Broken(promise, evidence)


def repeat(area: str, seed: int, number: int) -> str:
    """Return the command line that plays one round again."""
    return shlex.join(["scripts/torture", area, "--seed", str(seed), "--round", str(number)])
