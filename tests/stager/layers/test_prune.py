"""What ``environment.prune`` leaves out of real wheels, and what it must not."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from stager.core.errors import ConfigError
from stager.layers.prune import (
    NOTE,
    RULES,
    check,
    list_effective_entries,
    list_left_out,
    list_matching,
)
from stager.layers.source import LayerSource, layer_id
from stager.pack.members import inspect
from tests.support.building import HOST, SITE, contents, fake_installation, layer_of, wheel_of
from tests.support.wheelhouse import make_wheel

BOTH = ("headers", "tests")
HEADERS = {
    "p/include/p/api.h": "int p(void);\n",
    "p/include/p/__tables.c": "",
    "p/lib/libp.a": "!<arch>\n",
    "p/share/cmake/p.cmake": "",
    "p/core.cuh": "",
    "p-1.0.data/headers/p.h": "",
    "p-1.0.data/data/include/p/other.hpp": "",
}
TESTS = {
    "p/tests/__init__.py": "",
    "p/tests/test_one.py": "import p\nfrom . import helper\n",
    "p/tests/helper.py": "",
    "p/tests/data/table.csv": "1,2\n",
    "p/sub/test/x_test.py": "",
    "p/test/Atoms_test": "\x7fELF",
    "p/bin/test_api": "\x7fELF",
}
KEPT = {
    "p/__init__.py": "from p import testing\n",
    "p/testing/__init__.py": "",
    "p/testing/test_support.py": "",
    "p/bin/tool": "\x7fELF",
    "p/sub/__init__.py": "",
    "p/sub/data.c": "",
    "p/share/note.txt": "",
}


def names(folder, files, *words, **options):
    """What these words leave out of a wheel with these files."""
    with zipfile.ZipFile(make_wheel(folder, "p", files=files, **options)) as archive:
        return set(list_left_out(archive, words))


def test_each_word_leaves_its_own_out(tmp_path):
    for words, left_out in (
        ((), ()),
        (("headers",), HEADERS),
        (("tests",), TESTS),
        (BOTH, (*HEADERS, *TESTS)),
    ):
        assert names(tmp_path, {**HEADERS, **TESTS, **KEPT}, *words) == set(left_out)
    for package in ("p/include/loader.py", "p/include/fast.so"):  # a folder with a common name
        files = {package: "", "p/include/table.json": "", "p/include/api.h": ""}
        assert names(tmp_path, files, "headers") == {"p/include/api.h"}


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_top.py",  # the only package of its wheel, whatever it is called
        "p/test/client.py",  # a test framework for others: no tests in it
        "p/testing/test_it.py",
        "p/tests.py",
        "p/test_utils/scripts/run.py",
        "p/contest/test_it.py",
    ],
)
def test_what_is_called_like_a_test_and_is_none_stays(tmp_path, path):
    assert names(tmp_path, {"p/__init__.py": "", path: ""}, "tests") == set()


@pytest.mark.parametrize(
    "user",
    [
        "import p.tests",
        "import os, p.tests.helper as helper",
        "from p.tests import helper",
        "from .tests import helper",
        "from . import tests",
        "from . import (\n    core,\n    tests,\n)",
        "from \\\n    .tests import helper",
        "if True: from p.tests import helper",
        "import os; import p.tests",
        "def later():\n    from p.tests.helper import thing",
        "import importlib\nimportlib.import_module('p.tests.helper')",
        "import importlib\nimportlib.import_module('.tests', __package__)",
    ],
)
def test_tests_that_the_package_uses_stay(tmp_path, user):
    used = {"p/tests/test_one.py": "", "p/tests/helper.py": "", "p/core.py": f"{user}\n"}
    files = {"p/__init__.py": "", **used, "p/sub/tests/test_two.py": ""}
    assert names(tmp_path, files, "tests") == {"p/sub/tests/test_two.py"}


def test_tests_that_kept_tests_or_an_entry_point_use_stay(tmp_path):
    files = {
        "p/core.py": "from p.a.tests import helper\n",
        "p/a/tests/test_a.py": "from p.b.tests.test_b import thing\n",
        "p/b/tests/test_b.py": "",
        "p/c/tests/test_c.py": "from p.a.tests import helper\n",
        "p/d/tests/test_d.py": "def main(): ...\n",
    }
    points = "[console_scripts]\ncheck = p.d.tests.test_d:main\n"
    assert names(tmp_path, files, "tests", entry_points=points) == {"p/c/tests/test_c.py"}


def test_the_layer_and_its_record_have_the_rest(tmp_path):
    wheel = make_wheel(tmp_path, "p", files={**HEADERS, **TESTS, **KEPT})
    layer = layer_of(wheel, *BOTH)
    found = contents(layer)
    installed = {path.removeprefix(f"{SITE}/") for path in found if "__pycache__" not in path}
    assert {path for path in installed if ".dist-info/" not in path} == set(KEPT)
    noted = json.loads(found[f"{SITE}/p-1.0.dist-info/{NOTE}"])
    size = sum(len(text) for text in [*HEADERS.values(), *TESTS.values()])
    assert noted == {"what": list(BOTH), "files": len(HEADERS) + len(TESTS), "bytes": size}

    python = fake_installation([layer], tmp_path / "env")
    (dist,) = importlib.metadata.distributions(path=[str(tmp_path / "env" / SITE)])
    listed = dist.files or []
    assert {str(file) for file in listed} >= {"p/__init__.py", f"p-1.0.dist-info/{NOTE}"}
    assert [file for file in listed if not Path(str(file.locate())).exists()] == []
    subprocess.run([python, "-c", "import p; p.testing"], check=True)

    plain = make_wheel(tmp_path / "plain", "p", files=KEPT)  # of which nothing is left out
    before = layer_of(plain).read_bytes()
    assert layer_of(plain, *BOTH).read_bytes() == before


def test_what_is_left_out_is_part_of_the_id_where_a_wheel_has_it(tmp_path, monkeypatch):
    plain = wheel_of(make_wheel(tmp_path / "1", "p", files=KEPT))
    headed = wheel_of(make_wheel(tmp_path / "2", "p", files={**KEPT, **HEADERS}))

    def key(wheel, *entries):
        return layer_id(LayerSource.from_wheel(wheel, entries), HOST)

    assert key(plain, *BOTH, "p:/p/nothing/", "q:/p/sub/") == key(plain)
    assert list_effective_entries(headed.path, (*BOTH, "p:/p/nothing/")) == ("headers",)
    assert key(headed, *BOTH) == key(headed, "headers")
    assert key(headed, "p:/p/lib/", "p:/p/sub/") == key(headed, "p:/p/sub/", "p:/p/lib/")
    ids = [(), ("headers",), ("p:/p/lib/",), ("p:/p/sub/",)]
    before = [key(headed, *entries) for entries in ids]
    assert len(set(before)) == len(ids)
    monkeypatch.setattr("stager.layers.source.RULES", RULES + 1)
    after = [key(headed, *entries) for entries in ids]
    assert [one == two for one, two in zip(before, after, strict=True)] == [True, *[False] * 3]


# --- Patterns of ``environment.prune``: what they leave out of a package, and what they may not


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


def test_a_pattern_is_matched_as_in_a_gitignore():
    for pattern, left_out in (
        ("/p/test/", {"p/test/data/a.txt"}),
        ("test/", {"p/test/data/a.txt", "p/sub/test/b.txt"}),
        ("*.a", {"p/lib/libp.a"}),
        ("/p/lib/libp.*", {"p/lib/libp.a", "p/lib/libp.so"}),
        ("/p/*/", {path for path in FILES if path.count("/") > 1}),
        ("/p/core.py/", set()),  # a slash at the end: a directory
        ("/core.py", set()),
        ("p/**/b.txt", {"p/sub/test/b.txt"}),
    ):
        assert list_matching(f"p:{pattern}", PATHS) == left_out


def test_what_a_package_needs_is_never_left_out():
    for pattern, fault in (
        ("/p/", "leaves out p/__init__.py: p could not be imported"),
        ("*.py", "leaves out p/__init__.py"),
        ("__init__.py", "leaves out p/__init__.py"),
        ("RECORD", "names metadata of p, which is always kept"),
        ("*.dist-info/", "names metadata of p"),
    ):
        with pytest.raises(ConfigError) as refused:
            check((f"p:{pattern}",), {"p": PATHS})
        assert fault in refused.value.message
        assert refused.value.hint
        with pytest.raises(ConfigError) as refused:  # all of them at once
            check((f"p:{pattern}", "p:METADATA", "p:/p/test/"), {"p": PATHS})
        named = [line.split('"')[1] for line in refused.value.context]
        assert named == [f"p:{pattern}", "p:METADATA"]


def test_what_has_no_effect_is_said():
    notes = check(("headers", "p:/p/tset/", "paa:*.a", "other:x", "p:*.a"), {"p": PATHS, "pab": ()})
    assert notes == [
        'environment.prune: "p:/p/tset/" leaves nothing out: no file of p matches',
        'environment.prune: "paa:*.a" leaves nothing out: the lock has no package paa; did you '
        "mean pab?",
        'environment.prune: "other:x" leaves nothing out: the lock has no package other',
    ]


def test_a_build_says_what_was_left_out(project, tmp_path):
    """The bytecode of a module goes with it, RECORD names what is there, and it can be undone."""
    more = {"p/sub/__init__.py": "", "p/sub/m.py": "", "p/tests/test_it.py": "", "p/api.h": ""}
    wheel = make_wheel(tmp_path, "p", files={**FILES, **more})
    whole = project.locked(wheel).build()
    assert inspect(whole.packed.path).pruned.files == 0
    entries = '["tests", "headers", "P:/p/sub/", "p:*.a", "p:/p/nothing/"]'
    project.locked(wheel, more=f"prune = {entries}")
    done = project.stager("build", "--no-prove", "--offline", "--json")
    assert done.returncode == 0, done.stderr
    assert '"p:/p/nothing/" leaves nothing out' in done.stderr
    report = json.loads(done.stdout)
    left_out = ["headers", "p:*.a", "p:/p/sub/", "tests"]
    assert sorted(report["pruned"]["what"]) == left_out
    assert report["pruned"]["files"] == 6
    assert report["layers_built"] == 2  # the project's too, as stager.toml is in it
    assert report["files"] < whole.packed.manifest.files
    shown = project.stager("inspect").stdout
    assert (
        "left out: headers and tests of the packages and what 2 patterns match, 6 files, " in shown
    )
    project.locked(wheel, more='prune = ["p:/p/"]')
    refused = project.stager("build", "--no-prove", "--offline")
    assert refused.returncode == 1
    assert "leaves out p/__init__.py" in refused.stderr
    back = project.locked(wheel).build()
    assert (back.packed.path, back.made.built) == (whole.packed.path, 0)
