"""A damaged environment that a job has repaired: its user is told, however quiet the command is."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.building import Project


def test_a_repair_is_a_warning_also_with_quiet(project: Project, tmp_path: Path) -> None:
    project.settings("alpha").build()
    argv = ["verify", "--allocation", "local", "--log-dir", str(tmp_path / "logs"), "-q"]
    done = project.stager(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    nodes = Path(os.environ["STAGER_NODE_ROOT"])
    (module,) = nodes.glob("**/envs/*/lib/python*/site-packages/alpha/__init__.py")
    module.unlink()
    done = project.stager(*argv, "--json")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["repaired"]) == ["local1"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: local1: /")
    assert "alpha/__init__.py: it is missing" in line
    assert line.endswith("; stager repairs the environment before using it")
    assert project.stager(*argv).stderr == ""
