"""Altered environments: files of a published one lost, emptied, changed or added.

That is noticed before the environment is used, named, and the environment is whole again.
"""

from __future__ import annotations

from pathlib import Path

from .. import checks
from ..damage import DAMAGES
from ..product import refused, sound, stager
from ..registry import Area
from ..rounds import HEALED, REFUSED, Round, require
from ..world import ANSWER, EXEC, VERIFY, tree_of

_UNSEEN = "changed, its time put back"  # which only reading every byte (``--deep``) sees
_NO_DIFFERENCE = ("emptied", "cut", _UNSEEN, "changed", "rewritten")  # to an empty file
_ADDED = {
    "sitecustomize.py": "raise SystemExit('added')\n",
    "alpha.py": "VERSION = 'added'\n",
    "zzz.pth": "import os; os._exit(7)\n",
    "alpha/added.py": "X = 1\n",
    "json.py": "raise ImportError('added')\n",
}


def play(round_: Round) -> str:
    round_.use("project", "offline", "home", "nodes")
    local = round_.rng.random() < 0.4
    place = "stager-*/nodes/*/stager-*/envs/*" if local else "stager-*/envs/*"
    (env,) = round_.nodes.glob(place)
    before = _content(env)
    deep = local and round_.rng.random() < 0.5
    what = _alter(env, round_, deep=deep)
    argv = (*VERIFY, *(["--deep"] if deep else [])) if local else EXEC
    round_.did(f"{what}; stager {argv[0]}")
    done = sound(stager(round_, *argv, seconds=40))
    if done.code:
        refused(done)
        again = sound(stager(round_, *argv, seconds=40))
        require(again.code == 0, "it is healed when it is used again", f"{done}\n{again}")
    elif not local:
        require(done.out == ANSWER, "what runs is what the bundle holds", done)
    now = _content(env)
    changed = [f"{name}: {before.get(name)!r:.200} -> {now.get(name)!r:.200}"
               for name in sorted(before | now) if before.get(name) != now.get(name)]  # fmt: skip
    require(not changed, "the environment is whole again", "\n".join(changed[:10]))
    if done.code == 0 and not what.startswith("pyvenv.cfg "):
        words = ("repair", "damage", "heal", "mend", "replac", "restor")
        require(any(word in done.err + done.out for word in words), "what was wrong is said", done)
    return REFUSED if done.code else HEALED


def _alter(env: Path, round_: Round, *, deep: bool) -> str:
    rng = round_.rng
    site = env / "pkgs"
    if rng.random() < 0.15:
        name = rng.choice(sorted(_ADDED))
        site.joinpath(name).write_text(_ADDED[name])
        return f"{name} added"
    groups = [
        [*site.glob("*/*.py"), *site.glob("*/*.bin")],
        checks.files_of(site),
        checks.files_of(env),
        [env / "pyvenv.cfg", *site.glob("_stager_*"), env / ".stager" / "manifest.json"],
        checks.files_of(env / ".stager"),
    ]
    path = rng.choice(sorted(rng.choice(groups)))
    kinds = [kind for kind in sorted(DAMAGES) if deep or kind != _UNSEEN]
    if path.stat().st_size == 0:
        kinds = [kind for kind in kinds if kind not in _NO_DIFFERENCE]
    kind = rng.choice(kinds)
    DAMAGES[kind](path, rng)
    return f"{path.relative_to(env)} {kind}"


def _content(env: Path) -> dict[str, object]:
    """Return what an environment holds, without what Python may write beside it."""
    return {name: value for name, value in tree_of(env).items() if name != "pyvenv.cfg"}


AREA = Area(play, rounds=300, sample=1)
