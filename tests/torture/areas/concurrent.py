"""Several commands on one store and one node at the same time: each does what it does alone."""

from __future__ import annotations

from .. import checks
from ..product import finish, sound, stager, start, succeeded
from ..registry import Area
from ..rounds import SAME, Round, require
from ..world import ANSWER, EXEC, OTHER_ANSWER, VERIFY

_BUILD = ("build", "--no-prove")
_MAKING = (_BUILD, ("build",), ("lock",))
_SCRIPT = ("script", "--launcher", "srun", "--", "train.py")
_READING = (EXEC, VERIFY, ("inspect",), _SCRIPT, _BUILD, ("build",))
_CLEANING = (("clean", "--store-only"), ("clean", "--allocation", "local"))


def play(round_: Round) -> str:
    rng = round_.rng
    round_.use("project", "project2", "offline", "home")
    making = rng.random() < 0.3
    if making:
        round_.forget_builds()
    argvs = rng.choices(_MAKING if making else _READING, k=rng.choice((2, 3)))
    if not making and rng.random() < 0.4:
        argvs.append(rng.choice(_CLEANING))
    pairs = [(argv, rng.choice(("project", "project", "project2"))) for argv in argvs]
    round_.did("; ".join(f"{folder}: {argv[0]}" for argv, folder in pairs))
    running = [start(round_, argv, folder=folder) for argv, folder in pairs]
    for done, (argv, folder) in zip([finish(one, 80) for one in running], pairs, strict=True):
        sound(done)
        require(done.code == 0, "a command succeeds as it does alone", done)
        if argv == EXEC:
            wanted = ANSWER if folder == "project" else OTHER_ANSWER
            require(done.out == wanted, "what runs is the project's own", done)
    checks.whole_store(round_.offline)
    succeeded(stager(round_, *_BUILD))
    checks.runs_right(round_)
    checks.nothing_in_tmp(round_.offline)
    checks.nothing_half_written(round_.nodes)
    return SAME


AREA = Area(play, rounds=120, sample=1, seconds=150)
