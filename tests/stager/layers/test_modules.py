"""Which modules a distribution is imported by, judged by real layers."""

from __future__ import annotations

import pytest

from stager.layers.layer_file import LayerWriter, top_modules
from stager.layers.wheel import add_wheel
from tests.support.building import HOST, ORIGIN, index_of
from tests.support.wheelhouse import make_wheel


def modules(folder, name, *files, wheel=None):
    made = wheel or make_wheel(folder, name, files=dict.fromkeys(files, ""))
    with LayerWriter(folder) as writer:
        add_wheel(writer, made, HOST)
        writer.write(folder / "layer", ORIGIN)
    return top_modules(name, index_of(folder / "layer"))


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("one", ["one/__init__.py", "one/two.py", "one/three/__init__.py"], ("one",)),
        ("single", ["single.py"], ("single",)),
        # The one named like the distribution, and no helper beside it.
        ("torch", ["torch/__init__.py", "functorch/__init__.py", "torchgen.py"], ("torch",)),
        ("my-thing", ["my_thing/__init__.py", "other.py"], ("my_thing",)),
        ("pillow", ["PIL/__init__.py"], ("PIL",)),
        ("pyyaml", ["yaml/__init__.py", "_yaml/__init__.py"], ("yaml",)),
        ("attrs", ["attr/__init__.py", "attrs/__init__.py"], ("attrs",)),
        ("two-names", ["b.py", "a/__init__.py"], ("a", "b")),
        ("shipped-tests", ["mine.py", "tests/__init__.py", "docs/__init__.py"], ("mine",)),
        # Nothing at the top: a namespace package is nobody's to import.
        ("ns-one", ["shared_ns/one/__init__.py"], ()),
        ("odd", ["not-a-name.py", "2fast/__init__.py", "data/file.txt"], ()),
        ("abi", ["ext.abi3.so", "lib.libs/libx.so.1"], ("ext",)),
        ("ext", ["ext.cpython-311-x86_64-linux-gnu.so"], ("ext",)),
    ],
)
def test_what_is_imported(name, files, expected, tmp_path):
    assert modules(tmp_path, name, *files) == expected


def test_a_real_extension(tmp_path, native_wheel):
    assert modules(tmp_path, "native-ext", wheel=native_wheel) == ("native_ext",)
