"""``stager mirror`` where there is no project, and what it says where it cannot do its work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.building import Project


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


def test_what_cannot_be_mirrored(project: Project) -> None:
    root = project.root
    absent = project.stager("mirror", "new", "nosuch.txt")
    assert absent.returncode == 1
    assert "error: the requirements on the command line cannot be used" in absent.stderr
    assert "cannot read nosuch.txt: No such file" in absent.stderr
    assert not (root / "new").exists()
    (root / "mine").mkdir()
    (root / "mine" / "notes").touch()
    other = project.stager("mirror", "mine", "alpha")
    assert other.returncode == 1
    assert f"{root / 'mine'} is not a mirror and is not empty" in other.stderr
    assert "Pinning" not in other.stderr  # nothing was fetched for it
