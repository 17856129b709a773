"""What a lock would leave out, or take for something else, is refused by name."""

import os
from pathlib import Path
from textwrap import dedent

import pytest

from stager.config import load
from stager.core.errors import ConfigError
from stager.core.values import Target
from stager.lock.spec import Spec, read_spec
from tests.support.building import STAGER, Project
from tests.support.index_server import Index, serve
from tests.support.processes import Done, run
from tests.support.sources import make_sdist
from tests.support.wheelhouse import make_wheel

HERE = Target.from_host().python
FOREIGN = [
    ("poetry.lock", "poetry export"),
    ("pdm.lock", "pdm export"),
    ("Pipfile", "pipenv requirements"),
    ("Pipfile.lock", "pipenv requirements"),
    ("environment.yml", "requirements.in"),
    ("environment.yaml", "requirements.in"),
    ("environment-gpu.yml", "requirements.in"),
    ("setup.py", "name the folder"),
    ("setup.cfg", "name the folder"),
    ("s.py", "a block with them (PEP 723)"),
    ("settings.json", "requirements.txt"),
]


def spec(root: Path, *requirements: str, **more: object) -> Spec:
    """The spec of these entries of ``requirements``, in this folder."""
    table: dict[str, object] = {"requirements": list(requirements), **more}
    data = {"environment": table}
    return read_spec(load.parse(data, root=root, source=root / "stager.toml"))


def refused(root: Path, *requirements: str, **more: object) -> str:
    """The one problem of these entries."""
    with pytest.raises(ConfigError) as caught:
        spec(root, *requirements, **more)
    (line,) = caught.value.context
    return line


def pyproject(folder: Path, text: str) -> Path:
    """A ``pyproject.toml`` that needs alpha, and what else is given."""
    folder.mkdir(parents=True, exist_ok=True)
    head = '[project]\nname = "app"\nversion = "1"\ndependencies = ["alpha", "discord.py"]\n'
    (folder / "pyproject.toml").write_text(head + dedent(text))
    return folder


# --- files taken for packages --------------------------------------------------------------------


def test_a_package_with_the_name_of_a_file_is_never_asked_for(
    project: Project, wheelhouse: Path, build_wheels: Path
) -> None:
    for wheel in build_wheels.iterdir():
        (wheelhouse / wheel.name).write_bytes(wheel.read_bytes())
    make_sdist(wheelhouse, "Pipfile")  # a stranger's
    done = project.settings("Pipfile").stager("lock")
    assert done.returncode == 1, done.stdout
    assert "Pipfile is the name of a file" in done.stderr
    assert "pipenv requirements" in done.stderr
    assert not (project.root / "pylock.toml").exists()
    assert project.settings("Pipfile>=0").stager("lock").returncode == 0


@pytest.mark.parametrize("there", [True, False], ids=["there", "absent"])
@pytest.mark.parametrize(("name", "remedy"), FOREIGN)
def test_files_of_other_tools(name: str, remedy: str, there: bool, tmp_path: Path) -> None:
    if there:
        (tmp_path / name).write_text("anything")
    (tmp_path / "r.in").write_text(f"alpha\n{name} ; python_version > '3'\n")
    for entry, more in ((name, {}), ("r.in", {}), ("alpha", {"constraints": [name]})):
        line = refused(tmp_path, entry, **more)
        assert f"{name} is {'a file here' if there else 'the name of a file'}" in line
        assert remedy in line
        assert f"{name}>=0" in line


@pytest.mark.parametrize(("name", "remedy"), FOREIGN)
def test_paths_of_such_files(name: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).write_text("anything")
    line = refused(tmp_path, f"./sub/{name}")
    assert "neither a wheel nor an sdist" in line
    assert remedy in line


