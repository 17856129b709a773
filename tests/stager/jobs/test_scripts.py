"""A script that is not there is missed before anything is asked of a node."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from stager.core.errors import ConfigError
from stager.jobs.preparation import in_project, prefer_here, refuse_absent
from tests.support.building import Project

CHECK = "check the name; project.exclude and .gitignore keep files out of the bundle"

BLANK = "a blank is part of it: leave out the quotes around it, or the backslash before it"


@pytest.fixture
def bundle(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose project has some scripts, seen from another directory."""
    (project.root / "train.py").write_text("")
    (project.root / "tools").mkdir()
    (project.root / "tools" / "convert.py").write_text("")
    (project.root / "src" / "own").mkdir(parents=True)
    (project.root / "src" / "own" / "train.py").write_text("")
    (project.root / "app").mkdir()
    (project.root / "app" / "__main__.py").write_text("")
    (project.root / "latest.py").symlink_to("train.py")
    made = project.build().packed.path
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "evaluate.py").write_text("")
    (elsewhere / "pyproject.toml").write_text('[project.scripts]\nown-train = "own.train:main"\n')
    (elsewhere / "launch").write_text("#!/usr/bin/env python\n")
    (elsewhere / "run.sh").write_text("torchrun\n")
    (elsewhere / "program").write_bytes(b"\x7fELF\0")
    monkeypatch.chdir(elsewhere)
    return made


def test_what_is_there_or_cannot_be_known(bundle: Path) -> None:
    for command in (
        "train.py",
        "./train.py",
        "tools/convert.py",
        "tools/../train.py",
        "app",
        "latest.py",
        "evaluate.py",
        "-m tools.convert",
        "-m app",
        "-m own.train",
        "-m alpha.__init__",
        "-m trainer",
        "-m timeit",
        "launch",
        "/opt/of/the/nodes/train.py",
    ):
        refuse_absent(shlex.split(command), bundle)


def test_what_python_cannot_start(bundle: Path) -> None:
    for command, message, hint in (
        ("run.sh", "run.sh is not a Python script", "stager exec -- run.sh"),
        ("program", "program is not a Python script", "stager exec -- program"),
        ("/usr/bin/absent", "there is no script /usr/bin/absent", "check the name"),
        ("-m own.trian", "there is no module own.trian", "did you mean own.train?"),
        ("-m own", "there is no module own", "has a __main__.py"),
        ("-m alpha.absent", "there is no module alpha.absent", "has a __main__.py"),
        ("-m evaluate", "there is no module evaluate", "has a __main__.py"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            refuse_absent(shlex.split(command), bundle)
        assert hint in str(caught.value.hint)


def test_what_is_not_there(bundle: Path) -> None:
    for name, hint in (
        ("trian.py", "did you mean train.py?"),
        ("convert.py", "did you mean tools/convert.py?"),
        ("evalute.py", "did you mean evaluate.py?"),
        ("own-train", "it is an entry point of pyproject.toml; start its module: -m own.train"),
        ("ls", "run starts Python scripts and modules; for other programs: stager exec -- ls"),
        ("x", CHECK),
        ("tools", CHECK),
        ("", CHECK),
        (".", CHECK),
        (" ", BLANK),
        ("torchrun train.py --epochs 3", BLANK),
        ("a\nb", CHECK),
        ("a\0b", CHECK),
        ("x" * 5000, CHECK),
    ):
        with pytest.raises(ConfigError, match="there is no script") as caught:
            refuse_absent([name], bundle)
        assert caught.value.hint == hint
        shown = str(caught.value)
        assert shown.isprintable()
        assert len(shown) < 400
        if name.endswith(".py"):
            assert f"there is no script {name}: neither here nor in the project" in shown


def test_a_directory_that_is_gone_holds_nothing(bundle: Path) -> None:
    shutil.rmtree(Path.cwd())
    refuse_absent(["train.py"], bundle)
    with pytest.raises(ConfigError, match=r"there is no script evaluate\.py"):
        refuse_absent(["evaluate.py"], bundle)


def test_a_script_here_needs_no_look_into_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    refuse_absent(["train.py"], tmp_path / "absent.pkgs.tar")


def test_a_script_of_the_project_is_named_by_its_place_there(
    project: Project, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts do not see this machine's files, but have a copy of the project."""
    root = project.root
    monkeypatch.chdir(root / "tools")
    for name, place in (
        (str(root / "train.py"), "train.py"),
        (str(root / "latest.py"), "latest.py"),
        ("../train.py", "train.py"),
        ("../tools/convert.py", "tools/convert.py"),
        ("convert.py", "convert.py"),
        (str(root / "absent.py"), str(root / "absent.py")),
        (str(root.parent / "elsewhere" / "evaluate.py"),) * 2,
        ("/opt/of/the/nodes/train.py",) * 2,
    ):
        assert in_project(name, root) == place


def test_a_script_of_this_folder_is_not_another_one_of_the_project(
    project: Project, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks look at the top of the project first."""
    root = project.root
    (root / "tools" / "train.py").write_text("")
    (Path.cwd() / "train.py").write_text("")
    assert prefer_here("train.py", root) == "train.py"
    monkeypatch.chdir(root / "tools")
    for name, place in (
        ("train.py", "tools/train.py"),
        ("./train.py", "tools/train.py"),
        ("../train.py", "../train.py"),
        ("convert.py", "convert.py"),
        ("-m", "-m"),
        ("a\0b", "a\0b"),
        ("x" * 5000, "x" * 5000),
    ):
        assert prefer_here(name, root) == place
    monkeypatch.chdir(root)
    assert prefer_here("train.py", root) == "train.py"
