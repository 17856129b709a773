"""Start-up in counts, not in seconds: processes that are started, modules that are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bundle.driver.transports.agent_program import STRIPPED
from bundle.protocol.digest import Digest
from stager.core.store import Store
from stager.pack.bundle import Packed
from stager.pack.node_program import add_bytecode, find_compiled_program, make_node_program
from tests.support.bundles import fetch_decompressor, make_bundle, node_program
from tests.support.jobs import job_for
from tests.support.processes import Done, run
from tests.support.wheelhouse import make_wheel


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """The smallest bundle."""
    store = Store(tmp_path_factory.mktemp("offline"))
    wheel = make_wheel(tmp_path_factory.mktemp("wheel"), "single")
    return make_bundle(store, [wheel], decompressor=fetch_decompressor(store), name="single")


@pytest.fixture(scope="module")
def program(packed: Packed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The node program with bytecode."""
    folder = tmp_path_factory.mktemp("program")
    path = node_program(packed.path, folder)
    return find_compiled_program(path, Store(folder))


def driver(program: Path, packed: Packed, folder: Path, **changed: Any) -> list[str]:
    job = job_for(packed, folder, **changed)
    (folder / "job.json").write_text(json.dumps(job.to_json()))
    return [sys.executable, "-I", "-S", str(program), "drive", str(folder / "job.json")]


def modules(argv: list[str], said: str = "") -> set[str]:
    """What a Python program imports, by its own report."""
    argv = [argv[0], "-X", "importtime", *argv[1:]]
    done = run(argv, given=said)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip() for line in lines}


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.needs("strace")
def test_a_warm_node_starts_one_agent_and_asks_one_python(
    program: Path, packed: Packed, tmp_path: Path
) -> None:
    """What the environment is; which Python there is the agent knows, as it is run by it."""
    argv = driver(program, packed, tmp_path)
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    trace = ["-ff", "-q", "-e", "trace=execve", "-o", str(tmp_path / "trace")]  # a file a process
    subprocess.run(["strace", *trace, *argv], check=True, capture_output=True, timeout=300)
    lines = [line for path in tmp_path.glob("trace.*") for line in path.read_text().splitlines()]
    found = [line for line in lines if line.startswith("execve(") and line.endswith(" = 0")]
    kinds = {
        "driver": sum('"drive"' in line for line in found),
        "agent": sum('"agent", "session"' in line for line in found),
        "python": sum('"import json, sys' in line for line in found),
        "probe": sum('"faulthandler"' in line for line in found),
    }
    assert kinds == {"driver": 1, "agent": 2, "python": 0, "probe": 2}  # two nodes
    assert len(found) == sum(kinds.values())


# --- modules -------------------------------------------------------------------------------------

ELSEWHERE = {
    "bundle.driver.driver", "bundle.driver.transports.slurm", "bundle.environment.clean",
    "bundle.launch.rank_monitor", "bundle.results.stream", "bundle.checks.deep",
}  # fmt: skip
"""Modules of the node program that have nothing to do with looking at a node."""


def without(found: set[str], others: set[str]) -> bool:
    """Whether none of these modules was imported; each of them must exist."""
    assert all(find_spec(name) is not None for name in others)
    return not found & others


def test_an_agent_imports_what_its_phase_needs(
    program: Path, packed: Packed, tmp_path: Path
) -> None:
    job = job_for(packed, tmp_path).to_json()
    asked = {
        "v": 1,
        "phase": "preflight",
        "job": job,
        "node": "local1",
        "node_rank": 0,
        "nodes_here": 1,
    }
    argv = [sys.executable, "-I", "-S", str(program), "agent", "session"]
    found = modules(argv, json.dumps(asked) + "\n")
    assert "bundle.checks.preflight" in found
    assert without(found, ELSEWHERE)
    assert not found & {"tarfile", "multiprocessing", "concurrent.futures", "asyncio", "ssl"}


