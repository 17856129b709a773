"""Fuzzed settings, requirements and locks: understood, or refused with the place that is wrong."""

from __future__ import annotations

import json
import math
import shutil
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tomllib
from hypothesis import strategies as st

from stager.config.load import load
from stager.core.errors import StagerError
from stager.core.values import Target
from stager.lock.pylock import read_lock
from stager.lock.spec import read_spec

from .. import fuzz
from ..registry import Area
from ..rounds import REFUSED, SAME, Broken, Round, require

_KEYS = {
    "environment": ("requirements", "constraints", "python", "platform", "torch-backend",
                    "offline-root", "imports", "prune", "find-links", "no-build-isolation",
                    "build-env", "nosuch"),
    "project": ("path", "exclude", "outputs", "resume-limit", "command", "name"),
    "assets": ("paths", "models", "datasets", "spaces", "env"),
    "cluster": ("nodes", "partition", "cpus-per-task", "time", "salloc-args", "node-root", "stage",
                "min-nodes", "gpus-per-node", "container-image", "container-mounts", "account",
                "exclude", "log-dir"),
    "launch": ("nproc-per-node", "launcher", "backend", "interface", "omp-num-threads",
               "max-restarts", "pass-env", "grace-seconds"),
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
    """Fuzz one of the files that a user writes."""
    round_.use("project")
    kind = ("settings", "requirements", "lock", "bytes")[round_.number % 4]
    round_.did(kind)
    strategy: st.SearchStrategy[Any]
    if kind == "settings":
        strategy, attempt = _SETTINGS, lambda value: _settings(round_.project, value)
    elif kind == "requirements":
        strategy, attempt = _REQUIREMENTS, lambda value: _requirements(round_.project, value)
    elif kind == "lock":
        paths = st.lists(st.integers(0, 20), min_size=1, max_size=4)
        strategy = st.tuples(paths, _VALUES, st.sampled_from(("set", "delete", "repeat")))
        attempt = lambda value: _lock(round_.project, value)  # noqa: E731
    else:
        strategy = st.tuples(st.sampled_from(("stager.toml", "pylock.toml", "requirements.in")),
                             st.integers(0, 10**6), st.binary(max_size=20))  # fmt: skip
        attempt = lambda value: _bytes(round_, value)  # noqa: E731
    fuzz.examples(round_, strategy, attempt)
    return SAME


def _understood(folder: Path) -> str:
    """Read everything a build reads first; hold that what is wrong is said."""

    def read() -> None:
        config = load(folder)
        spec = read_spec(config)
        read_lock(folder / "pylock.toml", spec.target)

    return _judge(read)


def _judge(read: Callable[[], object], text: str = "") -> str:
    try:
        read()
    except StagerError as exc:
        require(bool(exc.message.strip()), "the message says something", repr(exc))
        require(len(exc.message) < 4000, "a message can be read", exc.message)
        return REFUSED
    except Exception as exc:
        trace = "".join(traceback.format_exception(exc)[-6:])
        raise Broken("no exception but the product's own errors", f"{trace}\n{text}") from exc
    return SAME


def _settings(folder: Path, value: dict[str, Any]) -> str:
    text = "".join(f"{_key(section)} = {_toml(content)}\n" for section, content in value.items())
    (folder / "stager.toml").write_text(text, encoding="utf-8")
    return _understood(folder)


def _requirements(folder: Path, lines: list[str]) -> str:
    (folder / "requirements.in").write_text("\n".join(lines), encoding="utf-8")
    (folder / "stager.toml").write_text('[environment]\nrequirements = ["requirements.in"]\n')
    return _understood(folder)


def _lock(folder: Path, change: tuple[list[int], Any, str]) -> str:
    """Set, remove or repeat one value of a real lock."""
    steps, value, how = change
    source = folder / "pylock.sound.toml"
    if not source.exists():
        shutil.copy(folder / "pylock.toml", source)
    raw: Any = tomllib.loads(source.read_text())
    at = raw
    for step in steps[:-1]:
        keys = list(at.keys()) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        inner = at[keys[step % len(keys)]]
        if not isinstance(inner, dict | list) or not inner:
            break
        at = inner
    keys = list(at.keys()) if isinstance(at, dict) else list(range(len(at)))
    key = keys[steps[-1] % len(keys)]
    if how == "set":
        at[key] = value
    elif how == "delete":
        del at[key]
    elif isinstance(at, list):
        at.append(at[key])
    text = "".join(f"{_key(name)} = {_toml(content)}\n" for name, content in raw.items())
    path = folder / "pylock.toml"
    path.write_text(text, encoding="utf-8")
    return _judge(partial(read_lock, path, Target.from_host()), text)


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


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    """Write a value as TOML; what TOML cannot say is written as Python says it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return str(value) if math.isfinite(value) else str(value).replace("-nan", "nan")
    if isinstance(value, str):
        return _key(value)
    if isinstance(value, int):
        return str(value)
    return value.isoformat() if hasattr(value, "isoformat") else json.dumps(str(value))


AREA = Area(
    name="settings",
    promise="whatever stands in stager.toml, a requirements file or a lock is understood, or "
    "refused with a message",
    play=play,
    rounds=120,
    sample=5,
)
