"""Starting a project: the file that is written can be read, and nothing is overwritten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stager.config.load import load
from stager.config.template import make_default_config, write_settings
from stager.core.errors import ConfigError
from tests.support.building import Project
from tests.support.namespaces import namespace


@pytest.mark.parametrize(
    "names",
    [
        ["requirements.in", "requirements.txt"],  # the source, not what was compiled from it
        ["requirements.txt"],
        ["pyproject.toml"],
    ],
)
def test_the_usual_file_is_found(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    made = write_settings(tmp_path, None)
    assert (made.path, made.requirements) == (tmp_path / "stager.toml", (names[0],))
    assert load(tmp_path).environment.requirements == (names[0],)


@pytest.mark.parametrize(
    ("name", "source", "message", "said"),
    [
        ("Pipfile", "Pipfile", "Pipfile is not a requirement file", "pipenv"),
        ("odd.lst", "odd.lst", "odd.lst is not a requirement file", "a folder"),
        ("Pipfile", "", "stager cannot use Pipfile here", "pipenv requirements"),
        ("environment.yml", ".", "stager cannot use environment.yml in .", "conda"),
        ("requirements.txt", "gone.txt", "there is no file gone.txt", "here: requirements.txt"),
    ],
)
def test_what_only_another_tool_reads_or_nobody_is_not_named(
    name: str, source: str, message: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        write_settings(tmp_path, Path(source) if source else None)
    assert said in caught.value.hint
    assert not (tmp_path / "stager.toml").exists()


def test_a_folder_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "deps").mkdir()
    none = r"no requirements file in deps: none of requirements\.in"
    with pytest.raises(ConfigError, match=none):
        write_settings(tmp_path, Path("deps"))
    assert not (tmp_path / "stager.toml").exists()
    (tmp_path / "deps" / "requirements.txt").write_text("alpha\n")
    write_settings(tmp_path, Path("deps"))
    assert load(tmp_path).environment.requirements == ("deps/requirements.txt",)


def test_init_says_what_to_do_next_and_overwrites_nothing(project: Project) -> None:
    """Without a requirements file, too; and a build says when one came."""
    file = project.root / "stager.toml"
    file.unlink()
    said = project.stager("init").stderr
    assert "without requirements: there is no requirements.in, requirements.txt" in said
    assert "is here, but" not in project.stager("build", "--no-prove").stderr
    (project.root / "requirements.txt").write_text("alpha\n")
    said = project.stager("build", "--no-prove").stderr
    assert "requirements.txt is here, but stager.toml does not name it" in said
    file.unlink()
    assert "for requirements.txt; look at it, then: stager build" in project.stager("init").stderr
    file.write_text("mine")
    again = project.stager("init")
    assert (again.returncode, again.stdout) == (1, "")
    assert "exists already" in again.stderr
    assert "hint: " in again.stderr
    assert file.read_text() == "mine"


def test_a_full_disk_leaves_no_half_of_it(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    shell = f"mount -t tmpfs -o size=4k none {full}; head -c 4096 /dev/zero > {full}/filler"
    code = f"""
from pathlib import Path
from stager.core.errors import StagerError
from stager.config.template import write_settings
try:
    write_settings(Path({str(full)!r}), None)
except StagerError as exc:
    said = exc.message
print(json.dumps([said, [path.name for path in Path({str(full)!r}).iterdir()]]))
"""
    answer = namespace("-m", shell, code)
    assert isinstance(answer, list)
    assert "No space left" in answer[0]
    assert answer[1] == ["filler"]


@pytest.mark.parametrize("name", ["project", "two words", "naïve", "-"])
def test_a_folder_without_settings_has_defaults(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    config = make_default_config(folder)
    assert config.root == folder
    assert config.environment.requirements == ()
    assert list(folder.iterdir()) == []