def test_files_where_a_requirement_file_belongs(tmp_path: Path) -> None:
    for name in ("poetry.lock", "uv.lock", "Pipfile"):
        (tmp_path / name).write_text("anything\n")
    (tmp_path / "r.in").write_text("alpha\n-r poetry.lock\n")
    assert "r.in:2: poetry.lock is not a requirement file; run `poetry" in refused(tmp_path, "r.in")
    for line in ("uv.lock", "-r uv.lock"):
        (tmp_path / "r.in").write_text(f"alpha\n{line}\n")
        assert "name it in environment.requirements itself" in refused(tmp_path, "r.in")
    (tmp_path / "r.in").write_text("alpha\n-c Pipfile\n")
    assert "r.in:2: Pipfile is not a requirement file" in refused(tmp_path, "r.in")
    (tmp_path / "r.in").write_text("more.txt\n")
    assert 'write "-r more.txt"' in refused(tmp_path, "r.in")


def test_any_file_that_is_there_is_not_a_package(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("#!/bin/sh\n")
    assert "train is a file here" in refused(tmp_path, "train")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "r.txt").write_text("helper\n")
    (tmp_path / "sub" / "helper").write_text("")
    assert "helper is a file here" in refused(tmp_path, "sub/r.txt")
    assert spec(tmp_path, "x" * 300).requirements == ("x" * 300,)  # no name of a file
    (tmp_path / "alpha").mkdir()  # a package's folder says nothing about where it comes from
    assert spec(tmp_path, "alpha", "train[a]>=1").requirements == ("alpha", "train[a]>=1")


def test_packages_with_a_dot_are_packages(tmp_path: Path) -> None:
    names = ("zope.interface", "ruamel.yaml", "discord.py", "jaraco.functools", "Ruamel.Yaml.Clib")
    expected = ("zope-interface", "ruamel-yaml", "discord-py", "jaraco-functools")
    assert spec(tmp_path, *names).requirements[:4] == expected
    explicit = ("s.py==1", "uv.lock>=0", "x.toml @ https://example.org/x_toml-1-py3-none-any.whl")
    assert len(spec(tmp_path, *explicit).requirements) == 3
    (tmp_path / "discord.py").write_text("")
    assert "discord.py is a file here" in refused(tmp_path, "discord.py")
    pyproject(tmp_path, "")  # where only requirements stand, by the standard
    assert spec(tmp_path, "pyproject.toml").requirements == ("alpha", "discord-py")


def test_a_wheel_beside_the_settings_is_that_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "thing")
    assert spec(tmp_path, wheel.name).requirements == (f"thing @ {wheel.as_uri()}",)
    assert "no such file or folder" in refused(tmp_path, "other-1.0-py3-none-any.whl")
    assert "no such file or folder" in refused(tmp_path, "other-1.0.tar.gz")


# --- what only another tool reads ----------------------------------------------------------------

OF_UV = [
    ('[tool.uv.sources]\nalpha = { path = "fork" }', "tool.uv.sources"),
    ("[tool.uv]\nconstraint-dependencies = ['idna<3.8']", "constraint-dependencies"),
    ("[tool.uv]\noverride-dependencies = ['idna<3.8']", "override-dependencies"),
    ("[tool.uv]\nexclude-newer = '2024-01-01'", "tool.uv.exclude-newer"),
    ("[tool.uv]\nresolution = 'lowest'", "tool.uv.resolution"),
    ("[tool.uv]\nprerelease = 'allow'", "tool.uv.prerelease"),
    ("[tool.uv]\nfind-links = ['wheels']", "tool.uv.find-links"),
    ("[[tool.uv.index]]\nurl = 'https://example.org/simple'", "tool.uv.index"),
]


IGNORED = [
    ("[[tool.poetry.source]]\nname = 'lab'", "tool.poetry.source", "poetry export"),
    ("[tool.poetry.dependencies]\nalpha = {path = 'fork'}", "[tool.poetry]", "poetry export"),
    ("[[tool.pdm.source]]\nname = 'lab'", "tool.pdm.source", "pdm export"),
    ("[tool.pdm.resolution.overrides]\nidna = '3.7'", "resolution.overrides", "pdm export"),
]


@pytest.mark.parametrize(("text", "key", "remedy"), IGNORED)
def test_settings_that_only_another_tool_reads(
    text: str, key: str, remedy: str, tmp_path: Path
) -> None:
    pyproject(tmp_path, text)
    line = refused(tmp_path, "pyproject.toml")
    assert line.startswith("pyproject.toml: ")
    assert key in line
    assert remedy in line


