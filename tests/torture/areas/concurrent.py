"""Several commands on one store and one node at the same time."""

from __future__ import annotations

from .. import checks
from ..product import Done, finish, sound, stager, start
from ..registry import Area
from ..rounds import SAME, Round, require
from ..world import ANSWER, OTHER_ANSWER, PROGRAM

_EXEC = ("exec", "--", "python", "-c", PROGRAM)
_BUILD = ("build", "--no-prove")
_VERIFY = ("verify", "--allocation", "local")
_READING = (
    _EXEC,
    _VERIFY,
    ("inspect",),
    ("script", "--launcher", "srun", "--", "train.py"),
    _BUILD,
    ("build",),
)
_CLEANING = (("clean", "--store-only"), ("clean", "--allocation", "local"))


def play(round_: Round) -> str:
    """Start two to four commands at once; each must do what it does alone."""
    rng = round_.rng
    round_.use("project", "project2", "offline", "home")
    round_.nodes.mkdir()
    if rng.random() < 0.3:
        round_.forget_builds()
        argvs = [rng.choice((_BUILD, ("build",), ("lock",))) for _ in range(rng.choice((2, 3)))]
    else:
        argvs = [rng.choice(_READING) for _ in range(rng.choice((2, 3)))]
        if rng.random() < 0.4:
            argvs.append(rng.choice(_CLEANING))
    folders = [rng.choice(("project", "project", "project2")) for _ in argvs]
    pairs = list(zip(argvs, folders, strict=True))
    round_.did("; ".join(f"{folder}: {argv[0]}" for argv, folder in pairs))
    running = []
    (round_.folder / "said").mkdir()
    for number, (argv, folder) in enumerate(zip(argvs, folders, strict=True)):
        out = round_.folder / "said" / f"at-once-{number}"
        running.append((start(round_, argv, out=out, folder=folder), argv, out))
    ended = [finish(process, argv, out, 80) for process, argv, out in running]
    for done, folder in zip(ended, folders, strict=True):
        _as_alone(done, folder)
    checks.whole_store(round_.offline)
    after = sound(stager(round_, *_BUILD))
    require(after.code == 0, "a build succeeds afterwards", after)
    checks.runs_right(round_)
    checks.nothing_in_tmp(round_.offline)
    checks.nothing_half_written(round_.nodes)
    return SAME


def _as_alone(done: Done, folder: str) -> None:
    sound(done)
    require(done.code == 0, "a command succeeds as it does alone", done)
    if done.argv[1] == "exec":
        wanted = ANSWER if folder == "project" else OTHER_ANSWER
        require(done.out == wanted, "what runs is the project's own", done)


AREA = Area(
    name="concurrent",
    promise="commands at the same time on one store and one node each do what they do alone",
    play=play,
    rounds=120,
    sample=2,
    seconds=150,
)
