"""Patterns of ``environment.prune``: what they leave out of a package, and what they may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stager.core.errors import ConfigError
from stager.layers.prune import check, concerned, matching, of_package
from stager.layers.source import LayerSource, layer_id
from stager.pack.members import inspect
from tests.support.building import HOST, SITE, index_of, wheel_of
from tests.support.wheelhouse import make_wheel

PATHS = (
    "p/__init__.py",
    "p/core.py",
    "p/lib/libp.a",
    "p/lib/libp.so",
    "p/test/data/a.txt",
    "p/sub/test/b.txt",
    "p-1.0.dist-info/METADATA",
    "p-1.0.dist-info/RECORD",
)
FILES = {path: f"# {path}\n" for path in PATHS if "dist-info" not in path}


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        ("/p/test/", {"p/test/data/a.txt"}),
        ("test/", {"p/test/data/a.txt", "p/sub/test/b.txt"}),
        ("*.a", {"p/lib/libp.a"}),
        ("/p/lib/libp.*", {"p/lib/libp.a", "p/lib/libp.so"}),
        ("/p/*/", {path for path in FILES if path.count("/") > 1}),
        ("/p/core.py/", set()),  # a slash at the end: a directory
        ("/core.py", set()),
        ("p/**/b.txt", {"p/sub/test/b.txt"}),
    ],
)
def test_a_pattern_is_matched_as_in_a_gitignore(pattern, left_out):
    assert matching(f"p:{pattern}", PATHS) == left_out


def test_a_package_has_its_own_patterns_and_all_words():
    entries = ("headers", "p:/p/test/", "pp:/pp/", "tests")
    assert of_package(entries, "p") == ("headers", "p:/p/test/", "tests")
    assert of_package(entries, "q") == ("headers", "tests")


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("/p/", "leaves out p/__init__.py: p could not be imported"),
        ("*.py", "leaves out p/__init__.py"),
        ("__init__.py", "leaves out p/__init__.py"),
        ("RECORD", "names metadata of p, which is always kept"),
        ("*.dist-info/", "names metadata of p"),
    ],
)
def test_what_a_package_needs_is_never_left_out(pattern, fault):
    with pytest.raises(ConfigError) as refused:
        check((f"p:{pattern}",), {"p": PATHS})
    assert fault in refused.value.message
    assert refused.value.hint


def test_all_refusals_are_in_one_error():
    with pytest.raises(ConfigError) as refused:
        check(("p:/p/", "p:RECORD", "p:/p/test/"), {"p": PATHS})
    assert [line.split('"')[1] for line in refused.value.context] == ["p:/p/", "p:RECORD"]


def test_what_has_no_effect_is_said():
    notes = check(("headers", "p:/p/tset/", "paa:*.a", "other:x", "p:*.a"), {"p": PATHS, "pab": ()})
    assert notes == [
        'environment.prune: "p:/p/tset/" leaves nothing out: no file of p matches',
        'environment.prune: "paa:*.a" leaves nothing out: the lock has no package paa; did you '
        "mean pab?",
        'environment.prune: "other:x" leaves nothing out: the lock has no package other',
    ]


def test_patterns_are_in_the_id_of_the_layers_they_concern(tmp_path):
    wheel = wheel_of(make_wheel(tmp_path, "p", files=FILES))

    def key(*entries):
        return layer_id(LayerSource.of_wheel(wheel, entries), HOST)

    whole = key()
    assert key("p:/p/test/") != whole
    assert key("p:/p/test/") != key("p:/p/sub/")
    assert key("p:/p/test/", "p:/p/sub/") == key("p:/p/sub/", "p:/p/test/")
    assert key("p:/p/nothing/", "q:/p/test/", "headers:x") == whole
    assert concerned(wheel.path, ("headers", "p:/p/nothing/")) == ("headers",)  # libp.a


def test_a_build_leaves_out_what_patterns_name(project, tmp_path):
    """The bytecode of a module goes with it, RECORD names what is there, and it can be undone."""
    wheel = make_wheel(tmp_path, "p", files={**FILES, "p/sub/__init__.py": "", "p/sub/m.py": ""})
    whole = project.locked(wheel).build()
    project.locked(wheel, more='prune = ["P:/p/sub/", "p:*.a", "p:/p/nothing/"]')
    done = project.stager("build", "--no-prove", "--offline", "--json")
    assert done.returncode == 0, done.stderr
    assert '"p:/p/nothing/" leaves nothing out' in done.stderr
    report = json.loads(done.stdout)
    assert report["pruned"]["what"] == ["p:*.a", "p:/p/sub/"]
    assert report["pruned"]["files"] == 4
    assert "left out: what 2 patterns match, 4 files, " in project.stager("inspect").stdout
    (layer,) = (one for one in inspect(Path(report["bundle"])).layers if one.name == "p")
    index = index_of(project.store.layer(layer.id))
    there = {entry.path.removeprefix(f"{SITE}/") for entry in index.files}
    assert {path for path in there if path.startswith("p/") and "__pycache__" not in path} == {
        "p/__init__.py",
        "p/core.py",
        "p/lib/libp.so",
        "p/test/data/a.txt",
    }
    assert not any("/sub/" in path for path in there)

    project.locked(wheel, more='prune = ["p:/p/"]')
    refused = project.stager("build", "--no-prove", "--offline")
    assert refused.returncode == 1
    assert "leaves out p/__init__.py" in refused.stderr
    assert project.locked(wheel).build().packed.path == whole.packed.path
