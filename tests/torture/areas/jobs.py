"""Fuzzed job files, requests and manifests: one that makes no sense is refused with a message."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from hypothesis import strategies as st

from bundle.format.manifest import ManifestError, parse
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.job import Job
from bundle.protocol.problem import NodeError
from tests.support.bundles import node_program

from .. import fuzz
from ..product import environment
from ..registry import Area
from ..rounds import REFUSED, SAME, Round, require

_CHANGES = fuzz.changes(st.sampled_from(fuzz.ODD))
# Paths, which mean what they say: another one is another place, not a fault.
_HARMLESS = ("log_dir", "run_dir", "node_root", "bundle", "outputs", "python_hints", "out_dir")


def play(round_: Round) -> str:
    kind = ("manifest", "job", "request", "drive")[round_.number % 4]
    round_.did(kind)
    if kind == "manifest":
        raw = json.loads(round_.world.bundle.manifest.to_bytes())
        fuzz.examples(round_, _CHANGES, lambda change: _manifest(fuzz.changed(raw, change)))
        return SAME
    round_.use("home", "offline")
    (file,) = round_.logs.glob("job.*.json")
    job = json.loads(file.read_text())
    if kind == "job":
        fuzz.examples(round_, _CHANGES, lambda change: _job(fuzz.changed(job, change)))
        return SAME
    harmless = {key: job.pop(key) for key in _HARMLESS if key in job}
    number, new = round_.rng.randrange(10**6), round_.rng.choice(fuzz.ODD)
    change = (number, new, round_.rng.choice(("set", "set", "delete")))
    changed = {**harmless, **fuzz.changed(job, change)}
    round_.did(str([(key, changed.get(key)) for key in job if changed.get(key) != job[key]])[:200])
    return _program(round_, kind, changed)


def _manifest(value: Any) -> str:
    value.pop("id", None)
    try:
        value["id"] = Digest.of(canonical_json(value))
    except (ValueError, UnicodeEncodeError):
        return SAME
    return fuzz.reads(lambda: parse(canonical_json(value)), ManifestError, value)


def _job(value: Any) -> str:
    return fuzz.reads(lambda: Job.from_json(value), NodeError, value)


def _program(round_: Round, kind: str, job: object) -> str:
    """Let the node program read a job, from a file or in a request."""
    path = round_.folder / "job.json"
    path.write_text(json.dumps(job))
    node = {"node": "local1", "node_rank": 0, "nodes_here": 1}
    asked = {"v": 1, "phase": "preflight", "job": job, **node}
    # The other phases are asked with what this one has answered.
    argv = ["agent", "preflight"] if kind == "request" else ["drive", str(path)]
    here = round_.folder / "here"
    here.mkdir()
    program = node_program(round_.world.bundle.path, round_.folder)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(program), *argv],
        input=json.dumps(asked) + "\n" if kind == "request" else "",
        capture_output=True, text=True, check=False, timeout=600,
        env=environment(round_), cwd=here,
    )  # fmt: skip
    said = f"node.pyz {argv}\nexit {done.returncode}\n{done.stdout[-2500:]}{done.stderr[-2500:]}"
    require("Traceback" not in done.stderr + done.stdout, "no traceback", said)
    require(done.returncode in (0, 1, 2, 3), "the exit code is 0, 1, 2 or 3", said)
    if done.returncode:
        require(bool((done.stderr + done.stdout).strip()), "it says why", said)
    return REFUSED if done.returncode else SAME


AREA = Area(play, rounds=200, sample=2)
