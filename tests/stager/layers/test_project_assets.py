"""What ``assets.paths`` ships: what its entries name, and what becomes of the links there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stager.core.errors import ConfigError, StagerError
from stager.layers.project import asset_excludes, asset_files, project_files
from tests.support.trees import paths, write

DATA = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"


def test_assets_are_found_by_every_kind_of_name(tmp_path, monkeypatch):
    root = tmp_path / "project"
    write(
        root,
        "data/a.csv",
        "data/b.csv",
        "data/c.txt",
        "vocab.txt",
        "[x].csv",
        "deep/1/m",
        "deep/2/m",
    )
    write(tmp_path, "shared/big/one.bin", "shared/big/sub/two.bin", "home/tok/vocab.json")
    (root / ".gitignore").write_text("*\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    patterns = [
        "data/*.csv",
        "./vocab.txt",
        str(tmp_path / "shared/big"),
        "~/tok",
        "[x].csv",
        "**/m",
    ]
    tree = asset_files(root, patterns)
    assert paths(tree) == [
        "[x].csv",
        "big/one.bin",
        "big/sub/two.bin",
        "data/a.csv",
        "data/b.csv",
        "deep/1/m",
        "deep/2/m",
        "tok/vocab.json",
        "vocab.txt",
    ]
    assert paths(asset_files(root, ["../shared/big/one.bin"])) == ["one.bin"]
    both = asset_files(root, ["../shared/big", "../shared/big/one.bin"])
    assert paths(both) == ["big/one.bin", "big/sub/two.bin", "one.bin"]
    assert paths(asset_files(root, [str(root / "data")])) == [
        "data/a.csv",
        "data/b.csv",
        "data/c.txt",
    ]
    assert paths(asset_files(root, ["data/", "data/a.csv", "data/*"])) == paths(
        asset_files(root, ["data"])
    )
    (tmp_path / "alias").symlink_to(root)
    assert paths(asset_files(root, [str(tmp_path / "alias" / "vocab.txt")])) == ["vocab.txt"]
    assert paths(asset_files(tmp_path / "alias", [str(root / "data/a.csv")])) == ["data/a.csv"]


def test_relative_project_directories(tmp_path, monkeypatch):
    write(tmp_path, "project/data/a.csv", "project/x.py", "work/y")
    monkeypatch.chdir(tmp_path / "work")
    root = Path("../project")
    assert paths(asset_files(root, ["data"])) == ["data/a.csv"]
    assert asset_excludes(["data"], root) == ("/data",)
    assert paths(project_files(root, asset_excludes(["data"], root))) == ["x.py"]
    monkeypatch.chdir(tmp_path / "project")
    assert paths(asset_files(Path(), ["data"])) == ["data/a.csv"]


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
    names = "dangling, data, empty, ok.txt, pipe and 1 more"
    assert caught.value.context == (
        f"assets.paths[0]: 'data/ag_new.csv' does not exist; did you mean '{data}/ag_news.csv'?",
        f"assets.paths[2]: 'data/*.parquet' does not exist; {data} holds ag_news.csv, mnist.gz",
        f"assets.paths[3]: 'empty/deep/x' does not exist; {root}/empty is empty",
        f"assets.paths[4]: '{root}/dangling' {nowhere}",
        f"assets.paths[5]: '{root}/pipe' is a named pipe, not a file or a directory",
        f"assets.paths[7]: '{tmp_path}/two/x.csv' {same} '{tmp_path}/one/x.csv' (assets.paths[6])",
        f"assets.paths[8]: '{root}' {holds}",
        f"assets.paths[9]: '{tmp_path}' {holds}",
        f"assets.paths[10]: '' does not exist; did you mean '{root}'?",
        f"assets.paths[11]: 'zzz\\x00' does not exist; {root} holds {names}",
        f"assets.paths[12]: '{root}/upward' {holds}",
    )
    assert caught.value.message == "assets.paths: 11 problems"


def test_one_bad_entry_is_the_message(tmp_path):
    root = tmp_path / "project"
    write(root, *(f"shard-{number:02}" for number in range(9)))
    with pytest.raises(ConfigError) as caught:
        asset_files(root, ["weights.bin"])
    assert caught.value.message == (
        f"assets.paths[0]: 'weights.bin' does not exist; {root} holds shard-00, shard-01, "
        "shard-02, shard-03, shard-04 and 4 more"
    )
    assert caught.value.context == ()
    assert "stager.toml" not in caught.value.message
    assert str(root) in caught.value.hint


def test_assets_that_meet_in_one_place(tmp_path):
    root = tmp_path / "project"
    write(root, "data/a.csv", "data/b.csv")
    write(tmp_path, "other/data/a.csv", "other/data/c.csv")
    other = str(tmp_path / "other/data")
    assert paths(asset_files(root, [other, "data/b.csv"])) == [
        "data/a.csv",
        "data/b.csv",
        "data/c.csv",
    ]
    with pytest.raises(StagerError) as caught:
        asset_files(root, [other, "data/a.csv"])
    assert caught.value.context == (
        f"data/a.csv: {other}/a.csv and {root}/data/a.csv would both be put there",
    )
    with pytest.raises(ConfigError, match="would be shipped under the same name as"):
        asset_files(root, [other, "data"])


def test_the_snapshot_of_a_model_cache_becomes_plain_files(tmp_path):
    cache = tmp_path / "hub/models--org--tiny"
    write(cache, "blobs/abc", "blobs/def", "refs/main")
    snapshot = cache / "snapshots/123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / "model.bin").symlink_to("../../blobs/def")
    tree = asset_files(tmp_path / "project", [str(snapshot)])
    assert paths(tree) == ["123/config.json", "123/model.bin"]
    assert tree.files[0].source.read_text() == "content of abc\n"
    assert tree.files[0].size == len("content of abc\n")
    assert tree.links == ()
    whole = asset_files(tmp_path / "project", [str(cache)])
    assert paths(whole) == [
        f"models--org--tiny/{name}" for name in ("blobs/abc", "blobs/def", "refs/main")
    ]
    inside = "models--org--tiny/snapshots/123"
    assert whole.links == (
        (f"{inside}/config.json", "../../blobs/abc"),
        (f"{inside}/model.bin", "../../blobs/def"),
    )


def test_links_in_and_out_of_an_asset(tmp_path):
    root = tmp_path / "project"
    write(root, "data/v1/a.csv", "data-2/n.csv")
    write(tmp_path, "store/b.csv", "store/more/c.csv")
    (root / "data/latest").symlink_to(root / "data/v1")
    (root / "data/v1/again").symlink_to("../latest/a.csv")
    (root / "data/here").symlink_to(".")
    (root / "data/neighbour").symlink_to("../data-2/n.csv")
    (root / "data/store").symlink_to(tmp_path / "store")
    (tmp_path / "store/more/home").symlink_to(root / "data/v1")
    (root / "named").symlink_to("data/v1/a.csv")
    (root / "linked").symlink_to("data")
    tree = asset_files(root, ["data", "named"])
    assert paths(tree) == [
        "data/neighbour",
        "data/store/b.csv",
        "data/store/more/c.csv",
        "data/v1/a.csv",
        "named",
    ]
    assert tree.links == (
        ("data/here", "."),
        ("data/latest", "v1"),
        ("data/store/more/home", "../../v1"),
        ("data/v1/again", "a.csv"),
    )
    named = asset_files(root, ["linked"])
    assert paths(named) == [
        "linked/neighbour",
        "linked/store/b.csv",
        "linked/store/more/c.csv",
        "linked/v1/a.csv",
    ]
    assert ("linked/latest", "v1") in named.links


def test_links_that_cannot_be_followed_are_all_reported(tmp_path):
    root = tmp_path / "project"
    write(root, "data/a.csv")
    write(tmp_path, "store/b.csv")
    (root / "data/broken").symlink_to("gone.csv")
    (root / "data/loop").symlink_to("loop")
    (root / "data/parent").symlink_to("..")
    (root / "data/store").symlink_to("../../store")
    (tmp_path / "store/back").symlink_to("../store")
    with pytest.raises(
        StagerError, match=r"^4 entries of assets\.paths cannot be shipped"
    ) as caught:
        asset_files(root, ["data"])
    endless = "which contains it: following it would never end"
    assert caught.value.context == (
        "data/broken: a broken link to gone.csv",
        "data/loop: a loop of links",
        f"data/parent: a link to {root}, {endless}",
        f"data/store/back: a link to {tmp_path}/store, {endless}",
    )


def test_asset_excludes_take_assets_out_of_the_project(tmp_path):
    root = tmp_path / "project"
    write(
        root,
        "train.py",
        "data/a.csv",
        "sub/data/a.csv",
        "odd [name]*",
        "odd nam",
        "tail ",
        "!x",
        "a\\b",
    )
    write(tmp_path, "outside/o.csv")
    assets = ["data", "odd [name]*", "tail ", "!x", "a\\b", "../outside/o.csv", "missing"]
    patterns = asset_excludes(assets, root)
    assert patterns == ("/!x", "/a\\\\b", "/data", "/odd \\[name]\\*", "/tail\\ ")
    assert paths(project_files(root, patterns)) == ["odd nam", "sub/data/a.csv", "train.py"]
    assert asset_excludes(["*.csv", "data/*.csv"], root) == ("/data/a.csv",)


@pytest.mark.needs("data")
def test_real_data(tmp_path):
    write(tmp_path, "train.py")
    entries = [str(DATA / "ag_news.csv"), str(DATA / "mnist-*-ubyte.gz")]
    tree = asset_files(tmp_path, entries)
    assert paths(tree) == [
        "ag_news.csv",
        "mnist-t10k-images-idx3-ubyte.gz",
        "mnist-t10k-labels-idx1-ubyte.gz",
    ]
    assert tree.files[0].size == 1857427
