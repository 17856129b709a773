"""Layers laid over one another: who writes what, and which do not go together."""

import pytest

from bundle.environment.listing import is_document, merge, own_directories, own_files
from bundle.format.layer import Entry, Index, LayerError, Link
from bundle.format.manifest import Layer
from bundle.protocol.digest import Digest

EMPTY, OTHER = Digest.of(b""), Digest.of(b"other")
SITE = "lib/python3.11/site-packages"


def index(*paths: str, digest: str = EMPTY, **links: str) -> Index:
    files = tuple(Entry(path, 0, 0o644, digest, 512) for path in paths)
    return Index(files, tuple(Link(path.replace("__", "/"), to) for path, to in links.items()), ())


def layers(count: int) -> list[Layer]:
    sizes = dict.fromkeys(("head_size", "size", "unpacked_size", "files"), 0)
    return [
        Layer(Digest.of(b"%d" % n), "wheel", f"layer{n}", "1.0", EMPTY, **sizes)
        for n in range(count)
    ]


def merged(*indexes: Index):
    return merge(layers(len(indexes)), indexes, "3.11")


def test_of_equal_files_the_first_layer_writes() -> None:
    found = merged(index("lib/a", "lib/b"), index("lib/b", "lib/c"))
    assert [[entry.path for entry in entries] for entries in found.entries] == [
        ["lib/a", "lib/b"],
        ["lib/c"],
    ]


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "license.txt", "CHANGES-1.rst"])
@pytest.mark.parametrize("folder", ["", f"{SITE}/"])
def test_of_documents_at_the_top_the_first_layer_writes(name: str, folder: str) -> None:
    found = merged(index(folder + name), index(folder + name, digest=OTHER))
    assert [[entry.path for entry in entries] for entries in found.entries] == [[folder + name], []]
    assert not is_document(f"{folder}license.py")
    assert not is_document(f"{folder}pkg/{name}")


def test_every_directory_comes_after_those_it_lies_in() -> None:
    found = merged(index("lib/x/y/z", "project/p"), index(lib__l__up="../x", share__q="r"))
    made = set()
    for path in found.directories:
        parent = path.rpartition("/")[0]
        assert not parent or parent in made
        made.add(path)
    assert made >= {"lib/x/y", "lib/l", "share", "project", "bin", "assets", SITE, ".stager/site"}
    assert found.links == {"lib/l/up": "../x", "share/q": "r"}
    assert merged(index(lib__l="a"), index(lib__l="a")).links == {"lib/l": "a"}


@pytest.mark.parametrize(
    ("one", "two", "why"),
    [
        (index("lib/a"), index("lib/a", digest=OTHER), "lib/a differs in layer1 1.0"),
        (index(lib__l="a"), index(lib__l="b"), "lib/l leads elsewhere in layer1"),
        (index("lib/a"), index(lib__a="b"), "lib/a is a file, and a link"),
        (index("lib/a"), index("lib/a/b"), "lib/a is a directory"),
        (index("lib/a/b/c"), index("lib/a"), "lib/a is a directory"),
        (index(lib__a="b"), index("lib/a/b"), "lib/a is a directory"),
        (index(lib__x__a=".."), index(lib__x__y__b="../a/.."), "leads outside"),
        (index(lib__x="y"), index(lib__y="x"), "circles"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_disagree_are_refused(one: Index, two: Index, why: str) -> None:
    for alone in (one, two):
        assert merged(alone)
    with pytest.raises(LayerError, match=why):
        merged(one, two)


@pytest.mark.parametrize("path", own_files("3.11"))
def test_the_environments_own_files_are_not_overwritten(path: str) -> None:
    for hostile in (index(path), index(f"{path}/inside"), index(**{path.replace("/", "__"): "x"})):
        with pytest.raises(LayerError, match=f"{path} belongs to the environment"):
            merged(hostile)
    with pytest.raises(LayerError, match="belongs to the environment"):
        merged(index(f".stager/layers/{EMPTY}"))
    assert merged(index(".stager/site/trainer/__init__.py"))  # where the trainer goes


@pytest.mark.parametrize("path", own_directories("3.11"))
def test_nor_are_its_directories(path: str) -> None:
    while path:
        for hostile in (index(path), index(**{path.replace("/", "__"): "x"})):
            with pytest.raises(LayerError):
                merged(hostile)
        path = path.rpartition("/")[0]


def test_another_python_has_other_names() -> None:
    assert merge(layers(1), [index("bin/python3.12")], "3.11")
    with pytest.raises(LayerError):
        merge(layers(1), [index("bin/python3.12")], "3.12")
