"""Where packages came from, by locks: known by digest, without credentials, never a local path."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.building.build import Built
from stager.inventory.provenance import LockedSources, Provenance, find_lock, public_url
from stager.pack.bundle_file import ChosenBundle
from tests.support.building import Project

A, B, C, D = (letter * 64 for letter in "abcd")
LOCK = f"""
lock-version = "1.0"
created-by = "stager"
[[packages]]
name = "plain"
version = "1.0"
wheels = [{{ url = "https://me:secret@index.example/f/plain-1.0-py3-none-any.whl?token=x", \
hashes = {{ sha256 = "{A}" }} }}]
[[packages]]
name = "local"
version = "1.0"
wheels = [{{ path = "/home/me/wheels/local-1.0-py3-none-any.whl", \
hashes = {{ sha256 = "{B}" }} }}]
[[packages]]
name = "source"
version = "2.0"
sdist = {{ url = "https://index.example/f/source-2.0.tar.gz", hashes = {{ sha256 = "{C}" }} }}
[[packages]]
name = "git"
version = "1.0"
wheels = [{{ path = "/s/git-1.0-py3-none-any.whl", hashes = {{ sha256 = "{D}" }} }}]
[[packages]]
name = "folder"
version = "1.0"
wheels = [{{ path = "/s/folder-1.0-py3-none-any.whl", hashes = {{ sha256 = "{"e" * 64}" }} }}]
[[packages]]
name = "far"
version = "1.0"
wheels = [{{ path = "/s/far-1.0-py3-none-any.whl", hashes = {{ sha256 = "{"f" * 64}" }} }}]
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
    assert sources.find("plain", "1.0", A) == Provenance(url=plain, kind="wheel", sha256=A)
    assert sources.find("local", "1.0", B) == Provenance(kind="wheel")
    sdist = "https://index.example/f/source-2.0.tar.gz"
    assert sources.find("source", "2.0", "0" * 64) == Provenance(url=sdist, kind="sdist", sha256=C)
    git = f"git+https://host.example/x/git.git@{'1' * 40}"
    assert sources.find("git", "1.0", D) == Provenance(url=git, kind="vcs")
    assert sources.find("folder", "1.0", "e" * 64) == Provenance(
        kind="folder", folder="libs/folder"
    )
    assert sources.find("far", "1.0", "f" * 64) == Provenance(kind="folder", folder="far")


def test_a_wheel_with_another_digest_came_from_elsewhere(sources: LockedSources) -> None:
    assert sources.find("plain", "1.0", "0" * 64) == Provenance()


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


# --- The lock of a bundle is one that names each of its wheels ----------------------------------


@pytest.fixture
def built(project: Project) -> Built:
    """A bundle; its lock is the project's."""
    return project.build()


def test_the_first_that_names_every_wheel(project: Project, built: Built, tmp_path: Path) -> None:
    lock = project.root / "pylock.toml"
    chosen = ChosenBundle(path=built.packed.path, id=built.packed.manifest.id)
    damaged = tmp_path / "pylock.damaged.toml"
    damaged.write_text("no lock")
    partial = tmp_path / "pylock.partial.toml"
    head, _, _ = lock.read_text().partition("[[packages]]")
    partial.write_text(head)
    locks = (tmp_path / "absent", damaged, partial, lock)
    assert find_lock(chosen, locks) == lock
    assert find_lock(chosen, locks[:-1]) is None
