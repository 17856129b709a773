"""A file with some members of a bundle: written, refused when damaged, and made an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bundle.driver.plan import write_excerpt
from bundle.environment import unpack
from bundle.format.archive import BundleFile, Excerpt
from bundle.node.node_root import env_path, make_secure_root
from bundle.protocol.problem import NodeError
from stager.core.store import Store
from stager.core.values import Wheel
from stager.pack.bundle import Packed
from tests.support.bundles import HERE, Pair, make_bundle, stage, tree
from tests.support.namespaces import REPO
from tests.support.wheelhouse import make_wheel

SITE = f"lib/python{HERE.python}/site-packages"


def members(packed: Packed, *layers: str, wheel: bool = False) -> list[str]:
    part = packed.manifest.decompressor
    wanted = [layer for layer in packed.manifest.layers if layer.name in layers]
    found = {name for layer in wanted for name, _ in layer.members}
    return [*([part.name] if wheel and part else []), *found]


def written(packed: Packed, names: list[str], path: Path) -> Excerpt:
    with BundleFile(str(packed.path)) as bundle:
        assert write_excerpt(bundle, names, str(path)) == path.stat().st_size
        return Excerpt(bundle.manifest.to_bytes(), frozenset(names))


def made(packed: Packed, root: Path, path: Path, excerpt: Excerpt | None) -> unpack.Environment:
    return stage(packed, root.parent, unpack.Source(excerpt), path)


def test_it_is_a_tar_with_the_members_as_they_are(pair: Pair, tmp_path: Path) -> None:
    """A file that is there is not overwritten."""
    packed, path = pair[1], tmp_path / "parts.tar"
    names = members(packed, "steady", "moving", wheel=True)
    written(packed, names[::-1], path)  # in whatever order they are named
    before = path.read_bytes()
    with tarfile.open(packed.path) as whole, tarfile.open(path) as parts:
        assert parts.getnames() == [name for name in whole.getnames() if name in names]
        for name in names:
            ours, theirs = whole.extractfile(name), parts.extractfile(name)
            assert ours is not None
            assert theirs is not None
            assert ours.read() == theirs.read()
    with pytest.raises(NodeError, match="cannot be written"):
        written(packed, [], path)
    assert path.read_bytes() == before


def test_a_place_that_is_full_is_said(single: Packed, tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from bundle.format.archive import BundleFile
from bundle.driver.plan import write_excerpt
from bundle.protocol.problem import NodeError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with BundleFile(sys.argv[1]) as bundle:
    names = [name for name, _ in bundle.manifest.members()]
    try: write_excerpt(bundle, names, sys.argv[2])
    except NodeError as exc: print(exc)
"""
    argv = [sys.executable, "-c", code, str(single.path), str(tmp_path / "parts.tar")]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=True)
    assert "cannot be written; File too large" in done.stdout
    assert str(tmp_path) in done.stdout


def refusal(packed: Packed, path: Path, excerpt: Excerpt) -> str:
    with pytest.raises(NodeError) as caught, BundleFile(str(path), packed.manifest.id, excerpt):
        pass
    return str(caught.value)


def test_other_members_than_announced_and_other_bundles_are_refused(
    pair: Pair, tmp_path: Path
) -> None:
    (first, packed), path = pair, tmp_path / "parts.tar"
    sent = written(packed, members(packed, "steady", "other"), path)
    for names in ([], ["steady"], ["steady", "moving"], ["steady", "other", "moving"]):
        other = Excerpt(sent.manifest, frozenset(members(packed, *names)))
        assert "damaged or not a bundle" in refusal(packed, path, other)
    assert "another bundle" in refusal(first, path, sent)
    assert "damaged" in refusal(packed, path, Excerpt(b"{}", sent.members))
    with BundleFile(str(path), packed.manifest.id, sent):
        pass


def test_damage_never_becomes_an_environment(pair: Pair, root: Path, tmp_path: Path) -> None:
    first, second = pair
    made(first, root, first.path, None)
    path = tmp_path / "parts.tar"
    sent = written(second, members(second, "moving"), path)
    data = path.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 25)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(NodeError, match="damaged or not a bundle"):
            made(second, root, path, sent)
        assert not Path(env_path(str(root), second.manifest.id)).exists()
    assert os.listdir(root / "incoming") == []
    for cut in (*range(0, len(data), 512), len(data) - 1):
        path.write_bytes(data[:cut])
        assert "damaged or not a bundle" in refusal(second, path, sent)
    path.write_bytes(data + bytes(512))
    assert "damaged or not a bundle" in refusal(second, path, sent)


def test_with_the_older_environment_it_is_as_good_as_the_whole(
    pair: Pair, root: Path, tmp_path: Path
) -> None:
    first, second = pair
    made(first, root, first.path, None)
    sent = written(second, members(second, "moving"), tmp_path / "parts.tar")
    env = made(second, root, tmp_path / "parts.tar", sent)
    assert env.linked > 0
    assert env.written == sum(one.files for one in second.manifest.layers if one.name == "moving")
    (tmp_path / "afresh").mkdir()
    afresh = made(second, Path(make_secure_root(str(tmp_path / "afresh"))), second.path, None)
    assert tree(Path(env.path)) == tree(Path(afresh.path))
    assert made(second, root, tmp_path / "no such file", sent).reused


def test_nothing_but_the_list_of_a_smaller_bundle(
    store: Store, zstd_wheel: Wheel | None, root: Path, tmp_path: Path
) -> None:
    wheels = [make_wheel(tmp_path, "steady"), make_wheel(tmp_path, "other")]
    large = make_bundle(store, wheels, decompressor=zstd_wheel, name="less")
    small = make_bundle(store, wheels[:1], decompressor=zstd_wheel, name="less")
    made(large, root, large.path, None)
    sent = written(small, [], tmp_path / "parts.tar")
    env = made(small, root, tmp_path / "parts.tar", sent)
    assert (env.written, env.linked > 0) == (0, True)
    assert not (Path(env.path) / SITE / "other").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [("gone", "steady"), ("file", "steady"), ("layers", "steady"), ("decompressor", "zstandard")],
)
def test_an_older_environment_that_has_changed_since(
    pair: Pair, root: Path, tmp_path: Path, change: str, named: str
) -> None:
    """The node is asked for what it has, and only later unpacks: it then says what it lacks."""
    first, second = pair
    if change == "decompressor" and second.manifest.decompressor is None:
        pytest.skip("this Python has zstd of its own")
    older = Path(made(first, root, first.path, None).path)
    sent = written(second, members(second, "moving", wheel=change == "layers"), tmp_path / "p.tar")
    if change == "gone":
        sent = written(second, members(second, "moving", wheel=True), tmp_path / "q.tar")
        (tmp_path / "q.tar").replace(tmp_path / "p.tar")
        shutil.rmtree(older)
    elif change == "file":
        (older / SITE / "steady" / "f7.py").write_text("N = 'mine'\n")
    else:
        shutil.rmtree(older / ".stager" / change)
    with pytest.raises(NodeError) as caught:
        made(second, root, tmp_path / "p.tar", sent)
    said = str(caught.value)
    assert "a part of the environment is missing" in said
    assert named in said or "other" in said
    assert not Path(env_path(str(root), second.manifest.id)).exists()
    assert os.listdir(root / "incoming") == []
    assert made(second, root, second.path, None).written > 0  # all of it does
