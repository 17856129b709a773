"""Nodes and bundles that cannot be used: each a clear error, nothing half-written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from stager.core.store import Store
from tests.support.building import Project, wheel_of
from tests.support.bundles import forge, make_bundle
from tests.support.namespaces import entering
from tests.support.processes import run
from tests.support.wheelhouse import make_wheel

STAGER = str(Path(sys.executable).with_name("stager"))


def verify(
    bundle: Path, folder: Path, *, mount: str = "", env: Mapping[str, str] | None = None
) -> tuple[int, dict[str, object], str]:
    """Exit code, JSON and talk of ``stager verify`` on two nodes, after mounting something."""
    argv = [STAGER, "verify", "--json", "--allocation", "local", "--nodes", "2"]
    argv += ["--log-dir", "logs"]
    if mount:
        argv = [*entering("-m", mount), *argv]
    done = run([*argv, "--bundle", str(bundle)], cwd=folder, env={**os.environ, **(env or {})})
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def said_of_nodes(report: Mapping[str, object]) -> str:
    nodes = report["nodes"]
    assert isinstance(nodes, list)
    return " ".join(problem for node in nodes for problem in node["problems"])


@pytest.fixture
def tiny(tmp_path: Path, zstandard_wheel: Path) -> Path:
    """A bundle of one wheel that takes 8 MB."""
    store = Store(tmp_path / "made")
    one = make_wheel(tmp_path, "single", files={"single.py": "", "large.txt": "8 bytes\n" * 10**6})
    return make_bundle(store, [one], decompressor=wheel_of(zstandard_wheel), name="tiny").path


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("noexec", "noexec"),
        ("size=6m", "are free"),
    ],
)
def test_a_file_system_that_does_not_do(
    tiny: Path, tmp_path: Path, options: str, reason: str
) -> None:
    place = os.environ["STAGER_NODE_ROOT"]
    code, report, said = verify(tiny, tmp_path, mount=f"mount -t tmpfs -o {options} none {place}")
    assert (code, report["ok"]) == (3, False)
    assert reason in said_of_nodes(report)
    assert place in said_of_nodes(report)
    assert "STAGER_NODE_ROOT" in said  # the setting that moves it


@pytest.mark.parametrize("where", ["manifest", "layer", "truncated"])
def test_a_damaged_bundle(tiny: Path, tmp_path: Path, where: str) -> None:
    data = bytearray(tiny.read_bytes())
    if where == "truncated":
        del data[len(data) // 2 :]
    else:
        at = 600 if where == "manifest" else len(data) - 1024 - 512
        data[at] ^= 1
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(data)
    code, report, said = verify(damaged, tmp_path)
    assert (code, report["ok"]) == (3 if where == "layer" else 1, False)
    assert "damaged" in said
    assert str(damaged) in said
    assert [*Path(os.environ["STAGER_NODE_ROOT"]).rglob("envs/*")] == []


def test_a_bundle_for_another_python(tiny: Path, tmp_path: Path) -> None:
    other = forge(
        tiny, tmp_path / "other.tar", manifest=lambda raw: raw["requires"].update(python="3.77")
    )
    code, report, said = verify(other, tmp_path)
    assert code == 3
    assert "there is no CPython 3.77" in said_of_nodes(report)
    # Once for both nodes, not twice.
    assert said.count("there is no CPython 3.77") == 1
    assert "error: local1,local2: " in said


def test_a_repair_is_a_warning_also_with_quiet(project: Project, tmp_path: Path) -> None:
    project.settings("alpha").build()
    argv = ["verify", "--allocation", "local", "--log-dir", str(tmp_path / "logs"), "-q"]
    assert project.expect(*argv).stderr == ""
    nodes = Path(os.environ["STAGER_NODE_ROOT"])
    (module,) = nodes.glob("**/envs/*/lib/python*/site-packages/alpha/__init__.py")
    module.unlink()
    done = project.expect(*argv, "--json")
    assert list(json.loads(done.stdout)["repaired"]) == ["local1"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: local1: /")
    assert "alpha/__init__.py: it is missing" in line
    assert line.endswith("; stager repairs the environment before using it")
    assert project.stager(*argv).stderr == ""
