"""Installing from a mirror with the real pip and uv, which have no other index."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stager.config.load import load
from stager.mirror.mirror import mirror_wheels
from tests.support.building import Project, Recorder
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
    mirror_wheels(load(project.root), made, wanted, Recorder(), offline=False)
    newer.rename(made / newer.name)  # by hand
    mirror_wheels(load(project.root), made, ("beta==1.0",), Recorder(), offline=False)
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
