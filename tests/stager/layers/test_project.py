"""What a project ships, what its assets ship, and what is said about the rest."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

import pytest

from stager.core.errors import ConfigError, StagerError
from stager.layers.project import asset_excludes, asset_files, project_files
from stager.layers.tree import digest_contents, digest_tree
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
    write(tmp_path, "__pycache__/a.cpython-311.pyc", "p/__pycache__/x", ".mypy_cache/x")
    write(tmp_path, ".DS_Store", ".pytest_cache/x", ".ruff_cache/x", "js/node_modules/m/x")
    write(tmp_path, "my.egg-info/PKG-INFO", "src/of_distutils-1.0-py3.11.egg-info")
    write(tmp_path, "stager-support-7.tar.gz", "p/.DS_Store", "gitlike/x", "a.pyc.txt")
    tree = project_files(tmp_path, ["!*"])
    assert paths(tree) == ["a.pyc.txt", "gitlike/x", "keep.py"]
    assert tree.skipped == ()


def test_python_environments_are_left_out_with_a_note(tmp_path):
    write(tmp_path, "tools/env/pyvenv.cfg", "tools/env/bin/python", "miniconda/bin/python")
    write(tmp_path, "train.py", "miniconda/conda-meta/history")
    tree = project_files(tmp_path, [])
    assert paths(tree) == ["train.py"]
    assert tree.skipped == (
        "miniconda: a conda environment, left out",
        "tools/env: a virtual environment, left out",
    )
    (tmp_path / ".gitignore").write_text("env/\nminiconda\n")
    assert project_files(tmp_path, []).skipped == (), "no note on what the user knows of"


def test_exclude_wins_over_gitignore_both_ways(tmp_path):
    write(tmp_path, "model.pt", "keep.pt", "notes.md", "gen/code.py", "src/gen/x.py")
    (tmp_path / ".gitignore").write_text("*.pt\n!keep.pt\n/gen/code.py\n")
    found = paths(project_files(tmp_path, []))
    assert found == [".gitignore", "keep.pt", "notes.md", "src/gen/x.py"]
    tree = project_files(tmp_path, ["*.pt", "/.gitignore", "!/gen/code.py", "src/"])
    assert paths(tree) == ["gen/code.py", "notes.md"]


def test_the_repository_around_the_project_has_its_say(tmp_path):
    """Unless it ignores the whole project."""
    project = tmp_path / "examples/tiny"
    write(project, "train.py", "out/model.bin", "data.csv", "deep/out/x")
    (tmp_path / ".gitignore").write_text("/examples/*/out/\n*.csv\n")
    found = paths(project_files(project, []))
    assert found == ["data.csv", "deep/out/x", "out/model.bin", "train.py"]
    (tmp_path / ".git").mkdir()
    assert paths(project_files(project, [])) == ["deep/out/x", "train.py"]
    (project / ".gitignore").write_text("!data.csv\n/deep\n")
    assert paths(project_files(project, ["/.gitignore"])) == ["data.csv", "train.py"]
    (tmp_path / ".gitignore").write_text("/examples/*\n*.bin\n")
    found = paths(project_files(project, ["/.gitignore"]))
    assert found == ["data.csv", "out/model.bin", "train.py"]


def test_a_repository_inside_has_its_own_rules_only(tmp_path):
    write(tmp_path, ".git/HEAD", "build/x", "vendor/lib/build/x.py", "vendor/lib/.git/HEAD")
    write(tmp_path, "vendor/lib/x.tmp")
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "vendor/lib/.gitignore").write_text("*.tmp\n")
    assert paths(project_files(tmp_path, [".gitignore"])) == ["vendor/lib/build/x.py"]


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
    assert list(tree.skipped) == sorted(
        f"{name} -> {target}: it leads to nothing that is shipped, left out"
        for name, target in targets.items()
        if name not in kept
    )


def test_special_files_are_noted_and_not_opened(tmp_path, monkeypatch):
    write(tmp_path, "a.py")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's address is limited to some 100 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        tree = project_files(tmp_path, [])
    assert paths(tree) == ["a.py"]
    special = "a pipe, socket or device, left out"
    assert tree.skipped == (f"pipe: {special}", f"sock: {special}")


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
    none = r"^project\.path: .*trianer' is not a directory"
    with pytest.raises(ConfigError, match=none) as caught:
        project_files(tmp_path / "trianer", [])
    assert caught.value.hint == f"did you mean '{tmp_path}/trainer'?"
    with pytest.raises(ConfigError, match="is not a directory"):
        project_files(tmp_path / "file", [])


def test_a_thousand_files_are_quick_to_list_and_identify(tmp_path):
    rules = (f"/never-{number}/\n*.{number}\n" for number in range(50))
    (tmp_path / ".gitignore").write_text("".join(rules))
    for folder in range(20):
        write(tmp_path, *(f"pkg{folder}/mod{number}.py" for number in range(50)))
    found = []

    def look():
        tree = project_files(tmp_path, ["*.pt"])
        found.append((len(tree.files), digest_tree(tree, digest_contents(tree))))

    look()
    count = calls(look)
    assert found[0] == found[1]
    assert found[0][0] == 1001
    # 128 a file, about 0.15 ms, where this was written; one for each pattern would be 100 more.
    assert count < 200 * 1001


# --- What ``assets.paths`` ships: what its entries name, and what becomes of the links there


def test_assets_are_found_by_every_kind_of_name(tmp_path, monkeypatch):
    root = tmp_path / "project"
    data = [f"data/{name}" for name in ("a.csv", "b.csv", "c.txt")]
    write(root, *data, "vocab.txt", "[x].csv", "deep/1/m", "deep/2/m")
    write(tmp_path, "shared/big/one.bin", "shared/big/sub/two.bin", "home/tok/vocab.json")
    (root / ".gitignore").write_text("*\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "alias").symlink_to(root)
    big = ["big/one.bin", "big/sub/two.bin"]
    for asked, found in (
        (
            ["data/*.csv", "./vocab.txt", str(tmp_path / "shared/big"), "~/tok", "[x].csv", "**/m"],
            ["[x].csv", *big, *data[:2], "deep/1/m", "deep/2/m", "tok/vocab.json", "vocab.txt"],
        ),
        (["../shared/big/one.bin"], ["one.bin"]),
        (["../shared/big", "../shared/big/one.bin"], [*big, "one.bin"]),
        ([str(root / "data")], data),
        (["data/", "data/a.csv", "data/*"], data),
        ([str(tmp_path / "alias" / "vocab.txt")], ["vocab.txt"]),
    ):
        assert paths(asset_files(root, asked)) == found
    assert paths(asset_files(tmp_path / "alias", [str(root / "data/a.csv")])) == ["data/a.csv"]


def test_all_bad_entries_are_reported_at_once(tmp_path):
    root = tmp_path / "project"
    write(root, "data/ag_news.csv", "data/mnist.gz", "ok.txt")
    write(tmp_path, "one/x.csv", "two/x.csv")
    (root / "empty").mkdir()
    (root / "dangling").symlink_to("nowhere")
    (root / "upward").symlink_to("..")
    os.mkfifo(root / "pipe")
    entries = ["data/ag_new.csv", "ok.txt", "data/*.parquet", "empty/deep/x", "dangling", "pipe"]
    entries += ["../one/x.csv", str(tmp_path / "two/x.csv"), ".", "..", "", "zzz\0", "upward"]
    with pytest.raises(ConfigError) as caught:
        asset_files(root, entries)
    holds = "contains the project itself"
    data, same = root / "data", "would be shipped under the same name as"
    nowhere = "is a broken link (No such file or directory)"
    names = "dangling, data, empty, ok.txt, pipe"
    assert caught.value.context == (
        f"assets.paths[0]: 'data/ag_new.csv' does not exist; did you mean '{data}/ag_news.csv'?",
        f"assets.paths[2]: 'data/*.parquet' does not exist; {data} holds ag_news.csv, mnist.gz",
        f"assets.paths[3]: 'empty/deep/x' does not exist; {root}/empty holds nothing",
        f"assets.paths[4]: '{root}/dangling' {nowhere}",
        f"assets.paths[5]: '{root}/pipe' is a pipe, socket or device, not a file or a directory",
        f"assets.paths[7]: '{tmp_path}/two/x.csv' {same} '{tmp_path}/one/x.csv' (assets.paths[6])",
        f"assets.paths[8]: '{root}' {holds}",
        f"assets.paths[9]: '{tmp_path}' {holds}",
        f"assets.paths[10]: '' does not exist; did you mean '{root}'?",
        f"assets.paths[11]: 'zzz\\x00' does not exist; {root} holds {names}",
        f"assets.paths[12]: '{root}/upward' {holds}",
    )
    assert caught.value.message == "assets.paths: 11 problems"


def test_links_in_and_out_of_an_asset(tmp_path):
    root = tmp_path / "project"
    write(root, "data/v1/a.csv", "data-2/n.csv")
    write(tmp_path, "store/b.csv", "store/more/c.csv")
    for name, target in {
        "data/latest": root / "data/v1",
        "data/v1/again": "../latest/a.csv",
        "data/here": ".",
        "data/neighbour": "../data-2/n.csv",
        "data/store": tmp_path / "store",
        "data/store/more/home": root / "data/v1",
        "named": "data/v1/a.csv",
        "linked": "data",
    }.items():
        (root / name).symlink_to(target)
    there = ["neighbour", "store/b.csv", "store/more/c.csv", "v1/a.csv"]
    tree = asset_files(root, ["data", "named"])
    assert paths(tree) == [*(f"data/{name}" for name in there), "named"]
    assert tree.links == (
        ("data/here", "."),
        ("data/latest", "v1"),
        ("data/store/more/home", "../../v1"),
        ("data/v1/again", "a.csv"),
    )
    named = asset_files(root, ["linked"])
    assert paths(named) == [f"linked/{name}" for name in there]
    assert ("linked/latest", "v1") in named.links


def test_links_that_cannot_be_followed_are_all_reported(tmp_path):
    root = tmp_path / "project"
    write(root, "data/a.csv")
    write(tmp_path, "store/b.csv")
    links = {"broken": "gone.csv", "loop": "loop", "parent": "..", "store": "../../store"}
    for name, target in {**links, "store/back": "../store"}.items():
        (root / "data" / name).symlink_to(target)
    refused = r"^4 entries of assets\.paths cannot be shipped"
    with pytest.raises(StagerError, match=refused) as caught:
        asset_files(root, ["data"])
    endless = "which contains it: following it would never end"
    assert caught.value.context == (
        "data/broken: a link to gone.csv: No such file or directory",
        "data/loop: a link to loop: Too many levels of symbolic links",
        f"data/parent: a link to {root}, {endless}",
        f"data/store/back: a link to {tmp_path}/store, {endless}",
    )


def test_asset_excludes_take_assets_out_of_the_project(tmp_path):
    root = tmp_path / "project"
    odd = ["odd [name]*", "tail ", "!x", "a\\b"]
    write(root, "train.py", "data/a.csv", "sub/data/a.csv", "odd nam", *odd)
    write(tmp_path, "outside/o.csv")
    patterns = asset_excludes(["data", *odd, "../outside/o.csv", "missing"], root)
    assert patterns == ("/!x", "/a\\\\b", "/data", "/odd \\[name]\\*", "/tail\\ ")
    assert paths(project_files(root, patterns)) == ["odd nam", "sub/data/a.csv", "train.py"]
    assert asset_excludes(["*.csv", "data/*.csv"], root) == ("/data/a.csv",)
