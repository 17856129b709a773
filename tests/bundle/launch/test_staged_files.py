"""The working directory of ranks on a node that does not see the project's folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bundle.launch import staged_files
from bundle.launch.program_variables import JobDirectories, locate_work_tree
from bundle.launch.staged_files import (
    has_outputs_besides,
    make_work_dir,
    place_earlier_results,
    record_sent_files,
    remove_sent_files,
    remove_staged_files,
)
from bundle.node.removal import delete_as_far_as_possible
from bundle.protocol.job import Job
from bundle.protocol.messages import UnpackAnswer, UnpackRequest
from bundle.results.stream import send_outputs
from stager.pack.bundle import Packed
from tests.support.jobs import job_for


@pytest.fixture
def directories(tmp_path: Path) -> JobDirectories:
    root = tmp_path / "root"
    environment = root / "envs" / "1"
    (environment / "project" / "conf").mkdir(parents=True)
    (environment / "project" / "conf" / "a.yaml").write_text("lr: 1")
    (environment / "project" / "train.py").write_text("pass")
    (environment / "project" / "latest").symlink_to("conf")
    (environment / "assets" / "data").mkdir(parents=True)
    (environment / "assets" / "data" / "x.bin").write_bytes(bytes(9))
    return JobDirectories(str(root), str(environment), str(tmp_path / "job"))


@pytest.fixture
def job(single: Packed, tmp_path: Path) -> Job:
    return job_for(single, tmp_path, run_subdir="")


def test_relative_paths_find_the_project_and_its_assets(
    directories: JobDirectories, job: Job
) -> None:
    work = Path(make_work_dir(directories, job))
    assert (work / "conf/a.yaml").read_text() == "lr: 1"
    assert (work / "latest/a.yaml").read_text() == "lr: 1"
    assert (work / "data/x.bin").read_bytes() == bytes(9)
    assert (work / "data/x.bin").is_symlink(), "assets are never copied"


def test_what_ranks_write_stays_local_and_alone_remains(
    directories: JobDirectories, job: Job
) -> None:
    work = Path(make_work_dir(directories, job))
    (work / "conf/a.yaml").write_text("lr: 2")
    (work / "data/new").write_text("x")
    make_work_dir(directories, job)  # another task of the node, or a restart
    assert (work / "conf/a.yaml").read_text() == "lr: 2"
    assert Path(directories.environment, "project/conf/a.yaml").read_text() == "lr: 1"
    remove_staged_files(locate_work_tree(job, directories.root), directories.environment)
    left = sorted(str(path.relative_to(work)) for path in work.rglob("*"))
    assert left == ["conf", "conf/a.yaml", "data", "data/new"]
    assert has_outputs_besides(str(work), ("data", "conf"), ("data/new",))
    assert not has_outputs_besides(str(work), ("da*",), ("data/new",))


def test_an_asset_among_the_outputs_is_a_copy_since_ranks_write_to_it(
    directories: JobDirectories, single: Packed, tmp_path: Path
) -> None:
    job = job_for(single, tmp_path, run_subdir="", outputs=("data",))
    work = Path(make_work_dir(directories, job))
    (work / "data/x.bin").write_bytes(b"next")
    assert Path(directories.environment, "assets/data/x.bin").read_bytes() == bytes(9)
    remove_staged_files(locate_work_tree(job, directories.root), directories.environment)
    assert (work / "data/x.bin").read_bytes() == b"next"


def test_a_run_in_a_folder_of_the_project_finds_the_folders_above(
    directories: JobDirectories, single: Packed, tmp_path: Path
) -> None:
    outside = job_for(single, tmp_path)  # of the project: it starts in an empty directory
    assert os.listdir(make_work_dir(directories, outside)) == []
    work = make_work_dir(directories, job_for(single, tmp_path, run_subdir="conf"))
    assert Path(work, "a.yaml").read_text() == "lr: 1"
    assert Path(work, "../train.py").read_text() == "pass"


def test_large_projects_are_linked(
    directories: JobDirectories, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_files, "_COPIED_BYTES", 3)
    monkeypatch.setattr(staged_files, "_MOST_ENTRIES", 1)
    work = Path(make_work_dir(directories, job))
    assert (work / "train.py").is_symlink()
    assert (work / "conf").is_symlink(), "a folder behind the last entry is linked whole"
    remove_staged_files(locate_work_tree(job, directories.root), directories.environment)
    assert os.listdir(work) == []
    project = Path(directories.environment, "project")
    for number in range(900):  # in folders of which each is small
        (project / f"folder{number % 30}").mkdir(exist_ok=True)
        (project / f"folder{number % 30}" / f"{number}").touch()
    monkeypatch.setattr(staged_files, "_MOST_ENTRIES", 200)
    make_work_dir(directories, job)
    assert sum(len(files) for _, _, files in os.walk(work)) < 200
    assert all((work / path.relative_to(project)).exists() for path in project.rglob("*"))


def test_a_program_that_deletes_and_replaces_what_is_there_changes_nothing_staged(
    directories: JobDirectories, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Path(directories.environment)
    (environment / "project" / "all").mkdir()
    (environment / "project" / "all" / "file").touch()
    monkeypatch.setattr(staged_files, "_COPIED_BYTES", 0)
    monkeypatch.setattr(staged_files, "_MOST_ENTRIES", 5)
    before = {str(path): path.lstat().st_mtime_ns for path in environment.rglob("*")}
    work = Path(make_work_dir(directories, job))
    assert (work / "all").is_symlink()
    (work / "train.py").unlink()
    (work / "train.py").mkdir()
    (work / "latest").unlink()
    (work / "latest").symlink_to(environment / "project")
    (work / "all").unlink()
    (work / "new").write_text("new")
    (work / "new").rename(work / "data" / "x.bin")
    shutil.rmtree(work / "conf")
    (work / "conf").symlink_to(environment / "project" / "conf")
    make_work_dir(directories, job)
    remove_staged_files(locate_work_tree(job, directories.root), directories.environment)
    delete_as_far_as_possible(str(work))
    assert {str(path): path.lstat().st_mtime_ns for path in environment.rglob("*")} == before


def test_a_folder_of_outputs_is_never_a_link(
    directories: JobDirectories, single: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = Path(directories.environment, "project", "results", "a")
    staged.mkdir(parents=True)
    (staged / ".gitkeep").touch()
    monkeypatch.setattr(staged_files, "_MOST_ENTRIES", 0)
    job = job_for(single, tmp_path, run_subdir="", outputs=("results/*",))
    work = Path(make_work_dir(directories, job))
    assert (work / "conf").is_symlink()
    (work / "results/a/metrics.json").write_text("{}")
    assert [path.name for path in staged.iterdir()] == [".gitkeep"]


def test_what_a_rank_writes_through_a_link_is_kept(directories: JobDirectories, job: Job) -> None:
    staged = Path(directories.environment, "assets", "data", "x.bin")
    os.utime(staged, (1, 1))
    work = Path(make_work_dir(directories, job))
    (work / "data/x.bin").write_bytes(b"next")
    os.utime(staged, (1 << 33, 1 << 33))
    remove_staged_files(locate_work_tree(job, directories.root), directories.environment)
    assert not (work / "data/x.bin").is_symlink()
    assert (work / "data/x.bin").read_bytes() == b"next"


def test_of_earlier_results_only_what_ranks_have_changed_remains(tmp_path: Path) -> None:
    """A directory with another name, or a link in its place, hides no file from its new place."""
    folders = ("kept", "deleted", "moved", "linked")
    for name in folders:
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "model").write_text("1")
    for name in ("same", "appended", "replaced", "renamed"):
        (tmp_path / "out" / name).write_text("1")
    record_sent_files(str(tmp_path), str(tmp_path), ["out"])
    out = tmp_path / "out"
    with (out / "appended").open("a") as log:
        log.write("2")
    times = (out / "replaced").stat().st_mtime_ns
    (out / "new").write_text("2")
    os.utime(out / "new", ns=(times, times))
    (out / "new").rename(out / "replaced")
    (out / "renamed").rename(out / "other")
    (out / "deleted" / "model").unlink()
    (out / "deleted").rmdir()
    (out / "moved").rename(out / "best")
    (out / "linked").rename(out / "target")
    (out / "linked").symlink_to("target")
    deleted = remove_sent_files(str(tmp_path), str(tmp_path))
    assert sorted(deleted) == ["out/deleted", "out/moved", "out/renamed"]
    left = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    assert left == {"appended", "replaced", "other", "best/model", "target/model"}
    assert not (tmp_path / ".stager-sent").exists()
    assert remove_sent_files(str(tmp_path), str(tmp_path)) == (), "it was looked at before"


def test_earlier_results_are_put_in_place_once_for_a_node_root(
    single: Packed, tmp_path: Path
) -> None:
    """They are received into the directory that is locked meanwhile."""
    (tmp_path / "home" / "out").mkdir(parents=True)
    (tmp_path / "home" / "out" / "model").write_text("1")
    with open(tmp_path / "stream", "wb") as stream:
        send_outputs(str(tmp_path / "home"), ["out"], stream)
    job = job_for(single, tmp_path, run_subdir="", outputs=("out",))
    root = str(tmp_path / "root")
    request = UnpackRequest(job, "n1", 0, 1, root, "")
    for _ in range(2):  # another node may share the node root
        assert place_earlier_results(request, str(tmp_path / "stream")) == UnpackAnswer()
    work = Path(locate_work_tree(job, root))
    assert sorted(path.name for path in work.iterdir()) == [".stager-sent", "out"]
    assert (work / "out" / "model").read_text() == "1"
