"""A second bundle takes what has not changed from the first one's environment, if it is sound."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundle.environment import listing
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


def files_of(packed: Packed, *names: str) -> int:
    return sum(layer.files for layer in packed.manifest.layers if layer.name in names)


def inodes(folder: Path, below: str) -> set[tuple[str, int]]:
    found = (path for path in (folder / SITE).glob(f"{below}/**/*") if path.is_file())
    return {(path.relative_to(folder).as_posix(), path.stat().st_ino) for path in found}


def test_unchanged_layers_are_linked_and_only_the_others_are_written(
    pair: Pair, root: Path
) -> None:
    first, second = (stage(packed, root.parent) for packed in pair)
    assert (first.linked, first.written) == (0, pair[0].manifest.files)
    assert second.linked == files_of(pair[1], "steady", "other")
    assert second.written == files_of(pair[1], "moving") == pair[1].manifest.files - second.linked
    one, two = Path(first.path), Path(second.path)
    assert len(inodes(one, "steady")) == 80  # bytecode too
    assert inodes(one, "steady") == inodes(two, "steady")
    assert not inodes(one, "moving") & inodes(two, "moving")
    for place, version in ((one, "1.0"), (two, "2.0")):
        assert (place / SITE / "moving" / "__init__.py").read_text() == f"VERSION = '{version}'\n"


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


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("N = 8\n"),
        put_back,
        turn_into_a_link,
        lambda path: path.chmod(0o755),
        lambda path: (path.parents[4] / ".stager" / "manifest.json").unlink(),
        lambda path: (path.parents[4] / ".stager" / "listing").write_text(""),
        lambda path: shutil.rmtree(path.parent),
    ],
    ids=["same-length", "older", "a-link", "mode", "no-manifest", "no-listing", "no-site"],
)
def test_a_damaged_file_is_written_afresh_and_never_shared(
    pair: Pair, root: Path, afresh: object, damage: Callable[[Path], Any]
) -> None:
    first = Path(stage(pair[0], root.parent).path)
    damage(first / SITE / "steady" / "f7.py")
    older = tree(first)
    second = stage(pair[1], root.parent)
    assert tree(first) == older  # nothing was written into the older one's files
    assert tree(Path(second.path)) == afresh
    assert second.written >= files_of(pair[1], "moving", "steady")
    assert not inodes(first, "steady") & inodes(Path(second.path), "steady")
    assert os.listdir(root / "incoming") == []


def test_a_linked_layer_keeps_the_time_it_was_written_at(pair: Pair, root: Path) -> None:
    """So a file from between its environment and an older one is found, too."""
    first = Path(stage(pair[0], root.parent).path)
    time.sleep(0.02)  # the clock of files ticks every few milliseconds
    second = Path(stage(pair[1], root.parent).path)
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

    stage(pair[0], root.parent)
    monkeypatch.setattr(os, "link", refuse)
    second = stage(pair[1], root.parent)
    assert (second.linked, second.written) == (0, pair[1].manifest.files)
    assert tree(Path(second.path)) == afresh


def test_garbage_among_environments_is_passed_over(pair: Pair, root: Path) -> None:
    def find(packed: Packed, envs: Path = root / "envs") -> dict[str, tuple[str, ...]]:
        return find_older_layers(str(envs), [layer.head for layer in packed.manifest.layers])

    envs = root / "envs"
    (envs / "empty").mkdir()
    (envs / "a-file").touch()
    (envs / "dangling").symlink_to("nowhere")
    for name, data in (("not-json", b"{"), ("other", b'{"id":1,"format":9}')):
        (envs / name / ".stager").mkdir(parents=True)
        (envs / name / ".stager" / "manifest.json").write_bytes(data)
    assert find(pair[0]) == find(pair[0], root / "absent") == {}
    made = stage(pair[0], root.parent).path
    assert find(pair[0]) == {layer.head: (made,) for layer in pair[0].manifest.layers}


def listed(source: Path, head: str) -> None:
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
