"""A second bundle takes what has not changed from the first one's environment, if it is sound."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundle.environment import listing, unpack
from bundle.environment.damage import compare_with_listing
from bundle.environment.hard_links import find_older_layers, link_layers
from bundle.format.layer import Entry
from bundle.protocol.digest import Digest
from stager.pack.bundle import Packed
from tests.support.bundles import HERE, Pair, stage, tree

SITE = f"lib/python{HERE.python}/site-packages"


@pytest.fixture(scope="module")
def afresh(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> object:
    """The tree of the second one where there is no other."""
    return tree(Path(stage(pair[1], tmp_path_factory.mktemp("afresh")).path))


def made(packed: Packed, root: Path) -> unpack.Environment:
    return stage(packed, root.parent)


def files_of(packed: Packed, *names: str) -> int:
    return sum(layer.files for layer in packed.manifest.layers if layer.name in names)


def inodes(folder: Path, below: str) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_ino
        for path in (folder / SITE).glob(f"{below}/**/*")
        if path.is_file()
    }


def test_unchanged_layers_are_linked_and_only_the_others_are_written(
    pair: Pair, root: Path
) -> None:
    first, second = (made(packed, root) for packed in pair)
    assert (first.linked, first.written) == (0, pair[0].manifest.files)
    assert second.linked == files_of(pair[1], "steady", "other")
    assert second.written == files_of(pair[1], "moving") == pair[1].manifest.files - second.linked
    one, two = Path(first.path), Path(second.path)
    assert len(inodes(one, "steady")) == 80  # bytecode too
    assert inodes(one, "steady") == inodes(two, "steady")
    assert not set(inodes(one, "moving").values()) & set(inodes(two, "moving").values())
    assert (two / SITE / "moving" / "__init__.py").read_text() == "VERSION = '2.0'\n"
    assert (one / SITE / "moving" / "__init__.py").read_text() == "VERSION = '1.0'\n"


Damage = Callable[[Path], Any]


def rewrite(text: str) -> Damage:
    return lambda path: path.write_text(text)


def replace(path: Path) -> None:
    """As editors and ``sed -i`` do: a new file under the old name."""
    other = path.with_suffix(".new")
    other.write_text("N = 9\n")
    other.rename(path)


def put_back(path: Path) -> None:
    """As ``cp -p`` leaves an older file of the same length."""
    replace(path)
    os.utime(path, (1_600_000_000, 1_600_000_000))


def turn_into_a_link(path: Path) -> None:
    """Its length as a link is the length of its target's name: that of the file."""
    path.unlink()
    path.symlink_to("f6.pyx"[: len("N = 7\n")])


