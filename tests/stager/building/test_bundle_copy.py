"""A file that a command writes is kept out of the project, which would ship it the next time."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.core.errors import ConfigError
from stager.core.files import BUNDLE_SUFFIX
from stager.pack.members import refuse_in_project


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project, which is the current directory, and a link that leads to it."""
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    (folder / "away").symlink_to(tmp_path)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("output", ["x.tar", "sub/x.tar", "sub/../x.tar", "../link/x.tar"])
def test_a_place_in_the_project(project, output):
    for known_as in (project, project.parent / "link"):
        with pytest.raises(ConfigError, match="is in the project"):
            refuse_in_project(Path(output), known_as)


@pytest.mark.parametrize(
    "output", ["../x.tar", "sub/../../x.tar", "away/x.tar", f"x{BUNDLE_SUFFIX}"]
)
def test_a_place_outside_or_a_name_that_no_project_ships(project, output):
    for known_as in (project, project.parent / "link"):
        refuse_in_project(Path(output), known_as)
