"""Parts of files, read from a layer that is compressed in frames."""

from __future__ import annotations

import io
import random

import pytest

from bundle.format.layer import HEAD_PREFIX, LayerError, decode_head, head_summary
from stager.layers import layer_file
from stager.layers.layer_file import LayerWriter, StoredTar, decompress_index
from tests.support.building import ORIGIN

CONTENT = {"a": b"", "b": random.Random(1).randbytes(9000), "c": b"short", "d": bytes(3000)}


@pytest.fixture
def layer(tmp_path, monkeypatch):
    """A layer whose frames hold about a kilobyte each, so that a file lies in many of them."""
    monkeypatch.setattr(layer_file, "FRAME_TARGET", 1000)
    monkeypatch.setattr(layer_file, "COPY", 300)
    path = tmp_path / "layer"
    with LayerWriter(tmp_path) as writer:
        for name, data in CONTENT.items():
            writer.add(name, io.BytesIO(data))
        writer.write(path, ORIGIN)
    return path


def head_of(layer):
    data = layer.read_bytes()
    size = head_summary(data[:HEAD_PREFIX]).head_size
    return size, decode_head(data[:size], decompress_index)


def test_any_part_of_any_file_is_what_was_written(layer):
    size, index = head_of(layer)
    assert len(index.frames) > 9
    chance = random.Random(2)
    with layer.open("rb") as handle:
        tar = StoredTar(handle, size, index)
        for entry in index.files:
            whole = CONTENT[entry.path]
            assert tar.file(entry, 0, len(whole)) == whole
            for _ in range(20):
                at, length = chance.randrange(10000), chance.randrange(4000)
                assert tar.file(entry, at, length) == whole[at : at + length]


def test_only_the_frames_that_are_asked_for_are_read(layer):
    size, index = head_of(layer)
    data = bytearray(layer.read_bytes())
    data[-200:] = bytes(200)  # of the last file
    layer.write_bytes(data)
    with layer.open("rb") as handle:
        tar = StoredTar(handle, size, index)
        assert tar.file(index.files[1], 100, 700) == CONTENT["b"][100:800]
        with pytest.raises(LayerError):
            tar.file(index.files[3], 0, 3000)
