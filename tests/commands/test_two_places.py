"""One project in two places is one bundle: no path of the machine that builds it is in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bundle.format.archive import BundleFile
from stager.building.current_bundle import current_bundle
from stager.config.load import load
from tests.support.building import STAGER, Project, Recorder
from tests.support.wheelhouse import make_wheel


def laid_out(folder: Path, requirement: str) -> Path:
    """A project with a wheel and a library of its own, beside a folder of wheels."""
    root = folder / "project"
    for name in ("project/local", "project/mylib", "wheels"):
        (folder / name).mkdir(parents=True)
    make_wheel(root / "local", "local", "1.0")
    make_wheel(folder / "wheels", "beside", "1.0")
    about = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    about += '[project]\nname = "mylib"\nversion = "1"\n[tool.setuptools]\npy-modules = ["mylib"]\n'
    (root / "mylib" / "pyproject.toml").write_text(about)
    (root / "mylib" / "mylib.py").write_text("X = 1\n")
    (root / "train.py").write_text("print('trained')\n")
    (root / "requirements.in").write_text(f"--find-links ../wheels\nalpha\n{requirement}\n")
    (root / "stager.toml").write_text('[environment]\nrequirements = ["requirements.in"]\n')
    return root


def built(root: Path, wheels: Path) -> tuple[str, set[str]]:
    """Build with a store of its own; the bundle's id, and the ids of its layers."""
    store = root.parent / "store"
    (store / "wheels").mkdir(parents=True)
    for wheel in wheels.glob("zstandard-*.whl"):
        shutil.copy2(wheel, store / "wheels")
    env = {**os.environ, "OFFLINE_ROOT": str(store)}
    argv = [*STAGER, "build", "--json", "--no-prove"]
    done = subprocess.run(
        argv, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with BundleFile(json.loads(done.stdout)["bundle"]) as bundle:
        layers = {f"{layer.name} {layer.id}" for layer in bundle.manifest.layers}
        return bundle.manifest.id, layers


@pytest.mark.full
@pytest.mark.parametrize("requirement", ["./local/local-1.0-py3-none-any.whl", "beside", "./mylib"])
@pytest.mark.usefixtures("sdist")
def test_the_id_does_not_depend_on_the_folder(
    project: Project, tmp_path: Path, requirement: str
) -> None:
    found = [
        built(laid_out(tmp_path / place, requirement), project.store.wheels)
        for place in ("here", "there/deeper")
    ]
    assert found[0][1] == found[1][1]
    assert found[0][0] == found[1][0]


def test_a_lock_that_was_made_anew_makes_the_bundle_stale(project: Project) -> None:
    """It is no part of the bundle, and decides what is in it."""
    first = project.build().packed.path
    config = load(project.root)
    assert current_bundle(config, Recorder()).path == first
    lock = project.root / "pylock.toml"
    lock.write_text(lock.read_text() + "# by hand\n")
    told = Recorder()
    assert current_bundle(config, told).path == first
    assert told.phases[0] == "lock"
