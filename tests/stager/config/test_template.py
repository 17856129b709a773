"""Starting a project: the file that is written can be read, and nothing is overwritten."""

from __future__ import annotations

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


def test_a_folder_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "deps").mkdir()
    for source in ("deps", "gone.txt"):
        none = rf"{source} is no file, and has none of requirements\.in"
        with pytest.raises(ConfigError, match=none):
            write_settings(tmp_path, Path(source))
    assert not (tmp_path / "stager.toml").exists()
    (tmp_path / "deps" / "requirements.txt").write_text("alpha\n")
    write_settings(tmp_path, Path("deps"))
    assert load(tmp_path).environment.requirements == ("deps/requirements.txt",)


def test_init_says_what_to_do_next_and_overwrites_nothing(project: Project) -> None:
    file = project.root / "stager.toml"
    file.unlink()
    said = project.stager("init").stderr
    assert "without requirements: there is no requirements.in, requirements.txt" in said
    (project.root / "requirements.txt").write_text("alpha\n")
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
