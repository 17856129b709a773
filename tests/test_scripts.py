"""A script that is not there is missed before anything is asked of a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from building import Project

from stager.bundling.scripts import refuse_absent
from stager.errors import ConfigError


@pytest.fixture
def bundle(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose project has some scripts, seen from another directory."""
    (project.root / "train.py").write_text("")
    (project.root / "tools").mkdir()
    (project.root / "tools" / "convert.py").write_text("")
    (project.root / "latest.py").symlink_to("train.py")
    made = project.build().packed.path
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "evaluate.py").write_text("")
    monkeypatch.chdir(elsewhere)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "train.py",
        "./train.py",
        "tools/convert.py",
        "tools/../train.py",
        "tools",
        "latest.py",
        "evaluate.py",
        "-m",
        "/opt/of/the/nodes/train.py",
    ],
)
def test_what_is_there_or_cannot_be_known(bundle: Path, name: str) -> None:
    refuse_absent(name, bundle)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trian.py", "did you mean train.py?"),
        ("convert.py", "did you mean tools/convert.py?"),
        ("evalute.py", "did you mean evaluate.py?"),
        ("x", "check the name; project.exclude and .gitignore keep files out of the bundle"),
    ],
)
def test_what_is_not_there(bundle: Path, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no script {name}: neither in") as caught:
        refuse_absent(name, bundle)
    assert caught.value.hint == hint


def test_a_script_here_needs_no_look_into_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    refuse_absent("train.py", tmp_path / "absent.pkgs.tar")
