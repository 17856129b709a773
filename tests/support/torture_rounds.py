"""The torture suite as a command, and rounds that break one promise each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import Done, run
from tests.torture.rounds import SAME, Broken, Round
from tests.torture.world import World

REPO = Path(__file__).resolve().parents[2]


def torture(*arguments: str) -> Done:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return run([sys.executable, "-m", "tests.torture", *arguments], cwd=REPO, env=env, seconds=1000)


def round_of(folder: Path, number: int = 0) -> Round:
    world = World(place=folder, decompressor=folder)
    return Round(area="x", seed=1, number=number, world=world, folder=folder / "round")


def hangs(round_: Round) -> str:
    round_.did("hang")
    while True:
        pass


def breaks(round_: Round) -> str:
    round_.did("break it")
    raise Broken("it holds", "it does not")


def leaves(round_: Round) -> str:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return SAME


def fails(round_: Round) -> str:
    raise ZeroDivisionError
