"""One layer as a file: what the real zstd and tar see, and that only content decides its bytes."""

from __future__ import annotations

import hashlib
import io
import random
import stat
import tarfile

import pytest
import zstandard

from bundle.format.layer import LayerError
from stager.core.errors import WheelError
from stager.layers import layer_file
from stager.layers.layer_file import FRAME_TARGET, LayerWriter, compression, decompress_index
from tests.support.building import ORIGIN, contents, frames_of, index_of, listing, plain_tar

FILES = {
    "lib/z.py": b"last\n",
    "lib/a.py": b"first\n",
    "bin/tool": b"#!/bin/sh\n",
    "lib/empty": b"",
    "lib/block": bytes(512),
    "lib/über.txt": "ein Wort: ü\n".encode(),
    "lib/" + "deep/" * 40 + "a-rather-long-name.txt": b"longer than a tar header's field\n",
}


def write(place, files):
    folder = place / "layers"
    folder.mkdir(parents=True)
    target = folder / "layer"
    with LayerWriter(folder) as writer:
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


def test_the_index_describes_the_tar(tmp_path):
    layer = write(tmp_path, FILES)
    index, tar = index_of(layer), b"".join(frames_of(layer))
    assert [entry.path for entry in index.files] == sorted(FILES)
    for entry in index.files:
        data = tar[entry.offset : entry.offset + entry.size]
        assert data == FILES[entry.path]
        assert entry.sha256 == hashlib.sha256(data).hexdigest()
        assert stat.filemode(entry.mode) == ("?rwxr-xr-x" if "bin/" in entry.path else "?rw-r--r--")


def test_the_order_of_adding_does_not_show(tmp_path):
    shuffled = list(FILES.items())
    random.Random(7).shuffle(shuffled)
    one, two = write(tmp_path / "1", FILES), write(tmp_path / "2", dict(shuffled))
    assert one.read_bytes() == two.read_bytes()


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


def test_a_layer_of_nothing(tmp_path):
    layer = write(tmp_path, {})
    assert index_of(layer).files == ()
    assert contents(layer) == {}


def test_the_same_file_twice(tmp_path):
    with LayerWriter(tmp_path) as writer:
        writer.add("a", io.BytesIO(b"x"))
        assert writer.add("a", io.BytesIO(b"x"))[0] == 1
        assert "a" in writer
        with pytest.raises(WheelError, match="a occurs twice, with different content"):
            writer.add("a", io.BytesIO(b"y"))


def test_added_says_what_was_found(tmp_path):
    with LayerWriter(tmp_path) as writer:
        added = writer.add("a", io.BytesIO(b"content"))
    assert added == (7, hashlib.sha256(b"content").digest())


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../up", "a/../../b", "a//b", "a/./b", "a\nb", "a\udcff"]
)
def test_unsafe_paths_are_refused(path, tmp_path):
    with LayerWriter(tmp_path) as writer, pytest.raises(WheelError, match="unsafe path"):
        writer.add(path, io.BytesIO(b""))


def test_links_are_kept(tmp_path):
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


@pytest.mark.parametrize("target", ["/etc/passwd", "../../up", "", "../../project/real"])
def test_links_that_lead_out_are_refused(target, tmp_path):
    with LayerWriter(tmp_path) as writer, pytest.raises(WheelError, match="link"):
        writer.link("project/sub/alias", target)


def test_what_no_file_system_could_hold_is_refused_with_all_of_it(tmp_path):
    with LayerWriter(tmp_path) as writer:
        for path in ("a", "a/b/c", "d/e", "d/e/f", "fine/g"):
            writer.add(path, io.BytesIO(b""))
        writer.link("fine/g", "h")
        with pytest.raises(WheelError, match="also a directory or a link") as caught:
            writer.write(tmp_path / "layer", ORIGIN)
    assert caught.value.context == ("a", "d/e", "fine/g")
    assert not (tmp_path / "layer").exists()


def test_the_compression_names_library_level_and_frames():
    name = compression()
    for part in (".".join(map(str, zstandard.ZSTD_VERSION)), str(FRAME_TARGET)):
        assert part in name


def test_an_index_that_does_not_decompress_is_a_layer_error():
    assert decompress_index(zstandard.compress(b"index")) == b"index"
    with pytest.raises(LayerError, match="cannot be decompressed"):
        decompress_index(b"no zstd at all")
