"""``stager build`` as a command: its JSON, its exit codes, and clear words for what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bundle.driver.plan import digest_of_all
from bundle.format.archive import BundleFile
from bundle.protocol.digest import Digest
from tests.support.building import STAGER, Project, listing
from tests.support.sources import own_backend
from tests.support.wheelhouse import make_wheel


def built(project: Project, *arguments: str, **env: str) -> dict[str, Any]:
    """The JSON of a build that must succeed."""
    return project.report("build", *arguments, env=env)


def refused(project: Project, *arguments: str, **env: str) -> str:
    """What a build says that must fail as an expected failure does."""
    done = project.stager("build", *arguments, env=env)
    text = done.stderr + done.stdout
    assert done.returncode == 1, text
    assert "Traceback" not in text
    assert text.count("error: ") == 1
    assert "hint: " in text
    return text


# --- what it prints ------------------------------------------------------------------------------


def test_the_json_object_is_all_there_is_on_standard_output(project: Project) -> None:
    report = built(project)
    assert report["schema"] == 1
    assert list(report["seconds"]) == ["lock", "wheels", "layers", "bundle", "proof"]
    assert (report["layers_built"], report["layers_reused"]) == (4, 0)
    again = built(project, "--offline")
    assert (again["layers_built"], again["layers_reused"]) == (0, 4)
    assert (again["id"], again["bundle"]) == (report["id"], report["bundle"])
    assert len(listing(Path(str(report["bundle"])))) == 2 + 4, "the layers beside it have the rest"


def test_the_path_alone_is_data_and_the_rest_is_talk(project: Project) -> None:
    done = project.expect("build", "--no-prove")
    path = Path(done.stdout.strip())
    assert path.is_file()
    for part in ("Making the layers", "beta 2.0", "(4/4)", "4 layers made"):
        assert part in done.stderr
    assert "\x1b" not in done.stderr
    quiet = project.stager("build", "--no-prove", "-q")
    assert (quiet.stderr, quiet.stdout) == ("", done.stdout)


def test_variables_of_ranks_are_places_of_assets(project: Project, tmp_path: Path) -> None:
    """Of a folder that env alone names, of one in another asset, and of one outside."""
    for place in ("project/caches/tiktoken", "project/data/nltk", "elsewhere/hub"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file").write_text(place)
    env = {"TIKTOKEN_CACHE_DIR": "caches/tiktoken", "NLTK_DATA": "data/nltk/",
           "TORCH_HOME": str(tmp_path / "elsewhere/hub")}  # fmt: skip
    table = ", ".join(f"{name} = {json.dumps(path)}" for name, path in env.items())
    project.settings("alpha", more=f'[assets]\npaths = ["data"]\nenv = {{ {table} }}').build()
    names = f"(os.environ[name] for name in {list(env)})"
    code = f"import os; print(*(open(f'{{place}}/file').read() for place in {names}))"
    ran = project.stager("exec", "--", "python", "-c", code, env=dict.fromkeys(env, "/nowhere"))
    assert ran.stdout == "project/caches/tiktoken project/data/nltk elsewhere/hub\n", ran.stderr
    project.settings("alpha", more='[assets]\nenv = { PATH = "x", B = "" }')
    said = project.stager("build").stderr
    assert "assets.env.PATH: stager sets this variable itself" in said
    assert "assets.env.B: '' is no path" in said


def test_what_changed_and_a_copy_elsewhere(project: Project, wheelhouse: Path) -> None:
    """A package more and one less; the copy has all bytes, and an error leaves what was there."""
    first = built(project)
    changes = first["changes"]
    assert [one["name"] for one in changes["added"]] == ["alpha", "beta"]
    assert (changes["removed"], changes["changed"]) == ([], [])
    make_wheel(wheelhouse, "beta", "2.5")
    project.settings("cli-tool", "beta")
    copy = project.root.parent / "carried.tar"
    copy.write_text("older")
    done = project.expect("build", "--no-prove", "-P", "beta", "-o", str(copy))
    assert done.stdout.strip() == str(copy)
    assert "packages: added cli-tool 1.0; removed alpha; changed beta 2.0 -> 2.5" in done.stderr
    assert " new to nodes;" in done.stderr  # bytes of the layers that nodes lack
    made = built(project)
    with BundleFile(str(made["bundle"])) as bundle:
        assert digest_of_all(bundle) == Digest.of(copy.read_bytes())
    assert made["output"] is None
    assert made["changes"] == {"added": [], "removed": [], "changed": [], "bytes": 0}
    folder = project.root.parent / "folder"
    (folder / "kept").mkdir(parents=True)
    assert f"{folder} cannot be written" in refused(project, "--no-prove", "--output", str(folder))
    assert [item.name for item in folder.iterdir()] == ["kept"]
    assert not list(folder.parent.glob(".folder*"))
    assert "in the project" in refused(project, "--output", "mine.tar")
    inside = built(project, "--output", "mine.pkgs.tar")
    assert built(project)["id"] == inside["id"] == made["id"], "no part of the project"


# --- the same bytes ------------------------------------------------------------------------------


def test_two_machines_make_the_same_bytes(
    project: Project, zstandard_wheel: Path, tmp_path: Path
) -> None:
    """From one project in two places: no path of a machine is in a bundle."""
    wheel = make_wheel(project.root / "wheels", "local")
    own_backend(project.root / "mylib")
    local = ("./mylib", f"./wheels/{wheel.name}")
    project.settings("cli-tool", "schemes", "My.Odd_Name", "pth-pkg", "ns-one", "ns-two", *local)
    (project.root / "data.bin").write_bytes(os.urandom(5 << 20))
    (project.root / "caf\u00e9 \u6570.csv").write_text("1\n")  # bytes, whatever the locale
    odd = tmp_path / "odd"  # another program's state: much imported, many names interned
    odd.mkdir()
    (odd / "sitecustomize.py").write_text("import alpha_, asyncio, unittest.mock\n")
    (odd / "alpha_.py").write_text("VERSION = '1.0'; beta = main = WHO = 'one'\n")
    variants = [
        ({"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C", "PYTHONPATH": str(odd),
             "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 0o077, "1"),
        (
            {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8",
             "SOURCE_DATE_EPOCH": "1", "PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            0o002,
            "4",
        ),
    ]  # fmt: skip
    bundles = []
    for number, (env, umask, jobs) in enumerate(variants):
        root, place = tmp_path / f"root{number}", project.root
        if number:
            place = tmp_path / "deeper" / "project"
            shutil.copytree(project.root, place, ignore=shutil.ignore_patterns("pylock.toml"))
            os.utime(place / "train.py", (number, number))
        (root / "wheels").mkdir(parents=True)
        shutil.copy2(zstandard_wheel, root / "wheels")
        done = subprocess.run(
            [*STAGER, "build", "--json", "--no-prove", "--jobs", jobs],
            cwd=place, env={**os.environ, **env, "OFFLINE_ROOT": str(root)}, umask=umask,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        bundles.append(Path(json.loads(done.stdout)["bundle"]))
    assert bundles[0].parent != bundles[1].parent
    assert bundles[0].read_bytes() == bundles[1].read_bytes()


# --- offline and locked --------------------------------------------------------------------------


def test_offline_without_wheels_names_all_of_them(project: Project, wheelhouse: Path) -> None:
    built(project, "--no-prove")
    shutil.rmtree(wheelhouse)
    shutil.rmtree(project.store.bundles)  # a bundle's layers would take the wheels' place
    for name in ("alpha", "beta"):
        next(project.store.wheels.glob(f"{name}-*")).unlink()
    text = refused(project, "--offline")
    assert "alpha-1.0-py3-none-any.whl: not in the offline root" in text
    assert "beta-2.0-py3-none-any.whl: not in the offline root" in text
    assert str(project.store.wheels) in text


def test_a_stale_lock_is_made_anew_unless_locked(project: Project) -> None:
    text = refused(project, "--locked")
    assert "pylock.toml does not exist" in text
    built(project, "--no-prove")
    before = (project.root / "pylock.toml").read_bytes()
    built(project, "--no-prove", "--locked")
    project.settings("alpha", "cli-tool")
    text = refused(project, "--locked")
    assert "is out of date" in text
    assert "stager lock" in text
    assert (project.root / "pylock.toml").read_bytes() == before
    assert built(project, "--no-prove")["packages"] == 3
    assert b"cli-tool" in (project.root / "pylock.toml").read_bytes()


# --- other kinds of requirements -----------------------------------------------------------------


@pytest.mark.full
def test_an_sdist_a_local_project_and_extras(project: Project, sdist: Path) -> None:
    lib = project.root / "mylib"
    (lib / "src" / "mylib").mkdir(parents=True)
    (lib / "src" / "mylib" / "__init__.py").write_text("WHO = 'mylib'\n")
    (lib / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "mylib"\nversion = "0.1"\n'
    )
    (project.root / "pyproject.toml").write_text(
        '[project]\nname = "app"\nversion = "1"\ndependencies = ["beta<2"]\n'
        '[project.optional-dependencies]\ncli = ["cli-tool"]\n'
    )
    project.settings("from-source", "./mylib", "pyproject.toml[cli]")
    report = built(project)
    assert report["packages"] == 4
    code = "import beta, cli_tool, from_source, mylib; print(beta.VERSION, mylib.WHO)"
    done = project.stager("exec", "-q", "--", "python", "-c", code)
    assert done.stdout == "1.1 mylib\n", done.stderr
    again = built(project, "--offline")
    assert (again["layers_built"], again["id"]) == (0, report["id"])


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (None, "stager init"),
        ("[environment", "stager.toml"),
        ('[environment]\nrequirments = ["alpha"]\n', "environment.requirements"),
        ('[environment]\nrequirements = ["no-such-thing>=3"]\n', "no-such-thing"),
        ('[environment]\nrequirements = ["alpha", "beta==1.0"]\n', "beta"),
        ('[environment]\nrequirements = ["alpha"]\n[assets]\npaths = ["no.csv"]\n', "no.csv"),
        ('[environment]\nrequirements = ["alpha"]\n[project]\npath = "nowhere"\n', "project.path"),
    ],
)
def test_bad_settings_are_an_expected_failure(
    settings: str | None, said: str, project: Project
) -> None:
    (project.root / "stager.toml").unlink()
    if settings is not None:
        (project.root / "stager.toml").write_text(settings)
    assert said in refused(project, "--no-prove")
    assert list(project.store.bundles.iterdir()) == []


def test_an_incomplete_environment_is_refused_by_default(
    project: Project, wheelhouse: Path
) -> None:
    make_wheel(wheelhouse, "needy", files={"needy.py": "import not_in_the_bundle\n"})
    project.settings("needy")
    text = refused(project)
    assert "No module named 'not_in_the_bundle'" in text
    assert "--no-prove" in text
    assert built(project, "--no-prove")["packages"] == 1


def test_an_offline_root_that_cannot_be_written(project: Project) -> None:
    text = refused(project, OFFLINE_ROOT="/proc/no-store-here")
    for part in ("/proc/no-store-here", "OFFLINE_ROOT", "offline-root"):
        assert part in text
    (project.root / "file").touch()
    assert "file" in refused(project, OFFLINE_ROOT=str(project.root / "file"))


@pytest.mark.full
def test_a_pipe_in_place_of_a_file_of_the_store_keeps_nobody_waiting(project: Project) -> None:
    """Nobody ever writes to it: whoever opened it to be read would wait for good."""
    built(project)
    files = [path for path in project.store.root.rglob("*") if path.is_file()]
    folders = {"layers", "seals", "projects", "proofs", project.store.root.name}
    files = [path for path in files if path.parent.name in folders and "lock" not in path.name]
    assert {path.parent.name for path in files} == folders
    for path in files:
        before = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        for command in (("build", "--no-prove"), ("inspect",)):
            done = project.stager(*command)
            assert done.returncode in (0, 1), (path, done.stderr)
            assert "Traceback" not in done.stderr, (path, done.stderr)
        path.unlink()
        path.write_bytes(before)