DAMAGE: dict[str, Damage] = {
    "missing": Path.unlink,
    "same-length": rewrite("N = 8\n"),
    "replaced": replace,
    "older": put_back,
    "a-link": turn_into_a_link,
    "mode": lambda path: path.chmod(0o755),
    "no-manifest": lambda path: (path.parents[4] / ".stager" / "manifest.json").unlink(),
    "no-listing": lambda path: (path.parents[4] / ".stager" / "listing").write_text(""),
    "no-site": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_written_afresh_and_never_shared(
    pair: Pair, root: Path, afresh: object, damage: str
) -> None:
    first = made(pair[0], root)
    victim = Path(first.path, SITE, "steady", "f7.py")
    assert victim.read_text() == "N = 7\n"
    DAMAGE[damage](victim)
    older = tree(Path(first.path))
    second = made(pair[1], root)
    assert tree(Path(first.path)) == older  # nothing was written into the older one's files
    new = Path(second.path)
    assert (new / SITE / "steady" / "f7.py").read_text() == "N = 7\n"
    assert second.written >= files_of(pair[1], "moving", "steady")
    shared = {*inodes(Path(first.path), "steady").values()} & {*inodes(new, "steady").values()}
    assert not shared
    assert tree(new) == afresh
    assert os.listdir(root / "incoming") == []


def test_a_linked_layer_keeps_the_time_it_was_written_at(pair: Pair, root: Path) -> None:
    """So a file from between its environment and an older one is found, too."""
    first = Path(made(pair[0], root).path)
    time.sleep(0.02)  # the clock of files ticks every few milliseconds
    second = Path(made(pair[1], root).path)
    victim = second / SITE / "steady" / "f7.py"
    between = (first / ".stager" / "listing").stat().st_mtime_ns + 1
    assert between < (second / ".stager" / "listing").stat().st_mtime_ns
    replace(victim)
    os.utime(victim, ns=(between, between))
    (found,) = compare_with_listing(str(second), 1)
    assert found.path == f"{SITE}/steady/f7.py"


def test_where_links_are_refused_files_are_written(
    pair: Pair, root: Path, afresh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with too many links to a file, or where the kernel protects them."""

    def refuse(*names: object, **options: object) -> None:
        raise OSError(errno.EMLINK, "Too many links")

    made(pair[0], root)
    monkeypatch.setattr(os, "link", refuse)
    second = made(pair[1], root)
    assert (second.linked, second.written) == (0, pair[1].manifest.files)
    assert tree(Path(second.path)) == afresh


def test_garbage_beside_the_environments_is_passed_over(pair: Pair, root: Path) -> None:
    envs = root / "envs"
    (envs / "empty").mkdir()
    (envs / "a-file").touch()
    (envs / "dangling").symlink_to("nowhere")
    for name, data in (("not-json", b"{"), ("other", b'{"id":1,"format":9}')):
        (envs / name / ".stager").mkdir(parents=True)
        (envs / name / ".stager" / "manifest.json").write_bytes(data)
    assert find_older_layers(str(envs), [layer.head for layer in pair[0].manifest.layers]) == {}
    first = made(pair[0], root)
    found = find_older_layers(str(envs), [layer.head for layer in pair[1].manifest.layers])
    assert set(found.values()) == {(first.path,)}
    assert len(found) == 2
    assert (
        find_older_layers(str(root / "absent"), [layer.head for layer in pair[0].manifest.layers])
        == {}
    )


def test_the_newest_environment_is_asked_first(pair: Pair, root: Path) -> None:
    first, second = (made(packed, root) for packed in pair)
    for path, age in ((first.path, 1000), (second.path, 2000)):
        os.utime(path, (age, age))
    found = find_older_layers(str(root / "envs"), [layer.head for layer in pair[0].manifest.layers])
    assert set(found.values()) == {(first.path,), (second.path, first.path)}
    steady = next(layer for layer in pair[0].manifest.layers if layer.name == "steady")
    assert found[steady.head] == (second.path, first.path)


def listed(source: Path, head: str) -> None:
    """Publish what lies in a directory as an environment of one layer."""
    (source / ".stager").mkdir(exist_ok=True)
    (source / ".stager" / "listing").unlink(missing_ok=True)
    started = min(path.lstat().st_mtime_ns for path in source.iterdir())
    listing.write(str(source), source.name, [], [(head, None)], started)


def test_a_link_in_the_place_of_a_program_is_not_taken(tmp_path: Path) -> None:
    """As long as the program was, as old, and as executable as every link."""
    source, staging = tmp_path / "source", tmp_path / "staging"
    source.mkdir()
    staging.mkdir()
    (source / "tool").symlink_to("evil")
    listed(source, "one")
    entry = Entry("tool", 4, 0o755, Digest.of(b"1234"), 0)
    layers, older = [("one", [entry])], {"one": [str(source)]}
    assert link_layers(layers, older, str(staging), 1) == {}
    (source / "tool").unlink()
    (source / "tool").write_text("1234")
    (source / "tool").chmod(0o755)
    listed(source, "one")
    assert link_layers(layers, older, str(staging), 1).keys() == {"one"}
