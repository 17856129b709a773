"""Inside an air gap: a project is built from a mirror alone, without any other index."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.building import STAGER, Project
from tests.support.mirrors import plain_environment
from tests.support.namespaces import entering

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "inner"
version = "1.0"
[tool.setuptools]
py-modules = ["inner"]
"""


def build(root: Path, *options: str, **env: str) -> dict[str, object]:
    """Build a project where there is no network, with an offline root of its own."""
    done = subprocess.run(
        [*entering("-n", "ip link set lo up"), *STAGER, "build", "--json", *options],
        cwd=root,
        env={**plain_environment(root.parent), "OFFLINE_ROOT": str(root.parent / "root"), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_project_inside_builds_from_a_mirror_alone(
    project: Project, sdist: Path, tmp_path: Path
) -> None:
    """The wheel of an sdist, the decompressor, and what builds the project's own code."""
    mirror = tmp_path / "stick" / "mirror"
    assert sdist.exists()
    project.settings("alpha", "from-source")
    done = project.stager("mirror", "--json", str(mirror))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ok"], result["mirror"]) == (True, str(mirror))
    assert result["index"] == (mirror / "simple").as_uri()
    assert "from_source-1.0-py3-none-any.whl" in result["added"]
    done = project.stager("mirror", str(mirror), "setuptools")
    assert (done.returncode, done.stdout) == (0, f"{result['index']}\n"), done.stderr

    inside = tmp_path / "inside" / "project"
    (inside / "inner").mkdir(parents=True)
    (inside / "inner" / "pyproject.toml").write_text(PYPROJECT)
    (inside / "inner" / "inner.py").write_text("import beta\n")
    requirements = f"--index-url {result['index']}\nfrom-source\nbeta\n"
    (inside / "requirements.in").write_text(requirements)
    settings = '[environment]\nrequirements = ["requirements.in", "./inner"]\n'
    (inside / "stager.toml").write_text(settings)
    assert build(inside)["packages"] == 3

    other = tmp_path / "other" / "project"
    other.mkdir(parents=True)
    (other / "stager.toml").write_text('[environment]\nrequirements = ["alpha"]\n')
    assert build(other, "--no-prove", PIP_INDEX_URL=result["index"])["packages"] == 2