@pytest.mark.parametrize(("text", "key", "remedy"), [IGNORED[0], IGNORED[2]])
def test_the_same_of_a_local_project(text: str, key: str, remedy: str, tmp_path: Path) -> None:
    pyproject(tmp_path / "lib", text)
    line = refused(tmp_path, "./lib")
    assert line.startswith("lib/pyproject.toml: ")
    assert key in line
    assert remedy in line


@pytest.mark.parametrize(("text", "key"), OF_UV)
@pytest.mark.parametrize("entry", ["lib/pyproject.toml", "./lib"])
def test_settings_of_uv_are_left_to_uv(entry: str, text: str, key: str, tmp_path: Path) -> None:
    pyproject(tmp_path / "lib", text)
    read = spec(tmp_path, entry)
    assert read.uv_project is not None
    (named,) = read.uv_project.keys
    assert named.startswith("lib/pyproject.toml: tool.uv.")
    assert key in named
    pyproject(tmp_path / "lib", "")
    assert spec(tmp_path, entry).uv_project is None


def test_settings_that_do_not_matter(tmp_path: Path) -> None:
    pyproject(
        tmp_path,
        """\
        requires-python = ">=3.8"
        [dependency-groups]
        docs = ["theme"]
        [tool.uv]
        dev-dependencies = ["pytest"]
        package = true
        override-dependencies = []
        [tool.uv.sources]
        theme = { index = "lab" }
        [[tool.uv.index]]
        name = "lab"
        url = "https://example.org/simple"
        explicit = true
        [tool.poetry]
        packages = []
        [tool.poetry.group.dev.dependencies]
        pytest = "*"
        """,
    )
    assert spec(tmp_path, "pyproject.toml").requirements == ("alpha", "discord-py")
    assert spec(tmp_path, "pyproject.toml").uv_project is None
    project = spec(tmp_path, "pyproject.toml:docs").uv_project
    assert project is not None
    assert project.keys == ("pyproject.toml: tool.uv.index", "pyproject.toml: tool.uv.sources")


def test_settings_of_uv_beside_it(tmp_path: Path) -> None:
    pyproject(tmp_path / "sub", "")
    (tmp_path / "sub" / "uv.toml").write_text('exclude-newer = "2020-01-01"\n')
    project = spec(tmp_path, "sub/pyproject.toml").uv_project
    assert project is not None
    assert project.keys == ("sub/uv.toml: exclude-newer",)
    (tmp_path / "sub" / "uv.toml").write_text("offline = false\n")
    assert spec(tmp_path, "sub/pyproject.toml").requirements


def test_settings_of_the_workspace_around_it(tmp_path: Path) -> None:
    workspace = "[tool.uv.workspace]\nmembers = ['packages/*']\n"
    pyproject(tmp_path, f"{workspace}[tool.uv]\noverride-dependencies = ['idna<3']\n")
    pyproject(tmp_path / "packages" / "app", "")
    for entry in ("pyproject.toml", "."):
        project = spec(tmp_path / "packages" / "app", entry).uv_project
        assert project is not None
        assert project.keys == (f"{tmp_path}/pyproject.toml: tool.uv.override-dependencies",)
        assert project.overridden == {"idna"}
    pyproject(tmp_path, workspace)
    assert spec(tmp_path / "packages" / "app", "pyproject.toml").requirements


def test_two_projects_with_settings_of_uv_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        pyproject(tmp_path / name, "[tool.uv]\nresolution = 'lowest'")
    line = refused(tmp_path, "one/pyproject.toml", "./two")
    assert "one/pyproject.toml: tool.uv.resolution; two/pyproject.toml: tool.uv.resolution" in line


