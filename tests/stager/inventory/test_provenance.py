"""Where packages came from, by locks: known by digest, without credentials, never a local path."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.inventory.provenance import LockedSources, Provenance, find_lock, public_url
from stager.pack.bundle_file import ChosenBundle
from tests.support.building import Project


def _package(name: str, key: str, place: str, version: str = "1.0") -> str:
    hashes = f'hashes = {{ sha256 = "{key}" }}'
    sdist = place.endswith(".tar.gz")
    kind, value = "url" if place.startswith("https") else "path", place
    file = f'{{ {kind} = "{value}", {hashes} }}'
    found = f"sdist = {file}" if sdist else f"wheels = [{file}]"
    return f'[[packages]]\nname = "{name}"\nversion = "{version}"\n{found}\n'


A, B, C, D, E, F = (letter * 64 for letter in "abcdef")
LOCK = f"""
lock-version = "1.0"
created-by = "stager"
{_package("plain", A, "https://me:secret@index.example/f/plain-1.0-py3-none-any.whl?token=x")}
{_package("local", B, "/home/me/wheels/local-1.0-py3-none-any.whl")}
{_package("source", C, "https://index.example/f/source-2.0.tar.gz", "2.0")}
{_package("git", D, "/s/git-1.0-py3-none-any.whl")}
{_package("folder", E, "/s/folder-1.0-py3-none-any.whl")}
{_package("far", F, "/s/far-1.0-py3-none-any.whl")}
[tool.stager.sources]
"git-1.0-py3-none-any.whl" = "git+https://host.example/x/git.git@{"1" * 40}#subdirectory=p"
"folder-1.0-py3-none-any.whl" = "libs/folder"
"far-1.0-py3-none-any.whl" = "/home/me/far"
"""


@pytest.fixture
def sources(tmp_path: Path) -> LockedSources:
    (tmp_path / "pylock.toml").write_text(LOCK)
    (tmp_path / "broken.toml").write_text("[[packages")
    (tmp_path / "other.toml").write_text('lock-version = "1.0"\npackages = 3')
    names = ("absent.toml", "broken.toml", "other.toml", "pylock.toml")
    return LockedSources([tmp_path / name for name in names])


def test_each_kind_of_source(sources: LockedSources) -> None:
    plain = "https://index.example/f/plain-1.0-py3-none-any.whl"
    sdist = "https://index.example/f/source-2.0.tar.gz"
    git = f"git+https://host.example/x/git.git@{'1' * 40}"
    for name, version, digest, expected in (
        ("plain", "1.0", A, Provenance(url=plain, kind="wheel", sha256=A)),
        ("plain", "1.0", "0" * 64, Provenance()),  # another digest: it came from elsewhere
        ("local", "1.0", B, Provenance(kind="wheel")),
        ("source", "2.0", "0" * 64, Provenance(url=sdist, kind="sdist", sha256=C)),
        ("git", "1.0", D, Provenance(url=git, kind="vcs")),
        ("folder", "1.0", E, Provenance(kind="folder", folder="libs/folder")),
        ("far", "1.0", F, Provenance(kind="folder", folder="far")),
    ):
        assert sources.find(name, version, digest) == expected


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pass@h.example/a%2Bb.whl#sha256=1", "https://h.example/a%2Bb.whl"),
        ("https://${USER}:${PASSWORD}@h.example/a.whl", "https://h.example/a.whl"),
        ("https://token@h.example:8443/a?b=c", "https://h.example:8443/a"),
        ("ssh://git@h.example/a.git", "ssh://h.example/a.git"),
        ("https://[::1]:8/a", "https://[::1]:8/a"),
        ("https://h.example", "https://h.example"),
        ("file:///home/me/a.whl", ""),
        ("/home/me/a.whl", ""),
        ("https://h.example/a b", ""),
        ("https://h.example/%zz", ""),
        ("https://h.example/\x1b[2J", ""),
        ("https://h.example/\u202e", ""),
        ("https://[::1/a", ""),
        ("javascript://h.example/%0aalert(1)", ""),
        ("https://h.example/" + "a" * 3000, ""),
        ("", ""),
    ],
)
def test_the_part_of_a_url_that_others_may_see(url: str, shown: str) -> None:
    assert public_url(url) == shown


def test_the_first_that_names_every_wheel(project: Project, tmp_path: Path) -> None:
    built, lock = project.build(), project.root / "pylock.toml"
    chosen = ChosenBundle(path=built.packed.path, id=built.packed.manifest.id)
    damaged = tmp_path / "pylock.damaged.toml"
    damaged.write_text("no lock")
    partial = tmp_path / "pylock.partial.toml"
    partial.write_text(lock.read_text().partition("[[packages]]")[0])
    locks = (tmp_path / "absent", damaged, partial, lock)
    assert find_lock(chosen, locks) == lock
    assert find_lock(chosen, locks[:-1]) is None
