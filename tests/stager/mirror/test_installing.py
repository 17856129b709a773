"""Installing from a mirror with the real pip and uv, which have no other index."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from stager.carrying.mirror import mirror_wheels
from stager.config.load import load
from stager.core.values import Target
from tests.support.building import HOST, Project, Recorder, fetch_zstandard
from tests.support.mirrors import UV, installed_by, plain_environment, served
from tests.support.wheelhouse import make_wheel

LOCAL = "1.0+cpu.1"
"""A version whose file name has to be quoted in a link."""


@pytest.fixture
def mirror(
    project: Project, wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A mirror that was filled twice, then moved to a place with a space in its name."""
    make_wheel(wheelhouse, "odd", LOCAL, requires=["alpha"], metadata_extra="Requires-Python: >=3")
    newer = make_wheel(wheelhouse, "odd", "2.0", metadata_extra="Requires-Python: >=3.98,<4")
    monkeypatch.chdir(project.root)
    made = tmp_path / "made"
    wanted = (f"odd=={LOCAL}", "My.Odd_Name")
    config = load(project.root)
    mirror_wheels(config, made, wanted, Recorder())
    newer.rename(made / newer.name)  # by hand
    mirror_wheels(config, made, ["beta==1.0"], Recorder())
    return made.rename(tmp_path / "a stick")


@contextlib.contextmanager
def reached(mirror: Path, way: str) -> Iterator[tuple[str, list[str]]]:
    """The URL of a mirror's index; and what a server is asked for, if there is one."""
    if way == "file":
        yield (mirror / "simple").as_uri(), []
        return
    with served(mirror, as_json=way == "json") as (url, asked):
        yield f"{url}/simple", asked


def test_a_mirror_is_all_the_index_that_is_needed(mirror: Path, tmp_path: Path) -> None:
    """What an unfitting Python rules out is not taken, and METADATA comes before the wheel."""
    for tool, way in (("pip", "file"), ("pip", "json"), ("uv", "file"), ("uv", "http")):
        folder = tmp_path / f"{tool}-{way}"
        with reached(mirror, way) as (index, asked):
            found = installed_by(tool, index, folder, "odd", "my-odd.name")
        names = ("alpha-1.0", "beta-2.0", "my.odd_name-1.0", f"odd-{LOCAL}")
        assert found == [f"{name}.dist-info" for name in names], (tool, way)
        if asked:
            assert "/alpha-1.0-py3-none-any.whl.metadata" in asked, (tool, way)
            assert not [path for path in asked if "beta-1.0" in path or "odd-2.0" in path]
    for way in ("file", "json"):
        with reached(mirror, way) as (index, _):
            assert locked_by_uv(index, tmp_path / f"locked-{way}") == {"alpha", "beta", "odd"}
    sums = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(sums, cwd=mirror, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count(": OK")) == (0, len(list(mirror.glob("*.whl"))))


def locked_by_uv(index: str, folder: Path) -> set[str]:
    """The packages in the lock that uv makes of a project that needs ``odd``."""
    folder.mkdir()
    text = '[project]\nname = "locked"\nversion = "1"\nrequires-python = ">=3.9"\n'
    (folder / "pyproject.toml").write_text(f'{text}dependencies = ["odd"]\n')
    done = subprocess.run(
        [UV, "lock", "--python", sys.executable, "--default-index", index],
        cwd=folder,
        env=plain_environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lock = (folder / "uv.lock").read_text()
    return {name for name in ("alpha", "beta", "odd") if f"/{name}-" in lock or f'"{name}-' in lock}


def test_no_project_is_needed_for_requirements(project: Project, tmp_path: Path) -> None:
    """The fixture's project is elsewhere; requirement files are read from where one is."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "wanted.txt").write_text("beta<2\n")
    elsewhere = replace(project, root=here)
    done = elsewhere.stager("mirror", "mirror", "wanted.txt")
    assert done.returncode == 0, done.stderr
    assert (here / "mirror" / "beta-1.1-py3-none-any.whl").exists()
    assert done.stdout == f"{(here / 'mirror' / 'simple').as_uri()}\n"
    assert f"pip install --index-url {done.stdout.strip()} NAME" in done.stderr
    nothing = elsewhere.stager("mirror", "mirror")
    assert nothing.returncode == 1
    assert "no stager.toml" in nothing.stderr


@pytest.mark.full
def test_one_mirror_for_several_pythons_and_platforms(
    project: Project, wheelhouse: Path, pip_settings: Mapping[str, str], tmp_path: Path
) -> None:
    """The project's own Python keeps the pins of its lock."""
    own, other = HOST.python, next(name for name in ("3.12", "3.11") if name != HOST.python)
    arm = "manylinux_2_28_aarch64"
    for python in (own, other):
        tag = f"cp{python.replace('.', '')}"
        for platform in (HOST.platform, arm):
            make_wheel(wheelhouse, "native", tag=f"{tag}-{tag}-{platform}")
            target = Target(python=python, platform=platform)
            fetch_zstandard(python, project.store.wheels, pip_settings, target)
    project.settings("native")
    assert project.stager("lock").returncode == 0
    lock = (project.root / "pylock.toml").read_bytes()
    root = tmp_path / "mirror"
    targets = ["--python", own, "--python", other, "--platform", HOST.platform, "--platform", arm]
    done = project.stager("mirror", str(root), "--json", *targets)
    assert done.returncode == 0, done.stderr
    added = json.loads(done.stdout)["added"]
    assert sum(name.startswith("native-1.0-cp3") for name in added) == 4
    assert sum(name.startswith("zstandard-0.25.0-cp3") for name in added) == 4
    assert f"for Python {other} on {arm}" in done.stderr
    assert (project.root / "pylock.toml").read_bytes() == lock
    again = project.stager("mirror", str(root), "--json", "alpha", "--python", other)
    assert again.returncode == 0, again.stderr
    assert {"alpha-1.0-py3-none-any.whl"} <= {*json.loads(again.stdout)["added"]}
    for option, bad in (("--python", "312"), ("--platform", "linux")):
        refused = project.stager("mirror", str(root), option, bad)
        assert (refused.returncode, option in refused.stderr) == (2, True), refused.stderr
