import array
import io
import random

import pytest
import zstandard

from stager.layers import layer_file
from stager.layers.layer_file import LayerWriter
from tests.support.building import ORIGIN

NOISE = random.Random(3).randbytes(2 << 20)
TEXT = b"the same words again and again, "


@pytest.mark.parametrize("size", [0, 1, (128 << 10) - 1, 128 << 10, (128 << 10) + 1, 2 << 20])
def test_what_is_stored_comes_back(size):
    packed = layer_file.stored(NOISE[:size])
    assert zstandard.ZstdDecompressor().decompress(packed) == NOISE[:size]
    assert len(packed) <= size + 16 + 3 * (size // (128 << 10) + 1)
    assert zstandard.get_frame_parameters(packed).content_size == size


def test_the_content_decides():
    assert not layer_file.pays(NOISE)
    assert layer_file.pays(TEXT * (len(NOISE) // len(TEXT)))
    assert layer_file.pays(NOISE[:1000])  # too little to think about
    half = TEXT * (len(NOISE) // 2 // len(TEXT))
    assert layer_file.pays(NOISE[: len(half)] + half)


def test_only_a_sampled_layer_stores(tmp_path):
    """Weights as float32 shrink by less than a tenth; such a frame is not worth the time."""
    drawn = random.Random(4)
    weights = array.array("f", (drawn.gauss(0, 0.02) for _ in range(300_000))).tobytes()
    layers = {}
    for sampled in (False, True):
        with LayerWriter(tmp_path, sampled=sampled) as writer:
            writer.add("assets/weights", io.BytesIO(weights))
            writer.write(tmp_path / "layer", ORIGIN)
        layers[sampled] = (tmp_path / "layer").read_bytes()
    assert weights[:100_000] in layers[True]
    assert len(layers[False]) < len(weights) < len(layers[True])
    assert zstandard.ZstdDecompressor().stream_reader(
        layers[True], read_across_frames=True
    ).read().count(weights) == 1  # fmt: skip
