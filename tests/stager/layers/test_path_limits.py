"""Paths that no node can hold are refused while a layer is made, and named."""

from __future__ import annotations

import pytest

from bundle.format.layer import (
    DEPTH_LIMIT,
    NAME_LIMIT,
    PATH_LIMIT,
    Entry,
    Frame,
    Index,
    LayerError,
    Link,
    check_link,
    check_path,
    decode_head,
    encode_head,
)
from stager.core.errors import StagerError, WheelError
from stager.core.store import Store
from stager.layers.layer_build import make_layers
from stager.layers.project import asset_files, project_files
from tests.support.building import HOST, ORIGIN, contents, left_in_tmp, source_of
from tests.support.wheelhouse import make_wheel

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
    with store.lock(), pytest.raises(WheelError, match=wheel.name) as caught:
        make_layers([source_of(wheel)], store=store, target=HOST, jobs=1)
    told = "\n".join([caught.value.message, *caught.value.context])
    assert why in told
    assert path[:40] in told
    assert len(told) < 2000
    assert left_in_tmp(store) == []
    assert project.build().packed.path.exists(), "the next build is not disturbed"


def test_what_a_node_can_just_hold_passes(tmp_path):
    store = Store(tmp_path / "store")
    module = "m" * 252 + ".py"  # whose bytecode would have too long a name
    files = {"deep.py": "", f"deep/{LONG_NAME}": "x", "deep/" + "d/" * 200 + "x": "x", module: ""}
    source = source_of(make_wheel(tmp_path, "deep", files=files))
    with store.lock():
        (layer,) = make_layers([source], store=store, target=HOST, jobs=1).layers
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


@pytest.mark.parametrize("kind", HARD)
def test_the_far_side_refuses_them_too(kind):
    path, why = HARD[kind]
    with pytest.raises(LayerError, match=why):
        check_path(path)
    index = Index(
        files=(Entry(path, 1, 0o644, "0" * 64, 512),), links=(), frames=(Frame(9, 4096, "0" * 64),)
    )
    head = encode_head(index, ORIGIN, lambda data: data)
    with pytest.raises(LayerError, match=why):
        decode_head(head, lambda data: data)
    with pytest.raises(LayerError):
        check_link(Link("lib/a", "b/" * PATH_LIMIT))
    assert check_path("a/" + "n" * NAME_LIMIT)


def test_a_file_named_like_a_scheme_is_refused(tmp_path):
    wheel = make_wheel(
        tmp_path, "odd", files={"odd.py": "", "odd-1.0.data/purelib": "no directory"}
    )
    store = Store(tmp_path / "store")
    with store.lock(), pytest.raises(WheelError, match=r"members that no wheel may have") as caught:
        make_layers([source_of(wheel)], store=store, target=HOST, jobs=1)
    assert caught.value.context == (
        "odd-1.0.data/purelib is a file, where a directory is expected",
    )
