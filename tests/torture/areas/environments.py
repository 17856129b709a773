"""Altered environments: files of a published one lost, emptied, changed or added."""

from __future__ import annotations

from pathlib import Path

from .. import checks
from ..damage import DAMAGES
from ..product import refused, sound, stager
from ..registry import Area
from ..rounds import HEALED, REFUSED, Round, require
from ..world import ANSWER, PROGRAM, tree_of

_UNSEEN = ("changed, its time put back",)
"""What keeps size and time: every byte must be read to see it, which ``verify --deep`` does."""
_KEEPING = (*_UNSEEN, "changed", "rewritten")
"""What makes no difference to an empty file."""
_ADDED = {
    "sitecustomize.py": "raise SystemExit('added')\n",
    "alpha.py": "VERSION = 'added'\n",
    "zzz.pth": "import os; os._exit(7)\n",
    "alpha/added.py": "X = 1\n",
    "json.py": "raise ImportError('added')\n",
}


def play(round_: Round) -> str:
    """Alter an environment on the node, then use it."""
    round_.use("project", "offline", "home", "nodes")
    local = round_.rng.random() < 0.4
    (env,) = (round_.nodes.glob("stager-*/nodes/*/stager-*/envs/*") if local else
              round_.nodes.glob("stager-*/envs/*"))  # fmt: skip
    before = _content(env)
    deep = local and round_.rng.random() < 0.5
    what, harmless = _alter(env, round_, deep=deep)
    round_.did(what)
    argv: tuple[str, ...] = ("exec", "--", "python", "-c", PROGRAM)
    if local:
        argv = ("verify", "--allocation", "local", *(["--deep"] if deep else []))
    round_.did(f"stager {' '.join(argv)[:30]}")
    done = sound(stager(round_, *argv, seconds=40))
    if done.code:
        refused(done)
        again = sound(stager(round_, *argv, seconds=40))
        require(again.code == 0, "it is healed when it is used again", f"{done}\n{again}")
        require(_content(env) == before, "the environment is whole again", _difference(env, before))
        return REFUSED
    if not local:
        require(done.out == ANSWER, "what runs is what the bundle holds", done)
    require(_content(env) == before, "the environment is whole again", _difference(env, before))
    if not harmless:
        told = done.err + done.out
        require(
            any(word in told for word in ("repair", "damage", "heal", "mend", "replac", "restor")),
            "what was wrong is said",
            done,
        )
    return HEALED


def _alter(env: Path, round_: Round, *, deep: bool) -> tuple[str, bool]:
    """Alter something; return what, and whether nobody needs to be told."""
    rng = round_.rng
    site = env / "pkgs"
    if rng.random() < 0.15:
        name = rng.choice(sorted(_ADDED))
        site.joinpath(name).write_text(_ADDED[name])
        return f"{name} added", False
    groups = [
        [*site.glob("*/*.py"), *site.glob("*/*.bin")],
        checks.files_of(site),
        checks.files_of(env),
        [env / "pyvenv.cfg", *site.glob("_stager_*"), env / ".stager" / "manifest.json"],
        checks.files_of(env / ".stager"),
    ]
    path = rng.choice(sorted(rng.choice(groups)))
    kinds = [kind for kind in sorted(DAMAGES) if deep or kind not in _UNSEEN]
    if path.stat().st_size == 0:
        kinds = [kind for kind in kinds if kind not in ("emptied", "cut", *_KEEPING)]
    kind = rng.choice(kinds)
    DAMAGES[kind](path, rng)
    return f"{path.relative_to(env)} {kind}", path.name in ("pyvenv.cfg",)


def _content(env: Path) -> dict[str, str]:
    """Return what an environment holds, without what Python may write beside it."""
    return {name: value for name, value in tree_of(env).items() if name != "pyvenv.cfg"}


def _difference(env: Path, before: dict[str, str]) -> str:
    now = _content(env)
    names = sorted(before.keys() | now.keys())
    return "\n".join(f"{n}: {before.get(n)} -> {now.get(n)}" for n in names
                     if before.get(n) != now.get(n))[:2000]  # fmt: skip


AREA = Area(
    name="environments",
    promise="a published environment that has been altered is noticed before it is used, named, "
    "and whole again",
    play=play,
    rounds=300,
    sample=6,
)
