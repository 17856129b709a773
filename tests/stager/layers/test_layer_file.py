"""One layer as a file: what the real zstd and tar see, and that only content decides its bytes."""

from __future__ import annotations

import array
import contextlib
import io
import os
import random
import tarfile

import pytest
import zstandard

from bundle.format.layer import HEAD_PREFIX, LayerError, head_summary
from stager.core.errors import WheelError
from stager.layers import layer_file
from stager.layers.layer_file import (
    FRAME_TARGET,
    LayerTar,
    LayerWriter,
    decompress_index,
    list_top_modules,
)
from tests.support.building import (
    ORIGIN,
    contents,
    frames_of,
    index_of,
    layer_of,
    listing,
    plain_tar,
)
from tests.support.wheelhouse import make_wheel

FILES = {
    "lib/z.py": b"last\n",
    "lib/a.py": b"first\n",
    "bin/tool": b"#!/bin/sh\n",
    "lib/empty": b"",
    "lib/block": bytes(512),
    "lib/über.txt": "ein Wort: ü\n".encode(),
    "lib/" + "deep/" * 40 + "a-rather-long-name.txt": b"longer than a tar header's field\n",
}


def write(place, files, **options):
    folder = place / "layers"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "layer"
    with LayerWriter(folder, **options) as writer:
        for path, data in files.items():
            writer.add(path, io.BytesIO(data), executable=path.startswith("bin/"))
        writer.write(target, ORIGIN)
    assert list(folder.iterdir()) == [target], "a temporary file is left"
    return target


def test_the_real_zstd_and_tar_read_it(tmp_path):
    layer = write(tmp_path, FILES)
    assert contents(layer) == FILES
    lines = listing(plain_tar(layer))
    assert len(lines) == len(FILES)
    assert all(line.split()[1] == "0/0" for line in lines)
    assert all("1970-01-01 00:00" in line for line in lines)
    names = [line.split("00:00:00 ", 1)[-1] for line in lines]
    assert names == sorted(names)
    modes = {line.rsplit(None, 1)[1]: line.split()[0] for line in lines}
    assert modes["bin/tool"] == "-rwxr-xr-x"
    assert modes["lib/a.py"] == "-rw-r--r--"


def test_a_spool_on_disk_gives_the_same_bytes(tmp_path, monkeypatch):
    in_memory = write(tmp_path / "1", FILES)
    monkeypatch.setattr(layer_file, "SPOOL_MEMORY", 3)
    assert write(tmp_path / "2", FILES).read_bytes() == in_memory.read_bytes()


def test_a_large_file_goes_over_several_independent_frames(tmp_path):
    data = random.Random(1).randbytes(2 * FRAME_TARGET + 12345)
    layer = write(tmp_path, {"a": b"before", "big": data, "z": b"after"})
    frames = frames_of(layer)
    assert len(frames) == 3
    assert all(len(frame) <= FRAME_TARGET + layer_file.COPY for frame in frames)
    assert contents(layer)["big"] == data


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../up", "a/../../b", "a//b", "a/./b", "a\nb", "a\udcff"]
)
def test_unsafe_paths_are_refused(path, tmp_path):
    with LayerWriter(tmp_path) as writer, pytest.raises(WheelError, match="unsafe path"):
        writer.add(path, io.BytesIO(b""))


def test_links_are_kept_unless_they_lead_out(tmp_path):
    target = tmp_path / "layer"
    with LayerWriter(tmp_path) as writer:
        writer.add("project/real", io.BytesIO(b"x"))
        writer.link("project/sub/alias", "../real")
        writer.write(target, ORIGIN)
    assert index_of(target).links == (("project/sub/alias", "../real"),)
    with tarfile.open(fileobj=io.BytesIO(plain_tar(target))) as archive:
        member = archive.getmember("project/sub/alias")
    assert member.issym()
    assert member.linkname == "../real"
    for out in ("/etc/passwd", "../../up", "", "../../project/real"):
        with LayerWriter(tmp_path) as writer, pytest.raises(WheelError, match="link"):
            writer.link("project/sub/alias", out)


