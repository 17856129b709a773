"""Real projects in one go: a project of uv, a lock that stays put, a script that brings its own."""

import subprocess
from pathlib import Path

import pytest

from stager.lock.uv import require_uv
from tests.support.building import Project
from tests.support.index_server import Index, serve
from tests.support.small_torch import TORCH
from tests.support.sources import git_commit, own_backend
from tests.support.wheelhouse import make_wheel


def packages(project: Project) -> dict[str, str]:
    """Return the packages in the newest bundle."""
    layers = project.report("inspect")["layers"]
    return {one["name"]: one["version"] for one in layers if one["kind"] == "wheel"}


def test_a_project_of_uv_from_its_lock_to_a_bundle(
    project: Project, wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git_commit(own_backend(tmp_path / "from-git"))
    make_wheel(tmp_path / "extra", "special", "1.0", requires=["beta<2"])
    make_wheel(wheelhouse, "special", "9.0")
    monkeypatch.setenv("PIP_NO_INDEX", "")
    with serve(Index(folder=wheelhouse)) as usual, serve(Index(folder=tmp_path / "extra")) as more:
        monkeypatch.setenv("PIP_INDEX_URL", usual.url)
        (project.root / "pyproject.toml").write_text(
            f"""\
[project]
name = "mine"
version = "0"
requires-python = ">=3.10"
dependencies = ["from-git", "special", "alpha"]
[tool.uv.sources]
from-git = {{ git = "{(tmp_path / "from-git").as_uri()}", branch = "main" }}
special = {{ index = "more" }}
[[tool.uv.index]]
name = "usual"
url = "{usual.url}"
default = true
[[tool.uv.index]]
name = "more"
url = "{more.url}"
explicit = true
"""
        )
        subprocess.run([*require_uv(), "lock", "-q"], cwd=project.root, check=True)
        (project.root / "stager.toml").unlink()
        assert project.report("init")["requirements"] == ["uv.lock"]
        changes = project.report("lock")["changes"]
        assert [one["name"] for one in changes["added"]] == ["alpha", "beta", "from-git", "special"]
        assert project.report("build")["proved"]
    expected = {"alpha": "1.0", "beta": "1.1", "from-git": "1.0", "special": "1.0"}
    assert packages(project) == expected
    assert commit in (project.root / "pylock.toml").read_text()
    code = "import alpha, from_git, special; print(special.VERSION)"
    done = project.stager("exec", "--", "python", "-c", code)
    assert done.stdout.strip() == "1.0", done.stderr


def test_a_stale_lock_of_uv_is_not_built(
    project: Project, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheelhouse, "tqdm")
    monkeypatch.setenv("PIP_NO_INDEX", "")
    monkeypatch.setenv("UV_CACHE_DIR", str(project.root.parent / "cache"))
    file = project.root / "pyproject.toml"
    with serve(Index(folder=wheelhouse)) as index:
        file.write_text(
            f"""\
[project]
name = "mine"
version = "0"
requires-python = ">=3.10"
dependencies = ["alpha"]
[[tool.uv.index]]
url = "{index.url}"
default = true
"""
        )
        lock = [*require_uv(), "lock", "-q"]
        subprocess.run(lock, cwd=project.root, check=True)
        project.settings("uv.lock").build(prove=False)
        file.write_text(file.read_text().replace('"alpha"]', '"alpha", "tqdm"]'))

        for options in ((), ("--offline",)):
            refused = project.stager("build", *options)
            assert refused.returncode == 1, (options, refused.stderr)
            assert "uv.lock is out of date: its pyproject.toml has changed" in refused.stderr
        refused = project.expect("build", "--locked", code=1)
        assert "`uv lock`, then `stager lock`" in refused.stderr
        refused = project.stager("exec", "--", "python", "-c", "import alpha")
        assert "the requirements of project have changed" in refused.stderr

        subprocess.run(lock, cwd=project.root, check=True)
        assert "added tqdm 1.0" in project.stager("build", "--no-prove").stderr
    project.expect("build", "--locked", "--offline")


def test_a_script_that_brings_its_own(project: Project, wheelhouse: Path) -> None:
    make_wheel(wheelhouse, "torch", "2.13.0", files=TORCH)
    (project.root / "stager.toml").unlink()
    (project.root / "pyproject.toml").write_text('[project]\nname = "around"\nversion = "0"\n')
    (project.root / "train.py").write_text(
        """\
# /// script
# requires-python = ">=3.10"
# dependencies = ["alpha", "torch"]
# [tool.uv]
# override-dependencies = ["beta==1.0"]
# ///
import alpha, beta
print("alpha", alpha.VERSION, "beta", beta.VERSION)
"""
    )
    local = ("--allocation", "local", "--nproc-per-node", "1", "--log-dir", "logs")
    done = project.expect("run", *local, "--", "train.py")
    assert "alpha 1.0 beta 1.0" in done.stdout + done.stderr
    assert (project.root / "pylock.train.toml").is_file()
    assert not (project.root / "pylock.toml").exists()

    again = project.stager("exec", "--", "python", "train.py")
    assert again.stdout == "alpha 1.0 beta 1.0\n", again.stderr
    script = (project.root / "train.py").read_text()
    (project.root / "train.py").write_text(script.replace('"torch"]', '"torch", "my-odd-name"]'))
    assert project.report("build", "train.py")["packages"] == 4

    project.settings("alpha")
    refused = project.expect("lock", "train.py", code=1)
    assert "stager.toml does" in refused.stderr


def test_a_script_that_uv_has_locked(
    project: Project, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "")
    script = project.root / "train.py"
    (project.root / "stager.toml").unlink()
    with serve(Index(folder=wheelhouse)) as index:
        script.write_text(
            f"""\
# /// script
# requires-python = ">=3.10"
# dependencies = ["alpha", "beta<2"]
# [[tool.uv.index]]
# url = "{index.url}"
# default = true
# ///
"""
        )
        lock = [*require_uv(), "lock", "-q", "--script", "train.py"]
        subprocess.run(lock, cwd=project.root, check=True)
        script.write_text(script.read_text() + "print('of the script')\n")
        make_wheel(wheelhouse, "beta", "1.9")  # newer, and not what uv has locked
        assert project.report("build", "train.py")["packages"] == 2
        assert 'version = "1.1"' in (project.root / "pylock.train.toml").read_text()
        refused = project.stager("build", "train.py", "--upgrade")
        assert "`uv lock --script train.py`" in refused.stderr

        script.write_text(script.read_text().replace('"beta<2"', '"beta"'))
        refused = project.expect("build", "train.py", code=1)
        assert "train.py.lock is out of date: the block of train.py has changed" in refused.stderr

        project.settings("train.py", "tqdm")
        make_wheel(wheelhouse, "tqdm")
        done = project.expect("lock")
        assert "train.py.lock does not count" in done.stderr
        assert 'version = "2.0"' in (project.root / "pylock.toml").read_text()
