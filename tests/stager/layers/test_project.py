"""What a project ships, what its assets ship, and what is said about the rest."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stager.core.errors import ConfigError, StagerError
from stager.layers.project import asset_files, project_files
from stager.layers.tree import content_digests, digest_of
from tests.support.counting import calls
from tests.support.trees import paths, write


@contextlib.contextmanager
def as_ordinary_user():
    """Act as someone whom permissions stop, which they do not for root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_dir():
    """A directory that other users can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="stager-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_files_are_sorted_and_described(tmp_path):
    write(tmp_path, "z.py", "a.py", "pkg/b.py", "pkg-x/c.py", "\u00e9.txt")
    (tmp_path / "a.py").chmod(0o700)
    (tmp_path / "z.py").chmod(0o664)
    (tmp_path / "empty").mkdir()
    tree = project_files(tmp_path, [])
    assert paths(tree) == ["a.py", "pkg-x/c.py", "pkg/b.py", "z.py", "\u00e9.txt"]
    assert [file.mode for file in tree.files] == [0o755, 0o644, 0o644, 0o644, 0o644]
    assert all(file.source.read_text() == f"content of {file.source.name}\n" for file in tree.files)
    assert tree.files[0].source == tmp_path / "a.py"
    assert tree.files[0].size == len("content of a.py\n")
    assert tree.size == sum(file.source.stat().st_size for file in tree.files)
    assert (tree.links, tree.skipped) == ((), ())


def test_what_tools_leave_behind_is_never_shipped(tmp_path):
    write(tmp_path, "keep.py", ".git/config", "sub/.git", ".hg/x", ".svn/x", ".venv/x", "a.pyc")
    write(
        tmp_path, "__pycache__/a.cpython-311.pyc", "p/__pycache__/x", ".mypy_cache/x", ".DS_Store"
    )
    write(
        tmp_path,
        ".pytest_cache/x",
        ".ruff_cache/x",
        "js/node_modules/m/x",
        "my.egg-info/PKG-INFO",
        "src/of_distutils-1.0-py3.11.egg-info",
        "stager-support-7.tar.gz",
    )
    write(tmp_path, "p/.DS_Store", "gitlike/x", "a.pyc.txt")
    tree = project_files(tmp_path, ["!*"])
    assert paths(tree) == ["a.pyc.txt", "gitlike/x", "keep.py"]
    assert tree.skipped == ()


def test_python_environments_are_left_out_with_a_note(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "tools/env"], check=True
    )
    write(tmp_path, "train.py", "miniconda/conda-meta/history", "miniconda/bin/python")
    tree = project_files(tmp_path, [])
    assert paths(tree) == ["train.py"]
    assert tree.skipped == (
        "miniconda: a conda environment, left out",
        "tools/env: a virtual environment, left out",
    )
    (tmp_path / ".gitignore").write_text("env/\nminiconda\n")
    assert project_files(tmp_path, []).skipped == (), "no note on what the user knows of"


def test_gitignore_counts_outside_a_repository_and_in_every_directory(tmp_path):
    write(tmp_path, "a.log", "runs/1", "pkg/a.log", "pkg/keep.log", "pkg/data/x.bin", "x.bin")
    (tmp_path / ".gitignore").write_text("*.log\nruns/\n")
    (tmp_path / "pkg/.gitignore").write_text("!keep.log\n/data/\n")
    assert paths(project_files(tmp_path, [])) == [
        ".gitignore",
        "pkg/.gitignore",
        "pkg/keep.log",
        "x.bin",
    ]


def test_a_gitignore_that_is_a_link_is_not_read_as_by_git(tmp_path):
    write(tmp_path, "a.log", "sub/a.log")
    (tmp_path / "rules").write_text("*.log\n")
    (tmp_path / "sub/.gitignore").symlink_to("../rules")
    tree = project_files(tmp_path, [])
    assert paths(tree) == ["a.log", "rules", "sub/a.log"]
    assert tree.links == (("sub/.gitignore", "../rules"),)


def test_exclude_wins_over_gitignore_both_ways(tmp_path):
    write(tmp_path, "model.pt", "keep.pt", "notes.md", "gen/code.py", "src/gen/x.py")
    (tmp_path / ".gitignore").write_text("*.pt\n!keep.pt\n/gen/code.py\n")
    assert paths(project_files(tmp_path, [])) == [
        ".gitignore",
        "keep.pt",
        "notes.md",
        "src/gen/x.py",
    ]
    tree = project_files(tmp_path, ["*.pt", "/.gitignore", "!/gen/code.py", "src/"])
    assert paths(tree) == ["gen/code.py", "notes.md"]


def test_the_repository_around_the_project_has_its_say(tmp_path):
    project = tmp_path / "examples/tiny"
    write(project, "train.py", "out/model.bin", "data.csv", "deep/out/x")
    (tmp_path / ".gitignore").write_text("/examples/*/out/\n*.csv\n")
    assert paths(project_files(project, [])) == [
        "data.csv",
        "deep/out/x",
        "out/model.bin",
        "train.py",
    ]
    (tmp_path / ".git").mkdir()
    assert paths(project_files(project, [])) == ["deep/out/x", "train.py"]
    (project / ".gitignore").write_text("!data.csv\n/deep\n")
    assert paths(project_files(project, ["/.gitignore"])) == ["data.csv", "train.py"]


def test_a_repository_that_ignores_the_whole_project_does_not(tmp_path):
    write(tmp_path, "home/project/train.py", "home/project/a.log")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("/home/*\n*.log\n")
    assert paths(project_files(tmp_path / "home/project", [])) == ["a.log", "train.py"]


def test_a_repository_inside_has_its_own_rules_only(tmp_path):
    write(tmp_path, ".git/HEAD", "build/x", "vendor/lib/build/x.py", "vendor/lib/.git/HEAD")
    write(tmp_path, "vendor/lib/x.tmp")
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "vendor/lib/.gitignore").write_text("*.tmp\n")
    tree = project_files(tmp_path, [".gitignore"])
    assert paths(tree) == ["vendor/lib/build/x.py"]


@pytest.mark.needs("git")
@pytest.mark.parametrize("seed", range(8))
def test_git_lists_the_same_files(tmp_path, monkeypatch, seed):
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "repo"
    subprocess.run(["git", "init", "-q", root], check=True)
    rng = random.Random(seed)
    words = ["src", "data", "runs", "a.py", "b.log", "c.bin", "model.pt", "test", "x y.txt"]
    for _ in range(60):
        file = root.joinpath(*(rng.choice(words) for _ in range(rng.randint(1, 4))))
        if not any(part.is_file() for part in file.parents) and not file.exists():
            write(root, str(file.relative_to(root)))
    lines = [
        "*.log",
        "runs/",
        "/data",
        "!b.log",
        "src/**/test",
        "*.p?",
        "!/src/*.pt",
        "**/data/*.bin",
    ]
    folders = [
        root,
        *(path for path in root.rglob("*") if path.is_dir() and ".git" not in path.parts),
    ]
    for folder in rng.sample(folders, 4):
        (folder / ".gitignore").write_text("\n".join(rng.sample(lines, 3)) + "\n")
    for where, exclude in ((root, rng.sample(lines, 2)), (max(folders, key=str), [])):
        argv = ["git", "ls-files", "-z", "-o", "--exclude-standard"]
        argv += [f"--exclude={pattern}" for pattern in exclude]
        listed = subprocess.run(argv, cwd=where, check=True, capture_output=True, text=True).stdout
        assert paths(project_files(where, exclude)) == sorted(filter(None, listed.split("\0")))


def test_links_within_are_kept_and_others_noted(tmp_path):
    root = tmp_path / "project"
    write(root, "src/a.py", "ignored/b.py", "pkg/deep/c.py")
    write(tmp_path, "elsewhere/x", "project-2/x")
    (root / ".gitignore").write_text("ignored/\n")
    targets = {
        "to_file": "src/a.py",
        "to_folder": "src",
        "pkg/up": "../src/a.py",
        "pkg/self": ".",
        "through": "pkg/up",
        "into": "to_folder/a.py",
        "around": "pkg/deep/../../src/./a.py",
        "outside": "../elsewhere/x",
        "neighbour": "../project-2",
        "back_in": "../project/src/a.py",
        "absolute": str(root / "src/a.py"),
        "after_absolute": "absolute",
        "broken": "missing",
        "not_shipped": "ignored/b.py",
        "loop": "loop",
        "ping": "pong",
        "pong": "ping",
        "file_as_folder": "src/a.py/..",
        "pkg/climbs": "deep/../../..",
    }
    for name, target in targets.items():
        (root / name).symlink_to(target)
    tree = project_files(root, [])
    kept = ["around", "into", "pkg/self", "pkg/up", "through", "to_file", "to_folder"]
    assert tree.links == tuple((name, targets[name]) for name in kept)
    assert paths(tree) == [".gitignore", "pkg/deep/c.py", "src/a.py"]
    assert tree.skipped == (
        "absolute -> " + targets["absolute"] + ": an absolute link, whose target the nodes may not "
        "have; left out",
        "after_absolute -> absolute: its target is not shipped, left out",
        "back_in -> ../project/src/a.py: it points outside, where the nodes may have something "
        "else; left out",
        "broken -> missing: its target is not shipped, left out",
        "file_as_folder -> src/a.py/..: its target is not shipped, left out",
        "loop -> loop: a loop of links, left out",
        "neighbour -> ../project-2: it points outside, where the nodes may have something else; "
        "left out",
        "not_shipped -> ignored/b.py: its target is not shipped, left out",
        "outside -> ../elsewhere/x: it points outside, where the nodes may have something else; "
        "left out",
        "ping -> pong: a loop of links, left out",
        "pkg/climbs -> deep/../../..: it points outside, where the nodes may have something "
        "else; left out",
        "pong -> ping: a loop of links, left out",
    )


def test_kept_links_work_where_only_the_tree_is(tmp_path):
    """A copy made of nothing but the tree resolves every link, through folders and other links."""
    root, copy = tmp_path / "project", tmp_path / "elsewhere/copy"
    write(root, "a/b/c.txt", "a/d.txt")
    (root / "l1").symlink_to("a/b")
    (root / "x/y").mkdir(parents=True)
    (root / "x/l2").symlink_to("../l1")
    (root / "x/y/l3").symlink_to("../l2/../d.txt")  # a/d.txt, not x/d.txt
    tree = project_files(root, [])
    for file in tree.files:
        write(copy, file.path)
    for name, target in tree.links:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).symlink_to(target)
    assert len(tree.links) == 3
    assert (copy / "x/y/l3").read_text() == "content of d.txt\n"
    assert (copy / "x/l2/c.txt").is_file()


def test_special_files_are_noted_and_not_opened(tmp_path, monkeypatch):
    write(tmp_path, "a.py")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's address is limited to some 100 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        tree = project_files(tmp_path, [])
    assert paths(tree) == ["a.py"]
    assert tree.skipped == ("pipe: a named pipe, left out", "sock: a socket, left out")


def test_everything_unusable_is_reported_at_once(open_dir):
    write(open_dir, "ok.py", "secret.txt", "locked/x", "new\nline.txt", "ignored\x1b.txt")
    write(open_dir, "ok.d/esc\x1b[31m.txt")
    Path(os.fsdecode(os.fsencode(open_dir) + b"/latin-\xe9.txt")).touch()
    (open_dir / ".gitignore").write_text("ignored*\n")
    (open_dir / "secret.txt").chmod(0)
    (open_dir / "locked").chmod(0)
    with as_ordinary_user(), pytest.raises(StagerError) as caught:
        project_files(open_dir, [])
    unprintable = "its name holds unprintable characters, or is not UTF-8"
    assert caught.value.context == (
        "'latin-\\udce9.txt': " + unprintable,
        "'new\\nline.txt': " + unprintable,
        "'ok.d/esc\\x1b[31m.txt': " + unprintable,
        "locked: Permission denied",
        "secret.txt: Permission denied",
    )
    assert caught.value.message == f"5 entries of the project {open_dir} cannot be shipped"
    assert "project.exclude" in caught.value.hint
    with as_ordinary_user():
        tree = project_files(open_dir, ["secret.txt", "locked", "new*", "latin*", "ok.d"])
    assert paths(tree) == [".gitignore", "ok.py"]


def test_a_gitignore_that_cannot_be_read_is_not_passed_over(open_dir):
    write(open_dir, "a.py", ".gitignore")
    (open_dir / ".gitignore").chmod(0)
    with as_ordinary_user(), pytest.raises(StagerError, match="cannot be shipped") as caught:
        project_files(open_dir, [".gitignore"])
    assert caught.value.context == (f"{open_dir}/.gitignore: Permission denied",)


def test_a_project_that_is_not_there(tmp_path):
    (tmp_path / "trainer").mkdir()
    write(tmp_path, "file")
    with pytest.raises(
        ConfigError, match=r"^project\.path: .*trianer' is not a directory"
    ) as caught:
        project_files(tmp_path / "trianer", [])
    assert caught.value.hint == f"did you mean '{tmp_path}/trainer'?"
    with pytest.raises(ConfigError, match="is not a directory"):
        project_files(tmp_path / "file", [])


def test_unusable_files_in_assets(open_dir):
    write(open_dir, "project/data/secret", "project/data/tab\t.csv", "project/data/ok")
    (open_dir / "project/data/secret").chmod(0)
    with as_ordinary_user(), pytest.raises(StagerError) as caught:
        asset_files(open_dir / "project", ["data"])
    assert caught.value.context == (
        "'data/tab\\t.csv': its name holds unprintable characters, or is not UTF-8",
        "data/secret: Permission denied",
    )


def test_a_thousand_files_are_quick_to_list_and_identify(tmp_path):
    (tmp_path / ".gitignore").write_text(
        "".join(f"/never-{number}/\n*.{number}\n" for number in range(50))
    )
    for folder in range(20):
        write(tmp_path, *(f"pkg{folder}/mod{number}.py" for number in range(50)))
    tree = project_files(tmp_path, ["*.pt"])
    digest = digest_of(tree, content_digests(tree))
    assert len(tree.files) == 1001
    found = []

    def look():
        again = project_files(tmp_path, ["*.pt"])
        found.append(digest_of(again, content_digests(again)))

    count = calls(look)
    assert found == [digest]
    # 128 a file, about 0.15 ms, where this was written; one for each pattern would be 100 more.
    assert count < 200 * len(tree.files)