def test_what_no_file_system_could_hold_is_refused_with_all_of_it(tmp_path):
    with LayerWriter(tmp_path) as writer:
        for path in ("a", "a/b/c", "d/e", "d/e/f", "fine/g"):
            writer.add(path, io.BytesIO(b""))
        writer.link("fine/g", "h")
        with pytest.raises(WheelError, match="also a directory or a link") as caught:
            writer.write(tmp_path / "layer", ORIGIN)
    assert caught.value.context == ("a", "d/e", "fine/g")
    assert not (tmp_path / "layer").exists()


def test_an_index_that_does_not_decompress_is_a_layer_error():
    assert decompress_index(zstandard.compress(b"index")) == b"index"
    with pytest.raises(LayerError, match="cannot be decompressed"):
        decompress_index(b"no zstd at all")


# --- Frames that are stored as they are, where compressing does not pay


NOISE = random.Random(3).randbytes(2 << 20)
TEXT = b"the same words again and again, "


@pytest.mark.parametrize("size", [0, 1, (128 << 10) - 1, 128 << 10, (128 << 10) + 1, 2 << 20])
def test_what_is_stored_comes_back(size):
    packed = layer_file.store_uncompressed(NOISE[:size])
    assert zstandard.ZstdDecompressor().decompress(packed) == NOISE[:size]
    assert len(packed) <= size + 16 + 3 * (size // (128 << 10) + 1)
    assert zstandard.get_frame_parameters(packed).content_size == size


def test_only_a_sampled_layer_stores(tmp_path):
    """Weights as float32 shrink by less than a tenth; such a frame is not worth the time."""
    drawn = random.Random(4)
    weights = array.array("f", (drawn.gauss(0, 0.02) for _ in range(300_000))).tobytes()
    files = {"assets/weights": weights}
    plain, stored = (
        write(tmp_path, files, sampled=sampled).read_bytes() for sampled in (False, True)
    )
    assert weights[:100_000] in stored
    assert len(plain) < len(weights) < len(stored)
    reader = zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True)
    assert reader.read().count(weights) == 1


# --- Parts of files, read from a layer that is compressed in frames


CONTENT = {"a": b"", "b": random.Random(1).randbytes(9000), "c": b"short", "d": bytes(3000)}


@pytest.fixture
def layer(tmp_path, monkeypatch):
    """A layer whose frames hold about a kilobyte each, so that a file lies in many of them."""
    monkeypatch.setattr(layer_file, "FRAME_TARGET", 1000)
    monkeypatch.setattr(layer_file, "COPY", 300)
    return write(tmp_path, CONTENT)


@contextlib.contextmanager
def opened(layer):
    """The tar in a layer, and the index."""
    index, size = index_of(layer), head_summary(layer.read_bytes()[:HEAD_PREFIX]).head_size
    with layer.open("rb") as handle:
        yield (
            LayerTar(index, size, lambda at, frame: os.pread(handle.fileno(), frame.size, at)),
            index,
        )


def test_any_part_of_any_file_is_what_was_written(layer):
    chance = random.Random(2)
    with opened(layer) as (tar, index):
        assert len(index.frames) > 9
        for entry in index.files:
            whole = CONTENT[entry.path]
            assert tar.file(entry, 0, len(whole)) == whole
            for _ in range(20):
                at, length = chance.randrange(10000), chance.randrange(4000)
                assert tar.file(entry, at, length) == whole[at : at + length]


def test_only_the_frames_that_are_asked_for_are_read(layer):
    data = bytearray(layer.read_bytes())
    data[-200:] = bytes(200)  # of the last file
    layer.write_bytes(data)
    with opened(layer) as (tar, index):
        assert tar.file(index.files[1], 100, 700) == CONTENT["b"][100:800]
        with pytest.raises(LayerError):
            tar.file(index.files[3], 0, 3000)


# --- Which modules a distribution is imported by, judged by real layers


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
    wheel = make_wheel(tmp_path, name, files=dict.fromkeys(files, ""))
    assert list_top_modules(name, index_of(layer_of(wheel))) == expected
