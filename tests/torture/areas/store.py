"""Damaged stores: every file of an offline root lost, changed, or under another's name.

It heals or refuses; what runs is what was built, never other content under its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from .. import checks
from ..damage import DAMAGES, copy_over, swap
from ..product import Done, refused, sound, stager, succeeded
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, Round, require
from ..world import ANSWER, EXEC, OTHER_ANSWER, VERIFY

_BUILD = ("build", "--no-prove")
_FIRST = (
    EXEC, EXEC, _BUILD, ("build",), VERIFY, ("inspect", "--files"), ("clean", "--store-only"),
    ("clean", "--all", "--store-only"), ("script", "--launcher", "srun", "--", "train.py"),
    ("lock",),
)  # fmt: skip


def play(round_: Round) -> str:
    round_.use("project", "project2", "offline", "home")
    rng = round_.rng
    if rng.random() < 0.5:
        round_.use("nodes")
    if rng.random() < 0.5:  # copied, the notes of what has been checked do not hold
        succeeded(stager(round_, *_BUILD))
    round_.did(_damage(round_))
    first = rng.choice(_FIRST)
    round_.did(f"stager {' '.join(first)}"[:60])
    done = sound(stager(round_, *first, seconds=25))
    _right_or_refused(done, first)
    built = sound(stager(round_, *_BUILD, seconds=25))
    if built.code:
        # It may say what to remove, or ask to be run again.
        refused(built)
        built = sound(stager(round_, *_BUILD, seconds=25))
        if built.code:
            refused(built)
            return REFUSED
    # What a build has said yes to must be what was asked for.
    used = sound(stager(round_, *EXEC, seconds=25))
    _right_or_refused(used, EXEC)
    if used.code and "move it away" in used.err:  # no build needs what is in the way there
        return REFUSED
    require(used.code == 0, "what was built can be used", used)
    other = sound(stager(round_, *EXEC, seconds=25, folder="project2"))
    if other.code == 0:
        require(other.out == OTHER_ANSWER, "another project's bundle is its own", other)
    return SAME if done.code == 0 else HEALED


def _right_or_refused(done: Done, argv: Sequence[str]) -> None:
    if done.code:
        refused(done)
    elif argv[0] == "exec":
        require(done.out == ANSWER, "what runs is what was built, or it is refused", done)
    elif argv[0] == "verify":
        require(" OK " in done.out, "verify names a sound node", done)


def _damage(round_: Round) -> str:
    rng, offline = round_.rng, round_.offline
    folders = sorted(path for path in offline.iterdir() if path.is_dir() and any(path.iterdir()))
    roll = rng.random()
    if roll < 0.1:
        return _folder(rng.choice(folders), round_)
    files = checks.files_of(rng.choice(folders)) if roll < 0.85 else checks.files_of(offline)
    files = files or checks.files_of(offline)
    path = rng.choice(files)
    others = [one for one in files if one != path and one.suffix == path.suffix]
    if others and rng.random() < 0.4:
        other = rng.choice(others)
        names = f"{path.relative_to(offline)} and {other.relative_to(offline)}"
        if rng.random() < 0.5:
            swap(path, other)
            return f"{names} swapped"
        copy_over(other, path, keep_time=rng.random() < 0.5)
        return f"{names}: the first is a copy of the second"
    kind = rng.choice(sorted(DAMAGES))
    DAMAGES[kind](path, rng)
    return f"{path.relative_to(offline)} {kind}"


def _folder(folder: Path, round_: Round) -> str:
    kind = round_.rng.choice(("gone", "a file", "a link to nowhere", "empty"))
    shutil.rmtree(folder)
    if kind == "a file":
        folder.write_text("x")
    elif kind == "a link to nowhere":
        folder.symlink_to("/nonexistent/place")
    elif kind == "empty":
        folder.mkdir()
    return f"{folder.name}/: {kind}"


AREA = Area(play, rounds=350, sample=1)
