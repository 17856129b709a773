"""Locks of requirement files as public machine learning projects have them, beside those of uv.

``python -m benchmarks.compare_with_uv [NAME...]`` writes each input into a folder of its own, locks
it with ``stager`` and with ``uv pip compile`` (``uv export`` for a ``uv.lock``), and compares
packages, versions and digests. It needs a package index, so it is no part of CI.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker

from bundle.system.processes import CompletedCommand
from stager.config import load
from stager.core import toml
from stager.core.errors import StagerError
from stager.core.processes import run
from stager.core.store import Store
from stager.lock.lock import ResolveOptions, make_lock
from stager.lock.spec import read_spec
from stager.lock.uv import require_uv

from .requirement_inputs import INPUTS

_SECONDS = 900.0
_FOLDER = "a folder"
"""In place of the version of what uv does not build."""
_ENTRY = re.compile(r"(?P<file>[^\[:]+)(\[(?P<extras>.*)\]|:(?P<groups>.*))?")


@dataclass(frozen=True)
class Answer:
    """What a tool locks: versions, and the digests of the files of each."""

    versions: dict[str, str]
    """The version of each package."""
    digests: dict[str, set[str]]
    """The sha256 of each file that it lists for the package."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the inputs; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="inputs; all by default")
    names = parser.parse_args(arguments).names or list(INPUTS)
    _use_uvs_indexes()
    equal = 0
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            difference = compare(name, Path(folder))
        equal += not difference
        seconds = time.monotonic() - began
        print(f"{name:<24} {seconds:5.1f} s  {difference or 'equal'}", flush=True)
    print(f"{equal} of {len(names)} equal")
    return 0 if equal == len(names) else 1


def _use_uvs_indexes() -> None:
    """Take pip's indexes away, which stager passes on and uv by itself does not read."""
    os.environ["PIP_CONFIG_FILE"] = os.devnull
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        os.environ.pop(name, None)


def compare(name: str, folder: Path) -> str:
    """Return how the two locks of an input differ; empty if they are equal."""
    entry, files = INPUTS[name]
    project = folder / "project"
    for path, text in files.items():
        file = project / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    try:
        theirs = _ask_uv(project, entry)
        ours = _ask_stager(project, entry, folder / "store")
    except StagerError as exc:
        return f"{exc.message} {' '.join(exc.context)[:600]}"
    return _difference(ours, theirs)


def _difference(ours: Answer, theirs: Answer) -> str:
    found = []
    for name in sorted(ours.versions.keys() | theirs.versions.keys()):
        one, other = ours.versions.get(name, "-"), theirs.versions.get(name, "-")
        if other == _FOLDER and one != "-":
            continue
        if one != other:
            found.append(f"{name} {one} instead of {other}")
        elif not ours.digests[name] <= theirs.digests[name]:
            found.append(f"{name} {one}: another file")
    return "; ".join(found)


def _ask_stager(project: Path, entry: str, store: Path) -> Answer:
    table = {"environment": {"requirements": [entry]}}
    spec = read_spec(load.parse(table, root=project, source=project / "stager.toml"))
    path = project / "pylock.toml"
    lock = make_lock(spec, path=path, store=Store(store), options=ResolveOptions())
    return Answer(
        {file.name: str(file.version) for file in lock.files},
        {file.name: {str(file.sha256)} for file in lock.files},
    )


def _ask_uv(project: Path, entry: str) -> Answer:
    if entry.startswith("uv.lock"):
        _uv(project, ["lock", "-q"])
    _uv(project, [*_arguments(entry), "-q", "-o", "pylock.uv.toml", "--python", sys.executable])
    packages = toml.read(project / "pylock.uv.toml").get("packages", [])
    versions, digests = {}, {}
    for package in packages:
        if "marker" in package and not Marker(package["marker"]).evaluate():
            continue  # the lock is for all systems
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        versions[package["name"]] = package.get("version", _FOLDER)
        digests[package["name"]] = {file["hashes"]["sha256"] for file in files}
    return Answer(versions, digests)


def _arguments(entry: str) -> list[str]:
    """Return the arguments of uv that lock what an entry of ``requirements`` stands for."""
    match = _ENTRY.fullmatch(entry)
    file = match["file"] if match else entry
    extras = [name for name in (match["extras"] or "").split(",") if name] if match else []
    groups = [name for name in (match["groups"] or "").split(",") if name] if match else []
    if file == "uv.lock":
        argv = ["export", "--locked", "--no-emit-project", "--no-dev"]
        argv += [word for name in extras for word in ("--extra", name)]
        argv += [word for name in groups for word in ("--only-group", name)]
    else:
        argv = ["pip", "compile", "--generate-hashes"]
        argv += [] if groups else [file]
        argv += [word for name in extras for word in ("--extra", name)]
        argv += [word for name in groups for word in ("--group", f"{file}:{name}")]
    return [*argv, "--format", "pylock.toml"]


def _uv(project: Path, argv: Sequence[str]) -> CompletedCommand:
    env = {"UV_PYTHON_DOWNLOADS": "never"}
    return run([*require_uv(), *argv], timeout=_SECONDS, cwd=project, env=env)


if __name__ == "__main__":
    sys.exit(main())
