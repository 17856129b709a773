"""A bundle for another version of Python than the one that builds it, which the nodes have."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from stager.core.store import Store
from stager.interpreter import find_compiler
from stager.pack.bundle_file import read_manifest
from tests.support.building import Project, contents, fetch_zstandard
from tests.support.own_pythons import movable_python
from tests.support.wheelhouse import make_wheel

CODE = "import alpha, sys; print(alpha.__cached__, sys.version.split()[0], alpha.NAME)"


@pytest.mark.full
def test_it_is_compiled_and_proved_by_a_python_of_that_version(
    project: Project, pip_settings: Mapping[str, str], tmp_path: Path
) -> None:
    other = movable_python()
    python, tag = other.target.python, other.target.python.replace(".", "")
    fetch_zstandard(python, project.store.wheels, pip_settings)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / f"python{python}").symlink_to(other.program)
    env = {"PATH": f"{folder}:{os.environ['PATH']}"}
    wheel = make_wheel(tmp_path, "alpha", files={"alpha.py": "NAME = 'alpha'\n"})
    project.locked(wheel, more=f'python = "{python}"')

    built = project.stager("build", "--json", env=env)
    assert built.returncode == 0, built.stderr
    report = json.loads(built.stdout)
    assert report["proved"], built.stderr
    assert "no bytecode" not in built.stderr
    assert f", by {other.program.resolve()}" in built.stderr
    _assert_compiled(project.store, Path(report["bundle"]), other.program, tag)
    again = json.loads(project.stager("build", "--json", env=env).stdout)
    assert (again["id"], again["layers_built"]) == (report["id"], 0)

    ran = project.stager("exec", "--", "python", "-c", CODE, env=env)
    assert ran.returncode == 0, ran.stderr
    cached, version, name = ran.stdout.split()
    assert cached.endswith(f"alpha.cpython-{tag}.pyc")
    assert (version.rpartition(".")[0], name) == (python, "alpha")


def _assert_compiled(store: Store, bundle: Path, program: Path, tag: str) -> None:
    """Each layer with modules has bytecode of that Python."""
    manifest = read_manifest(bundle)
    compiler = find_compiler(movable_python().target, program)
    assert compiler is not None
    kinds = set()
    for layer in manifest.layers:
        for name, data in contents(store.layer(layer.id)).items():
            if name.endswith(".pyc"):
                kinds.add(layer.kind)
                assert f".cpython-{tag}." in name
                assert data[:4].hex() == compiler.magic
    assert kinds >= {"wheel", "trainer"}
