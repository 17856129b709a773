"""The patterns of .gitignore: explicit cases with their answer, and generated ones put to git."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from stager.layers.ignore import Ignore, anchor, is_excluded

needs_git = pytest.mark.needs("git")

FILES = (
    "a.pyc",
    "a.txt",
    "build/x",
    "doc/a.txt",
    "doc/frotz/a.txt",
    "doc/deep/er/frotz/b.txt",
    "foobar/k",
    "src/build",
    "src/a.pyc",
    "x y",
    "q:",
    "z\\",
)

CASES: dict[str, dict[str, list[str]]] = {
    # name: the .gitignore files by directory
    "a star does not need to match anything": {"": ["a.txt*"]},
    "a slash inside anchors": {"": ["doc/a.txt"]},
    "an anchored directory is no prefix": {"": ["/foo/"]},
    "a star for one directory": {"": ["doc/*/a.txt"]},
    "double star in the middle": {"": ["doc/**/frotz/*"]},
    "double star behind a wildcard is one star": {"": ["?oc**/frotz"]},
    "sets and ranges": {"": ["[!b-z].[p-p]y[a-d]"]},
    "a range ends where it ends": {"": ["a.[a-c-z]yc"]},
    "a set without an end matches nothing": {"": ["[a", "a.[pt"]},
    "an excluded directory holds nothing to take back": {"": ["build/", "!build/x"]},
    "its content can be excluded instead": {"": ["build/*", "!build/x"]},
    "a nested file is relative to its directory": {"doc": ["/a.txt"]},
    "a nested file in an excluded directory is not read": {"": ["doc"], "doc": ["!*"]},
    "unless escaped": {"": ["a.txt\\ "]},
    "an escaped letter is that letter": {"": ["\\a.pyc"]},
    "a backslash at the end matches nothing": {"": ["a.txt\\"]},
    "a byte order mark": {"": ["\ufeffa.pyc"]},
}


def lay_out(root, files, rules):
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for folder, lines in rules.items():
        (root / folder / ".gitignore").write_bytes("\n".join(lines).encode())


def ours(root):
    """What is left when every directory is walked from the top, as git does it."""
    found = set()

    def walk(folder, path, rules):
        if (folder / ".gitignore").is_file():
            content = (folder / ".gitignore").read_bytes()
            rules = [*rules, Ignore.from_bytes(content, base=path)]
        for entry in os.scandir(folder):
            here = f"{path}/{entry.name}" if path else entry.name
            if here == ".git" or is_excluded(rules, here, is_dir=entry.is_dir()):
                continue
            if entry.is_dir():
                walk(Path(entry.path), here, rules)
            else:
                found.add(here)

    walk(root, "", [])
    return found


def gits(root):
    argv = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=root, check=True, capture_output=True, timeout=300).stdout
    return {os.fsdecode(name) for name in listed.split(b"\0") if name}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """An empty git repository that no configuration of this machine reaches."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    subprocess.run(["git", "init", "-q", tmp_path / "repo"], check=True, timeout=300)
    return tmp_path / "repo"


@needs_git
def test_git_agrees_with_the_explicit_cases(repository):
    answers = {}
    for name, rules in CASES.items():
        lay_out(repository, FILES, rules)
        answers[name] = ours(repository), gits(repository)
        for folder in rules:
            (repository / folder / ".gitignore").unlink()
    assert {name for name, (mine, theirs) in answers.items() if mine != theirs} == set()
    assert len({frozenset(mine) for mine, _ in answers.values()}) > 8, "the cases differ"


NAMES = (
    *("a", "b", "ab", "a.b", "foo", "bar", "x y", "[a]", "a*", "#x", "!y", "c-d", "a]"),
    *("-", "z\\", "foo.pyc", "A", "b ", "*", "\\a", "a?", "  ", ".h", "^", "a\tb", "\udcff"),
)
PIECES = (
    *("a", "b", "foo", "bar", "*", "*", "?", "??", "/", "/", "/", "*.b"),
    *("[ab]", "[!a]", "[^b]", "[a-c]", "[]a]", "[a-]", "[", "]", "\\*", "\\a", "\\["),
    *("\\!", "\\#", "-", ".", " ", "!", "#", "x y"),
)


def make_pattern(rng):
    if rng.random() < 0.4:
        parts = [rng.choice((*NAMES, "*", "**", "?*")) for _ in range(rng.randint(1, 3))]
        text = rng.choice(("", "/")) + "/".join(parts)
    else:
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 5)))
    return rng.choice(("", "", "", "!")) + text.rstrip(" ") + rng.choice(("", "", "/", " ", "\r"))


def make_tree(rng, root):
    """Files at random places; returns every directory."""
    for _ in range(rng.randint(5, 25)):
        file = root.joinpath(*(rng.choice(NAMES) for _ in range(rng.randint(1, 4))))
        if not any(part.is_file() for part in file.parents) and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    folders = [path for path in sorted(root.rglob("*")) if path.is_dir()]
    # pathspec takes the spaces at the end of a directory's name for the end of a pattern.
    plain = (path for path in folders if not any(part.endswith(" ") for part in path.parts))
    return [root, *(path for path in plain if ".git" not in path.parts)]


@needs_git
@pytest.mark.parametrize("seed", range(12))
def test_git_agrees_on_generated_trees(repository, seed):
    rng = random.Random(seed)
    folders = make_tree(rng, repository)
    left_out = 0
    for _ in range(25):
        written = {}
        for folder in sorted({repository, *rng.sample(folders, min(3, len(folders)))}):
            written[folder] = [make_pattern(rng) for _ in range(rng.randint(1, 4))]
            content = "\n".join(written[folder]) + rng.choice(("\n", ""))
            (folder / ".gitignore").write_bytes(content.encode(errors="surrogateescape"))
        kept = ours(repository)
        assert kept == gits(repository), written
        present = [path for path in repository.rglob("*") if path.is_file()]
        left_out += sum(".git" not in path.parts for path in present) - len(kept)
        for folder in written:
            (folder / ".gitignore").unlink()
    assert left_out > 0  # the patterns did match something


@needs_git
@pytest.mark.parametrize("seed", range(3))
def test_anchored_names_one_path_and_no_other(repository, seed):
    folders = make_tree(random.Random(seed), repository)
    files = {path for folder in folders for path in folder.iterdir() if path.is_file()}
    names = {str(path.relative_to(repository)) for path in files}
    assert len(names) > 4
    for name in names:
        (repository / ".gitignore").write_bytes(os.fsencode(anchor(name)) + b"\n")
        assert names - ours(repository) == {name}
        assert names - gits(repository) == {name}
