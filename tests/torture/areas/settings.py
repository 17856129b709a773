"""Fuzzed settings, requirements and locks.

Whatever stands in one is understood, or refused with a message.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tomllib
from hypothesis import strategies as st

from stager.config.load import load
from stager.core import toml
from stager.core.errors import StagerError
from stager.core.values import Target
from stager.lock.pylock import read_lock
from stager.lock.spec import read_spec

from .. import fuzz
from ..registry import Area
from ..rounds import SAME, Round, called

_KEYS = {
    "environment": ("requirements", "constraints", "python", "platform", "torch-backend",
                    "offline-root", "imports", "prune", "find-links", "no-build-isolation",
                    "build-env", "nosuch"),
    "project": ("path", "exclude", "outputs", "resume-limit", "command", "name"),
    "assets": ("paths", "models", "datasets", "spaces", "env"),
    "cluster": ("nodes", "partition", "cpus-per-task", "time", "salloc-args", "node-root", "stage",
                "min-nodes", "gpus-per-node", "container-image", "container-mounts", "account",
                "exclude", "log-dir", "spares"),
    "launch": ("nproc-per-node", "launcher", "backend", "interface", "omp-num-threads",
               "max-restarts", "pass-env", "grace-seconds", "watch", "hang-timeout", "retries"),
    "nosuch": ("key",),
}  # fmt: skip
_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
_WORDS = st.sampled_from(
    ["", ".", "..", "/", "~", "~nobody", "a\0b", "3.11", "3.9", "3.99", "3", "auto", "never", "cpu",
     "torchrun", "srun", "gloo", "nccl", "1:2", "2:1", "00:30:00", "-1", "9" * 5000, "\u202e",
     "\x1b[2J", "manylinux_2_28_x86_64", "nosuch_1_2", "../..", "n" * 5000, "*.pt", "[", "!",
     "a\nb", "requirements.in", "pyproject.toml", "notes", "train.py", "-r x", "--index-url x",
     "1e3", "\ufeff"]
)  # fmt: skip
_SCALARS = st.one_of(_WORDS, _TEXT, st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats())
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS | _TEXT, inner, max_size=3),
    max_leaves=6,
)
_SETTINGS = st.dictionaries(
    st.sampled_from(sorted(_KEYS)),
    st.one_of(
        _VALUES,
        st.dictionaries(
            st.sampled_from(sorted({key for keys in _KEYS.values() for key in keys})),
            _VALUES,
            max_size=4,
        ),
    ),
    max_size=4,
)
_NAMES = st.sampled_from(["alpha", "beta", "Ga.m_MA", "a" * 300, "-a", "a-", "\u00e4", "", "torch"])
_SPECS = st.sampled_from(
    ["", "==1.0", ">=1,<2", "~=1", "==1.*", "===x", "==", "=>1", "@ file:///x.whl",
     "@ https://u:p@h/x.whl", "@ http://[::1", "@", "[extra]", "[", "[a,b]==1",
     "; python_version<'3'", "; extra == 'x'", "; nosuch == 1", ";", "; (((", "==1!2.0+x",
     "== 1.0 # remark", "\\", "==" + "1." * 500]
)  # fmt: skip
_LINES = st.one_of(
    st.builds(lambda name, spec: f"{name} {spec}", _NAMES, _SPECS),
    st.sampled_from(
        ["-r requirements.in", "-r nosuch.txt", "-c x", "-e .", "--hash=sha256:x", "--index-url",
         "--find-links /", "# remark", "\\", "${HOME}", "./notes", "/nonexistent.whl", "git+ssh://x",
         "file:///etc/passwd", "http://127.0.0.1:1/x.whl", "--no-binary :all:", "-", "--", "a b c"]
    ),
    _TEXT,
)  # fmt: skip
_REQUIREMENTS = st.lists(_LINES, max_size=6)


def play(round_: Round) -> str:
    round_.use("project")
    number = round_.number % len(_KINDS)
    strategy, attempt = _KINDS[number]
    round_.did(called(attempt))
    fuzz.examples(round_, strategy, partial(attempt, round_))
    return SAME


def _understood(folder: Path) -> str:
    """Read everything a build reads first; hold that what is wrong is said."""

    def read() -> None:
        spec = read_spec(load(folder))
        read_lock(folder / "pylock.toml", spec.target)

    return fuzz.reads(read, StagerError, most=4000)


def _settings(round_: Round, value: dict[str, Any]) -> str:
    (round_.project / "stager.toml").write_text(_table(value), encoding="utf-8")
    return _understood(round_.project)


def _requirements(round_: Round, lines: list[str]) -> str:
    folder = round_.project
    (folder / "requirements.in").write_text("\n".join(lines), encoding="utf-8")
    (folder / "stager.toml").write_text('[environment]\nrequirements = ["requirements.in"]\n')
    return _understood(folder)


def _lock(round_: Round, change: fuzz.Change) -> str:
    sound = (round_.world.template / "project" / "pylock.toml").read_text()
    text = _table(fuzz.changed(tomllib.loads(sound), change))
    path = round_.project / "pylock.toml"
    path.write_text(text, encoding="utf-8")
    # The message has all of a version that is none, however long.
    return fuzz.reads(partial(read_lock, path, Target.from_host()), StagerError, text)


def _bytes(round_: Round, change: tuple[str, int, bytes]) -> str:
    name, place, data = change
    source = round_.world.template / "project" / name
    content = bytearray(source.read_bytes() if source.exists() else b"alpha\nbeta==1.1\n")
    at = place % (len(content) + 1)
    content[at : at + len(data)] = data
    (round_.project / name).write_bytes(content)
    outcome = _understood(round_.project)
    if source.exists():
        shutil.copy(source, round_.project / name)
    return outcome


_FILES = st.sampled_from(("stager.toml", "pylock.toml", "requirements.in"))
_KINDS: tuple[tuple[st.SearchStrategy[Any], Callable[..., str]], ...] = (
    (_SETTINGS, _settings),
    (_REQUIREMENTS, _requirements),
    (fuzz.changes(_VALUES), _lock),
    (st.tuples(_FILES, st.integers(0, 10**6), st.binary(max_size=20)), _bytes),
)


def _table(value: dict[str, Any]) -> str:
    lines = (f"{toml.dump_inline(name)} = {toml.dump_inline(one)}\n" for name, one in value.items())
    return "".join(lines).replace("NaN", "nan").replace("Infinity", "inf")


AREA = Area(play, rounds=120, sample=2)
