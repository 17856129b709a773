import os
from pathlib import Path

import pytest

from bundle.launch import program_variables
from bundle.launch.program_variables import JobDirectories


@pytest.fixture
def directories(tmp_path: Path) -> JobDirectories:
    return JobDirectories(
        str(tmp_path / "root"), str(tmp_path / "root/envs/1"), str(tmp_path / "j")
    )


def repository(cache: Path, name: str, commit: str) -> None:
    (cache / name / "refs").mkdir(parents=True)
    (cache / name / "refs" / "main").write_text(commit)


def test_the_bundles_repositories_come_before_the_users(
    directories: JobDirectories, tmp_path: Path
) -> None:
    repository(Path(directories.environment, ".stager", "hub"), "models--a--b", "bundle")
    user = tmp_path / "user"
    repository(user, "models--a--b", "user")
    repository(user, "datasets--c", "user")
    (user / "token").write_text("secret")
    base = {"HOME": str(tmp_path), "HF_HUB_CACHE": str(user), "TRANSFORMERS_CACHE": str(user)}
    for _ in range(2):  # several tasks of a node
        program_variables.prepare(directories, base)
    said = program_variables.variables(directories, base)
    assert said["HF_HUB_CACHE"] == said["TRANSFORMERS_CACHE"]
    view = Path(said["HF_HUB_CACHE"])
    assert view.is_relative_to(directories.root)
    assert not view.is_relative_to(directories.environment)
    assert {path.name for path in view.iterdir()} == {
        "models--a--b", "datasets--c", "version.txt",
    }  # fmt: skip
    assert (view / "models--a--b/refs/main").read_text() == "bundle"
    # Another cache of the user's is another view.
    other = program_variables.variables(directories, {"HF_HUB_CACHE": str(tmp_path / "other")})
    assert other["HF_HUB_CACHE"] != str(view)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"HF_HUB_CACHE": "/shared"}, {}),
        ({"HF_HOME": "/shared"}, {}),
        ({"XDG_CACHE_HOME": "HERE"}, {"HF_HUB_CACHE": "HERE/huggingface/hub"}),
        ({"XDG_CACHE_HOME": "HERE/none"}, {}),
    ],
)
def test_without_models_in_the_bundle_nothing_is_made(
    directories: JobDirectories, tmp_path: Path, base: dict[str, str], expected: dict[str, str]
) -> None:
    (tmp_path / "huggingface" / "hub").mkdir(parents=True)
    base = {name: value.replace("HERE", str(tmp_path)) for name, value in base.items()}
    program_variables.prepare(directories, base)
    assert not os.path.exists(directories.root)
    expected = {name: value.replace("HERE", str(tmp_path)) for name, value in expected.items()}
    assert program_variables.variables(directories, base) == expected
