"""Reading a bundle: whatever is done to the file, what comes out is right or an error of ours."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from bundle.format import archive
from bundle.format.archive import BundleFile
from bundle.format.manifest import BLOCK, NODE_NAME, PART_LIMIT
from bundle.format.zstd import Decompress
from bundle.protocol.problem import NodeError
from stager.pack.bundle import Packed
from tests.support.bundles import forge, refuses


def read_all(path: Path, decompress: Decompress) -> int:
    """Open a bundle and use all of it; the number of files it holds."""
    with BundleFile(str(path)) as bundle:
        found = 0
        for layer in bundle.manifest.layers:
            index = bundle.index(layer, bundle.head(layer), decompress)
            offset = bundle.offset(layer.member)
            for frame in index.frames:
                data = bundle.frame(offset, frame.size, frame.sha256)
                assert len(decompress(data, frame.unpacked_size)) == frame.unpacked_size
                offset += frame.size
            found += len(index.files)
        for part in (bundle.manifest.node, bundle.manifest.decompressor):
            if part is not None:
                assert len(bundle.read_part(part)) == part.size
    return found


def refused(path: Path, decompress: Decompress) -> str:
    """The error that using this bundle ends with."""
    with pytest.raises(NodeError) as caught:
        read_all(path, decompress)
    assert caught.value.problem.where == str(path)
    assert caught.value.problem.fix
    return str(caught.value)


@pytest.fixture
def copy(bare: Packed, tmp_path: Path) -> Path:
    """A bundle of one's own to damage."""
    return Path(shutil.copy(bare.path, tmp_path / "copy.tar"))


def interesting(packed: Packed) -> Iterator[int]:
    """Every byte but most of ``node.pyz``, of which there is a sample."""
    position = 0
    for name, length in packed.manifest.members():
        end = position + BLOCK + length + (-length % BLOCK)
        places = range(position, end)
        if name == NODE_NAME:
            inner = range(position + BLOCK + 256, position + BLOCK + length - 256, 251)
            places = [*range(position, inner.start), *inner, *range(inner.stop, end)]
        yield from places
        position = end
    yield from range(position, position + 2 * BLOCK)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.full)])
def test_one_flipped_bit_anywhere_is_found(
    bare: Packed, copy: Path, decompress: Decompress, step: int
) -> None:
    places = list(interesting(bare))
    assert places[-1] == bare.manifest.size - 1
    assert len(places) > 6000
    handle = os.open(copy, os.O_RDWR)
    survived = []
    for place in [*places[::step], places[-1]]:
        byte = os.pread(handle, 1, place)
        os.pwrite(handle, bytes([byte[0] ^ (1 << place % 8)]), place)
        try:
            read_all(copy, decompress)
            survived.append(place)
        except NodeError:
            pass
        os.pwrite(handle, byte, place)
    os.close(handle)
    assert survived == []
    assert read_all(copy, decompress)


def test_a_truncated_bundle_is_refused(bare: Packed, copy: Path, decompress: Decompress) -> None:
    whole = copy.read_bytes()
    blocks = range(0, len(whole), BLOCK)
    lengths = {*blocks, *range(0, 2 * BLOCK, 7), *(len(whole) - less for less in range(1, 1100, 9))}
    for length in sorted(lengths, reverse=True):
        os.truncate(copy, length)
        refused(copy, decompress)
    assert len(lengths) > 400


def test_a_bundle_that_grows_or_shrinks_is_refused(copy: Path, decompress: Decompress) -> None:
    size = copy.stat().st_size
    for more in (1, BLOCK, 20 * BLOCK):
        os.truncate(copy, size + more)
        assert "bytes, not" in refused(copy, decompress)
    os.truncate(copy, size)
    with BundleFile(str(copy)) as bundle:
        os.truncate(copy, size - 8 * BLOCK)
        layer = bundle.manifest.layers[0]
        with pytest.raises(NodeError, match="ends too early"):
            bundle.index(layer, bundle.head(layer), decompress)


def test_another_bundle_is_not_taken_for_this_one(bare: Packed, standard: Packed) -> None:
    with BundleFile(str(bare.path), bare.manifest.id) as bundle:
        assert bundle.manifest == bare.manifest
    with pytest.raises(NodeError, match="another bundle") as caught:
        BundleFile(str(bare.path), standard.manifest.id)
    assert all(one.manifest.id[:12] in str(caught.value) for one in (bare, standard))


def test_what_is_no_bundle_is_refused_and_leaves_no_descriptor_open(
    copy: Path, tmp_path: Path, decompress: Decompress
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with BundleFile(str(copy)):
        assert len(os.listdir("/proc/self/fd")) == before + 1
    with pytest.raises(NodeError):
        BundleFile(str(copy), "0" * 64)
    for content in (b"", b"PK\3\4" + bytes(5000), bytes(10240), b"7" * 4096, b"\xff" * 4096):
        copy.write_bytes(content)
        assert "not a bundle" in refused(copy, decompress)
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)  # opening one would wait for a writer
    loop.symlink_to("loop")
    for path in (tmp_path, pipe, Path("/dev/zero")):
        assert "it is not a file" in refused(path, decompress)
    assert "No such file" in refused(tmp_path / "absent", decompress)
    assert "symbolic links" in refused(loop, decompress)
    assert len(os.listdir("/proc/self/fd")) == before


def test_hostile_frames_are_refused(
    single: Packed, tmp_path: Path, base: Path, decompress: Decompress
) -> None:
    """Garbage, and another frame behind the first, in the same bytes: 256 MB out of a few."""

    def bomb(frames: list[bytes]) -> None:
        frames[0] += zstandard.ZstdCompressor().compress(bytes(1 << 28))

    def garbage(frames: list[bytes]) -> None:
        frames[0] = hashlib.sha256(b"garbage").digest()

    same = forge(single.path, tmp_path / "same.tar")  # not refused for being forged
    assert read_all(same, decompress) == single.manifest.files
    for change in (bomb, garbage):
        path = forge(single.path, tmp_path / "forged.tar", frames=change)
        with pytest.raises((NodeError, archive.LayerError)):
            read_all(path, decompress)
        assert "a frame" in refuses(path, base)


def test_a_layer_that_holds_more_than_the_manifest_says_is_refused(
    single: Packed, tmp_path: Path, decompress: Decompress
) -> None:
    """The room on a node is judged by these numbers; nor may its head reach into the frames."""
    head_size = single.manifest.layers[0].head_size
    for changed, why in (
        ({"files": 0}, "as much as promised"),
        ({"unpacked_size": 1}, "as much as promised"),
        ({"head_size": head_size + 1}, "is not what it must be"),
    ):
        path = forge(
            single.path,
            tmp_path / "forged.tar",
            manifest=lambda raw, changed=changed: raw["layers"][0].update(changed),
        )
        assert why in refused(path, decompress)


def test_a_manifest_that_claims_too_much_is_not_read(
    tmp_path: Path, decompress: Decompress
) -> None:
    """A sparse file: a terabyte of manifest must not be taken into memory."""
    path = tmp_path / "large.tar"
    header = archive.member_header("manifest.json", PART_LIMIT + 1)
    path.write_bytes(header)
    os.truncate(path, PART_LIMIT + 8 * BLOCK)
    assert "does not begin with manifest.json" in refused(path, decompress)
