"""A bundle that brings its own Python, or is for another version than the one that builds it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from bundle.environment.listing import OWN_PYTHON
from stager.core.store import Store
from stager.interpreter import find_compiler
from stager.pack.bundle_file import read_manifest
from tests.support.building import Project, contents, fetch_zstandard
from tests.support.needs import needs
from tests.support.own_pythons import movable_python, oldest_python
from tests.support.processes import run
from tests.support.wheelhouse import make_wheel

RANK = """\
import json, os, sys
import alpha
facts = [sys.version.split()[0], sys.prefix, sys.base_prefix, os.__file__, alpha.__file__]
print("FACTS", json.dumps(facts), flush=True)
"""


@pytest.mark.full
def test_a_bundle_for_another_python_runs_where_there_is_only_an_older_one(
    project: Project, pip_settings: Mapping[str, str], tmp_path: Path
) -> None:
    own = movable_python()
    node = oldest_python(own)
    python = own.target.python
    fetch_zstandard(python, project.store.wheels, pip_settings)
    (project.root / "train.py").write_text(RANK)
    settings = f'python = "{python}"\ninterpreter = "{own.prefix}"\n'
    project.settings("alpha", more=settings)

    built = project.expect("build", "--json")
    report = json.loads(built.stdout)
    assert report["proved"], built.stderr
    manifest = read_manifest(Path(report["bundle"]))
    assert (manifest.requires.python, manifest.requires.bundled_python) == (python, True)
    again = json.loads(project.stager("build", "--json").stdout)
    assert (again["id"], again["layers_built"]) == (report["id"], 0)

    bill = json.loads(project.stager("inspect", report["bundle"], "--sbom").stdout)
    (listed,) = [part for part in bill["components"] if part["name"] == "cpython"]
    assert (listed["type"], listed["version"].rpartition(".")[0]) == ("platform", python)

    logs = tmp_path / "logs"
    local = ("--allocation", "local", "--launcher", "processes", "--nproc-per-node", "2")
    project.expect("run", *local, "--log-dir", str(logs), "--", "train.py")
    for log in logs.glob("*.out"):
        _assert_own(log.read_text(), python, tmp_path)

    base = tmp_path / "other"
    base.mkdir()
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(node.program)
    program = project.store.programs / f"{manifest.node.sha256}.pyz"
    argv = [str(folder / "python3"), "-I", "-S", str(program), "exec", "--id", report["id"]]
    argv += [report["bundle"], str(base), "--", "python", str(project.root / "train.py")]
    env = {"PATH": str(folder), "HOME": os.environ["HOME"]}
    done = run(argv, env=env)
    assert done.returncode == 0, done.stderr
    _assert_own(done.stdout, python, base)


def test_a_python_that_cannot_be_moved_is_refused_before_anything_is_made(
    project: Project,
) -> None:
    needs("system python")
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    more = f'python = "{version}"\ninterpreter = "/usr/bin/python3"\n'
    done = project.settings("alpha", more=more).stager("build")
    assert done.returncode == 1
    assert "environment.interpreter: /usr/bin/python3 belongs to the system in /usr" in done.stderr
    assert f"uv python install {version}" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(project.store.layers.iterdir()) == []


def _assert_own(output: str, python: str, place: Path) -> None:
    """Python and modules are all of an environment below a place."""
    (line,) = [line for line in output.splitlines() if line.startswith("FACTS ")]
    version, prefix, base, library, package = json.loads(line.removeprefix("FACTS "))
    assert version.startswith(f"{python}.")
    assert Path(prefix).is_relative_to(place)
    assert base == f"{prefix}/{OWN_PYTHON}"
    assert library.startswith(f"{base}/lib/python{python}/")
    assert package.startswith(f"{prefix}/lib/python{python}/site-packages/")


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

    built = project.expect("build", "--json", env=env)
    report = json.loads(built.stdout)
    assert report["proved"], built.stderr
    assert "no bytecode" not in built.stderr
    assert f", by {other.program.resolve()}" in built.stderr
    _assert_compiled(project.store, Path(report["bundle"]), other.program, tag)
    again = json.loads(project.stager("build", "--json", env=env).stdout)
    assert (again["id"], again["layers_built"]) == (report["id"], 0)

    ran = project.expect("exec", "--", "python", "-c", CODE, env=env)
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