def test_a_local_driver_does_without_slurms_part(
    program: Path, packed: Packed, tmp_path: Path
) -> None:
    found = modules(driver(program, packed, tmp_path))
    assert "bundle.driver.driver" in found
    slurms = {"bundle.driver.transports.slurm", "bundle.driver.transports.ssh"}
    assert without(found, slurms | {"bundle.driver.deep_check", "bundle.environment.clean"})


def test_a_jobs_command_does_without_what_makes_bundles(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without what only a build needs; some of that takes long to import."""
    monkeypatch.chdir(tmp_path)
    where = ["--allocation", "local", "--nodes", "1", "--log-dir", str(tmp_path / "logs")]
    argv = [sys.executable, "-m", "stager", "verify", "--bundle", str(packed.path), *where]
    found = modules(argv)
    assert "stager.jobs.driver" in found
    builds = {"stager.building.build", "stager.lock.lock", "stager.layers.layer_file"}
    assert without(found, builds)
    assert not found & {"packaging", "pydantic", "zstandard", "rich"}


# --- bytecode ------------------------------------------------------------------------------------


def rewritten(path: Path, change: dict[str, bytes]) -> Path:
    """The same zip with other content for some members."""
    changed = path.with_suffix(".changed")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, change.get(name, old.read(name)))
    return changed


def started(path: Path) -> Done:
    return run([sys.executable, "-I", "-S", path])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A program of two modules, with bytecode."""
    source = tmp_path / "source.pyz"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("__main__.py", "import other\nprint('main', other.NAME)\n")
        archive.writestr("other.py", "NAME = 'other'\n")
        archive.writestr("data.txt", "kept")
    path = tmp_path / "small.pyz"
    path.write_bytes(add_bytecode(source.read_bytes()))
    return path


def test_bytecode_is_what_runs(small: Path) -> None:
    sources = dict.fromkeys(("__main__.py", "other.py"), b"raise RuntimeError('compiled')\n")
    done = started(rewritten(small, sources))
    assert (done.returncode, done.stdout) == (0, "main other\n"), done.stderr


def test_bytecode_of_another_python_is_passed_over(small: Path) -> None:
    with zipfile.ZipFile(small) as archive:
        assert archive.read("data.txt") == b"kept"
        codes = {name: archive.read(name) for name in archive.namelist() if name.endswith(".pyc")}
    assert set(codes) == {"__main__.pyc", "other.pyc"}
    foreign = {name: b"\0\0\r\n" + code[4:] for name, code in codes.items()}
    done = started(rewritten(small, foreign))
    assert (done.returncode, done.stdout) == (0, "main other\n"), done.stderr


def test_every_module_of_the_node_program_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "node.pyz"
    path.write_bytes(add_bytecode(make_node_program()))
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
    sent = {name for name in names if name.startswith(STRIPPED)}  # to agents, which compile them
    sources = {name for name in names - sent if name.endswith(".py")}
    assert names - sent == sources | {f"{name}c" for name in sources}
    assert f"{STRIPPED}bundle/agent/agent.py" in sent


def test_a_program_is_compiled_once_and_again_when_it_is_damaged(
    tmp_path: Path, small: Path
) -> None:
    store = Store(tmp_path)
    program = make_node_program()
    source = store.programs / f"{Digest.of(program)}.pyz"
    source.write_bytes(program)
    made = find_compiled_program(source, store)
    assert made.name == f"{source.stem}.{sys.implementation.cache_tag}.pyz"
    whole = made.read_bytes()
    before = made.stat().st_ino
    assert find_compiled_program(source, store).stat().st_ino == before
    for damaged in (whole[:-1], whole[:5000] + b"x" + whole[5001:], b""):
        made.write_bytes(damaged)
        assert find_compiled_program(source, store) == made
        assert made.read_bytes() == whole or os.path.getsize(made) == len(whole)
        assert started(made).returncode == 2  # it wants a command
    made.write_bytes(small.read_bytes())  # whole, and of another program
    find_compiled_program(source, store)
    assert made.read_bytes() == whole or os.path.getsize(made) == len(whole)
