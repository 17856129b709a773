"""Advice that fits the place: what is not there, where it is instead, and what to type."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from stager.pack.bundle_file import remember_import
from tests.support.building import STAGER, Project
from tests.support.processes import Done, run


def stager(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    return run([*STAGER, *arguments], cwd=cwd, env={**os.environ, **(env or {})})


@pytest.mark.parametrize("command", ["build", "run --"])
def test_a_script_that_is_not_there(tmp_path: Path, command: str) -> None:
    done = stager(*command.split(), "nosuch.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: there is no file nosuch.py"


def test_a_script_without_a_block_is_the_projects(project: Project) -> None:
    (project.root / "train.py").write_text("print(1)\n")
    done = stager("build", "train.py", cwd=project.root)
    assert "train.py has no block" in done.stderr
    assert "`stager build` builds this project, as stager.toml says" in done.stderr


def test_imported_bundles_are_named_where_no_build_has_made_one(
    project: Project, tmp_path: Path
) -> None:
    packed = project.build().packed
    begin = packed.manifest.id[:12]
    remember_import(project.store, "project", packed.path)
    empty = tmp_path / "empty"
    empty.mkdir()
    for command in ("inspect", "exec -- true"):
        done = stager(*command.split(), cwd=empty)
        assert done.returncode == 1
        assert f"  imported: project {begin}: give --id {begin}\n" in done.stderr
        assert "stager init" not in done.stderr
    (empty / "stager.toml").write_text("[environment]\nrequirements = []\n")
    done = stager("inspect", cwd=empty)
    assert "there is no bundle of empty in " in done.stderr
    assert f"  imported: project {begin}: give --id {begin}\n" in done.stderr
    (empty / "stager.toml").unlink()
    done = stager("inspect", "--json", "--id", begin, cwd=empty)
    assert (done.returncode, packed.manifest.id in done.stdout) == (0, True)
    assert stager("estimate", "--id", begin, "--nodes", "2", cwd=empty).returncode == 0
    done = stager("clean", "--store-only", "--dry-run", cwd=empty)
    assert (done.returncode, "would be freed" in done.stderr) == (0, True)


def test_a_node_root_that_is_not_there(project: Project, tmp_path: Path) -> None:
    project.build()
    absent = tmp_path / "absent"
    env = {"STAGER_NODE_ROOT": str(absent)}
    done = project.expect("verify", "--allocation", "local", "--nodes", "2", code=3, env=env)
    lines = done.stderr.splitlines()
    # `verify` launches nothing, but says what `run` would refuse.
    assert any("torch is not in the bundle; --launcher processes" in line for line in lines)
    finding = f"  $STAGER_NODE_ROOT = {absent}: it does not exist (`mkdir -p {absent}` makes it)"
    fault = "no directory on this node can hold the environment"
    at = lines.index(f"error: local1,local2: {fault}")
    assert lines[at + 1] == finding
    assert lines[at + 2].startswith("hint: mend that, or name another directory")
    assert lines[at + 3] == "2 of 2 nodes cannot run it: local1,local2"
    assert lines[at + 4].startswith("logs: ")
    assert lines[at + 5].startswith("more: stager diagnose ")
    told = project.stager("diagnose")
    assert told.stderr.startswith("newest job: ")
    assert f": {fault}; $STAGER_NODE_ROOT = " in told.stdout
    assert '"code"' not in told.stdout
    done = project.expect("exec", "--", "true", code=1, env=env)
    assert done.stderr.splitlines()[:2] == [f"error: {fault}", finding]