# --- which Python --------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["pyproject.toml", "pyproject.toml:dev", "."])
def test_a_python_that_the_project_rules_out(entry: str, tmp_path: Path) -> None:
    minor = int(HERE.split(".")[1])
    text = f'requires-python = ">=3.{minor + 1}"\n[dependency-groups]\ndev = ["alpha"]\n'
    pyproject(tmp_path, text)
    line = refused(tmp_path, entry)
    assert f"requires-python is '>=3.{minor + 1}', but the environment is for Python {HERE}" in line
    assert "environment.python" in line
    assert spec(tmp_path, entry, python=f"3.{minor + 1}").target.python == f"3.{minor + 1}"


def test_a_patch_release_may_be_enough(tmp_path: Path) -> None:
    pyproject(tmp_path, f'requires-python = ">={HERE}.4,<{HERE}.90"\n')
    assert spec(tmp_path, "pyproject.toml").requirements
    pyproject(tmp_path, 'requires-python = "three"\n')
    assert "project.requires-python: Invalid specifier" in refused(tmp_path, "pyproject.toml")


# --- files that ask for nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[tool.poetry.dependencies]\nalpha = "*"\n', "only Poetry reads; run `poetry export"),
        ('[build-system]\nrequires = ["setuptools"]\n', "build what a setup.py describes"),
        ("[tool.ruff]\n", "it has no [project] table, so it declares no dependencies"),
    ],
)
def test_a_pyproject_in_another_form(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert said in refused(tmp_path, "pyproject.toml")


def test_groups_need_no_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[dependency-groups]\ndev = ["alpha"]\n')
    assert spec(tmp_path, "pyproject.toml:dev").requirements == ("alpha",)


def test_a_requirement_file_without_requirements(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("# `uv export` failed\n")
    assert "requirements = []" in refused(tmp_path, "r.txt")
    assert spec(tmp_path).requirements == ()  # the user's own word
    assert spec(tmp_path, "r.txt", "alpha").requirements == ("alpha",)


@pytest.mark.parametrize("entry", ["pyproject.toml", "pyproject.toml[no]", "pyproject.toml:no"])
def test_a_pyproject_that_asks_for_nothing(entry: str, tmp_path: Path) -> None:
    text = '[project]\nname = "app"\nversion = "1"\noptional-dependencies.no = []\n'
    (tmp_path / "pyproject.toml").write_text(f"{text}[dependency-groups]\nno = []\n")
    line = refused(tmp_path, entry)
    assert f"environment.requirements: {entry} declares no dependencies" in line
    assert '"pyproject.toml[train]"' in line
    assert "requirements = []" in line
    assert spec(tmp_path, entry, "alpha").requirements == ("alpha",)


# --- what uv reads by itself ---------------------------------------------------------------------


def lock_with_uv(root: Path, **env: str) -> Done:
    return run([*STAGER, "lock", "--resolver", "uv"], cwd=root, env={**os.environ, **env})


def test_uv_reads_no_settings_of_a_project_around_the_offline_root(project: Project) -> None:
    around = project.store.root.parent / "uv.toml"
    around.write_text('[pip]\nno-binary = [":all:"]\nresolution = "lowest"\n')
    (project.root / "uv.toml").write_text(around.read_text())
    done = lock_with_uv(project.root)
    assert done.returncode == 0, done.stderr
    assert 'version = "1.1"' not in (project.root / "pylock.toml").read_text()  # of beta


def test_variables_that_would_lock_something_else(project: Project) -> None:
    done = lock_with_uv(project.root, UV_RESOLUTION="lowest", UV_TORCH_BACKEND="auto")
    assert done.returncode == 1
    assert "UV_RESOLUTION, UV_TORCH_BACKEND: set in the environment" in done.stderr
    assert "environment.torch-backend" in done.stderr


def test_the_projects_index_comes_before_that_of_a_variable(
    project: Project, monkeypatch: pytest.MonkeyPatch, wheelhouse: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    dead = "http://127.0.0.1:9/simple"
    other = {"UV_INDEX_URL": dead, "UV_DEFAULT_INDEX": dead, "UV_HTTP_RETRIES": "0"}
    with serve(Index(folder=wheelhouse)) as index:
        (project.root / "r.in").write_text(f"-i {index.url}\nalpha\n")
        done = lock_with_uv(project.settings("r.in").root, **other)
    assert done.returncode == 0, done.stderr
