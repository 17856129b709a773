"""Fuzzed job files, requests and manifests: the node program says what is wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from bundle.format.manifest import ManifestError, parse
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.job import parse_job

from .. import fuzz
from ..product import environment
from ..registry import Area
from ..rounds import REFUSED, SAME, Broken, Round, require

_ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, -0.5, 1e308, "", "x", "..", "\0", "\n",
     "9" * 5000, "1." * 3000, "\x1b[2J", "\ud800", "n" * 5000, [], [[]], [None], ["x"], {},
     {"a": 1}, [1] * 50]
)  # fmt: skip
_CHANGE = st.tuples(
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    _ODD,
    st.sampled_from(("set", "set", "set", "delete", "add")),
)
_HARMLESS = ("log_dir", "run_dir", "node_root", "bundle", "outputs", "python_hints", "out_dir")
"""Paths, which mean what they say: another one is another place, not a fault."""


def play(round_: Round) -> str:
    """Change a description that the far side reads, and let it read."""
    kind = ("manifest", "job", "request", "drive")[round_.number % 4]
    round_.did(kind)
    if kind == "manifest":
        assert round_.world.bundle is not None
        raw = json.loads(round_.world.bundle.manifest.to_bytes())
        fuzz.examples(round_, _CHANGE, lambda change: _manifest(raw, change))
        return SAME
    round_.use("home", "offline")
    (file,) = round_.logs.glob("job.*.json")
    job = json.loads(file.read_text())
    if kind == "job":
        fuzz.examples(round_, _CHANGE, lambda change: _job(job, change))
        return SAME
    changed = _one(round_, job)
    return _agent(round_, changed) if kind == "request" else _drive(round_, changed)


def _manifest(raw: dict[str, Any], change: tuple[list[int], Any, str]) -> str:
    value = _changed(raw, change)
    if isinstance(value, dict):
        value.pop("id", None)
        try:
            value["id"] = Digest.of(canonical_json(value))
        except (ValueError, UnicodeEncodeError):
            return SAME
    return _parsed(lambda: parse(canonical_json(value)), (ManifestError,), value)


def _job(raw: dict[str, Any], change: tuple[list[int], Any, str]) -> str:
    value = _changed(raw, change)
    from bundle.protocol.problem import NodeError

    return _parsed(lambda: parse_job(value), (NodeError,), value)


def _parsed(read: Any, expected: tuple[type[Exception], ...], value: object) -> str:
    try:
        read()
    except expected as exc:
        require(len(str(exc)) < 20_000, "a message can be read", str(exc)[:500])
        return REFUSED
    except Exception as exc:
        import traceback

        trace = "".join(traceback.format_exception(exc)[-5:])
        raise Broken("no exception but the product's own", f"{trace}{str(value)[:800]}") from exc
    return SAME


def _one(round_: Round, job: dict[str, Any]) -> object:
    rng = round_.rng
    odd: tuple[Any, ...] = (None, True, -1, 0, 2**63, 1.5, "", "x", "\0", "9" * 5000, [], [None],
                            {}, "\x1b[2J", [1] * 50, {"a": 1})  # fmt: skip
    paths = [path for path in _paths(job) if path[0] not in _HARMLESS]
    path = rng.choice(paths)
    value = json.loads(json.dumps(job))
    at: Any = value
    for key in path[:-1]:
        at = at[key]
    new = rng.choice(odd)
    how = rng.choice(("set", "set", "delete"))
    if how == "delete" and isinstance(at, dict):
        del at[path[-1]]
    else:
        at[path[-1]] = new
    round_.did(f"{how} {'.'.join(map(str, path))}: {str(new)[:40]!r}")
    return value


def _paths(value: object, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [before] if before else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _paths(inner, (*before, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            found += _paths(inner, (*before, number))
    return found


def _drive(round_: Round, job: object) -> str:
    path = round_.folder / "job.json"
    path.write_text(json.dumps(job))
    return _program(round_, "drive", str(path), given="")


def _agent(round_: Round, job: object) -> str:
    phase = "preflight"  # the others are asked with what this one has answered
    asked = {"v": 1, "job": job, "node": "local1", "node_rank": 0, "nodes_here": 1}
    return _program(round_, "agent", phase, given=json.dumps(asked) + "\n")


def _program(round_: Round, *argv: str, given: str) -> str:
    program = round_.folder / "node.pyz"
    assert round_.world.bundle is not None
    from tests.support.bundles import node_program

    round_.nodes.mkdir()
    node_program(round_.world.bundle.path, round_.folder)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(program), *argv],
        input=given, capture_output=True, text=True, check=False, timeout=600,
        env=environment(round_), cwd=_place(round_),
    )  # fmt: skip
    said = f"node.pyz {' '.join(argv)}\nexit {done.returncode}\n"
    said += done.stdout[-2500:] + done.stderr[-2500:]
    require("Traceback" not in done.stderr + done.stdout, "no traceback", said)
    require(done.returncode in (0, 1, 2, 3), "the exit code is 0, 1, 2 or 3", said)
    if done.returncode:
        require(bool((done.stderr + done.stdout).strip()), "it says why", said)
        return REFUSED
    return SAME


def _place(round_: Round) -> Path:
    place = round_.folder / "here"
    place.mkdir()
    return place


def _changed(raw: Any, change: tuple[list[int], Any, str]) -> Any:
    steps, value, how = change
    copy = json.loads(json.dumps(raw))
    at = copy
    for step in steps[:-1]:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        inner = at[keys[step % len(keys)]]
        if not isinstance(inner, dict | list) or not inner:
            break
        at = inner
    keys = list(at) if isinstance(at, dict) else list(range(len(at)))
    key = keys[steps[-1] % len(keys)]
    if how == "set":
        at[key] = value
    elif how == "delete":
        del at[key]
    elif isinstance(at, dict):
        at["nosuch"] = value
    else:
        at.append(value)
    return copy


AREA = Area(
    name="jobs",
    promise="a job file, a request or a manifest that makes no sense is refused with a message",
    play=play,
    rounds=200,
    sample=6,
)
