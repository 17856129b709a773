"""Outputs as they are written in ``stager.toml``, found and recognised by the same rules."""

import os
from pathlib import Path

import pytest

from bundle.results.patterns import expand_pattern, is_wanted, split_pattern


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    names = ("a.json", "b.pt", "deep/er/c.pt", "[1]/d.pt")
    for name in (*(f"out/{one}" for one in names), "top.pt", "é\n.pt", ".hidden/e.pt", ".env"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (folder / "out" / "loop").symlink_to("..")
    return folder


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("out", {"out"}),
        ("./out//", {"out"}),
        ("out/deep/../b.pt", None),
        ("*.pt", {"top.pt", "é\n.pt"}),
        ("o*/?.pt", {"out/b.pt"}),
        ("out/[1]", {"out/[1]"}),
        ("out/[ab].*", {"out/a.json", "out/b.pt"}),
        ("**/c.pt", {"out/deep/er/c.pt"}),
        ("out/**/*.pt", {"out/b.pt", "out/deep/er/c.pt", "out/[1]/d.pt"}),
        ("**/**/top.pt", {"top.pt"}),
        ("**", {"out", "top.pt", "é\n.pt"}),
        ("out/deep/**", {"out/deep/er"}),
        (".", {"out", "top.pt", "é\n.pt", ".hidden", ".env"}),
        (".*", {".hidden", ".env"}),
        (".hidden/*", {".hidden/e.pt"}),
        ("nothing", set()),
        ("top.pt/*", set()),
        *((wrong, None) for wrong in ("", "..", "/etc", "a/../../b", "a\0b")),
    ],
)
def test_what_an_output_stands_for(tree: Path, output: str, found: set[str] | None) -> None:
    pattern = split_pattern(output)
    assert (None if pattern is None else expand_pattern(str(tree), pattern)) == found
    # Home recognises exactly what the node finds.
    every = [
        os.path.relpath(os.path.join(top, name), tree)
        for top, folders, files in os.walk(tree)
        for name in (*folders, *files)
    ]
    assert {name for name in every if is_wanted(name, [output])} == (found or set())


def test_nobody_asked_for_hidden_files() -> None:
    assert not is_wanted(".ssh/authorized_keys", ["**", "*", "*/*", "**/*"])
    assert not is_wanted("out/x", ["out"])
    assert not is_wanted("ou", ["out"])
    assert is_wanted("b", ["a", "b"])
