"""The identity of a tree, and what becomes of one that changes under our hands."""

from __future__ import annotations

import os

import pytest

from bundle.format.layer import DEPTH_LIMIT, Link, check_link
from stager.core.errors import StagerError, WheelError
from stager.layers.project import asset_files, project_files
from stager.layers.tree import Collector, digest_contents, digest_tree
from tests.support.building import contents, layers_in, left_in_tmp, source_of
from tests.support.wheelhouse import make_wheel


def collect(root, **links):
    found = Collector()
    for entry in found.entries(str(root), ""):
        found.add(entry.name, entry.path)
    for path, target in links.items():
        found.link(path, target)
    return found.tree(what="the test", hint="")


def tree_digest(tree):
    return digest_tree(tree, digest_contents(tree))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a").write_bytes(b"one")
    (tmp_path / "project/b").write_bytes(b"two")
    return tmp_path / "project"


def test_the_file_that_our_own_output_goes_to_is_left_out(folder):
    status = (folder / "b").stat()
    found = Collector(outputs={(status.st_dev, status.st_ino)})
    for name in ("a", "b"):
        found.add(name, str(folder / name))
    tree = found.tree(what="the test", hint="")
    assert [file.path for file in tree.files] == ["a"]
    assert tree.skipped == ("b: the output of this command goes there, left out",)


def test_the_digest_changes_with_everything_that_is_shipped_and_nothing_else(folder):
    seen = [tree_digest(collect(folder))]
    os.utime(folder / "a", (1, 1))
    (folder / "a").chmod(0o600)
    assert tree_digest(collect(folder)) == seen[0]
    seen.append(tree_digest(collect(folder, link="a")))
    seen.append(tree_digest(collect(folder, link="b")))
    (folder / "a").chmod(0o744)
    seen.append(tree_digest(collect(folder)))
    (folder / "a").write_bytes(b"One")
    seen.append(tree_digest(collect(folder)))
    (folder / "a").rename(folder / "c")
    seen.append(tree_digest(collect(folder)))
    (folder / "c").unlink()
    seen.append(tree_digest(collect(folder)))
    assert len(set(seen)) == len(seen)


def test_files_that_vanish_are_all_named(folder):
    tree = collect(folder)
    (folder / "a").unlink()
    (folder / "b").unlink()
    with pytest.raises(StagerError, match=r"^2 of the files to be shipped") as caught:
        tree_digest(tree)
    assert caught.value.context == (
        f"{folder}/a: No such file or directory",
        f"{folder}/b: No such file or directory",
    )


def test_a_link_kept_is_one_that_a_layer_takes(folder):
    found = Collector()
    for path in ("a", "d/e/a"):
        found.add(path, str(folder / "a"))
    found.link("in", "d/e")
    found.link("links/only", "../a")
    targets = ["a", "./a", "d//e/a", "d/e/../../a", "in/../e/a", "links", "links/only"]
    # The kernel would take the last one; who reads the path as text sees it climb out.
    dropped = ["../a", "d/../../a", "d/e/../../../project/a", "in/../../a"]
    for number, target in enumerate(targets + dropped):
        found.link(f"l{number:02}", target)
    kept = found.tree(what="the test", hint="").links
    assert [target for path, target in kept if path.startswith("l0")] == targets
    for path, target in kept:
        check_link(Link(f"project/{path}", target))


def test_two_things_in_one_place_are_refused(folder):
    found = Collector()
    source = str(folder / "a")
    for path in ("file", "file/below", "both", "kept"):
        found.add(path, source)
    found.link("both", "kept")
    found.link("twice", "kept")
    found.link("twice", "kept")
    found.link("twice", "file")
    found.link("up", "kept")
    found.add("up/below", source)
    found.link("across", "kept")
    found.link("across/below", "kept")
    with pytest.raises(StagerError) as caught:
        found.tree(what="the test", hint="")
    assert caught.value.context == (
        "across: a directory, and something else of that name, would be put there",
        "both: a file and a link would both be put there",
        "file: a directory, and something else of that name, would be put there",
        "twice: two links would be put there",
        "up: a directory, and something else of that name, would be put there",
    )


# --- Paths that no node can hold are refused while a layer is made, and named


LONG_NAME = "n" * 251 + ".txt"
HARD = {
    "levels": ("d/" * 3000 + "x.txt", "levels, more than 256"),
    "name": (f"n{LONG_NAME}", "a name of 256 bytes, more than 255"),
    "bytes": ("/".join(["ü" * 120] * 16), "bytes, more than 3584"),
    "umlauts": ("ü" * 128, "a name of 256 bytes"),
}


@pytest.mark.parametrize("kind", HARD)
def test_a_wheel_with_a_path_that_no_node_can_hold_is_refused(kind, tmp_path, project):
    path, why = HARD[kind]
    wheel = make_wheel(tmp_path, "deep", files={"deep.py": "", f"deep/{path}": "x"})
    store = project.store
    with pytest.raises(WheelError, match=wheel.name) as caught:
        layers_in(store, source_of(wheel))
    told = "\n".join([caught.value.message, *caught.value.context])
    assert why in told
    assert path[:40] in told
    assert len(told) < 2000
    assert left_in_tmp(store) == []
    assert project.build().packed.path.exists(), "the next build is not disturbed"


def test_what_a_node_can_just_hold_passes(tmp_path, store):
    module = "m" * 252 + ".py"  # whose bytecode would have too long a name
    files = {"deep.py": "", f"deep/{LONG_NAME}": "x", "deep/" + "d/" * 200 + "x": "x", module: ""}
    source = source_of(make_wheel(tmp_path, "deep", files=files))
    (layer,) = layers_in(store, source).layers
    there = {path.rpartition("/")[2] for path in contents(store.layer(layer.id))}
    assert {LONG_NAME, module} <= there


@pytest.mark.parametrize("depth", [DEPTH_LIMIT, 2100])
def test_a_project_or_an_asset_as_deep_as_that_is_refused(depth, tmp_path, nested):
    deep = nested(tmp_path / "deep", depth)
    with pytest.raises(StagerError, match="cannot be shipped") as caught:
        project_files(deep, [])
    (line,) = caught.value.context
    assert "no node can hold" in line
    assert line.startswith("d/d/d/")
    assert len(line) < 500
    with pytest.raises(StagerError, match="cannot be shipped") as caught:
        asset_files(tmp_path, ["deep"])
    assert "no node can hold" in caught.value.context[0]
    assert project_files(nested(tmp_path / "less", 200), []).files
    assert project_files(deep, ["/d"]).files == ()
