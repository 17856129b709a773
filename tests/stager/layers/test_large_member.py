"""Large members of wheels: the same bytes as through ``zipfile``, and all damage noticed."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import zipfile
import zlib

import pytest
import zstandard

from bundle.format.layer import decode_head, head_summary
from stager.core.errors import WheelError
from stager.core.values import Target
from stager.layers import layer_file
from stager.layers.layer_file import LayerWriter, Unread
from stager.layers.wheel import add_wheel
from stager.layers.wheel_members import LARGE, ChangedMemberError, LargeMember
from tests.support.building import ORIGIN

NOISE = random.Random(5).randbytes(LARGE + 12345)
ZEROS = bytes(3 * LARGE + 1)
MIXED = NOISE + ZEROS + NOISE[:100]


def member(path, content, method, promised=None):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("before", b"x" * 10)
        archive.writestr("a/large", content)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("a/large")
    return LargeMember(
        wheel=path,
        offset=info.header_offset,
        packed_size=info.compress_size,
        method=info.compress_type,
        size=info.file_size,
        sha256=hashlib.sha256(content if promised is None else promised).digest(),
    )


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("content", [b"", b"x", NOISE, ZEROS, MIXED, NOISE[:LARGE] + ZEROS[:LARGE]])
def test_content_comes_in_pieces_of_one_length(tmp_path, content, method):
    """Frames end at pieces, so their lengths may depend on nothing else."""
    chunks = list(member(tmp_path / "a.zip", content, method).chunks(LARGE))
    assert b"".join(chunks) == content
    assert all(len(chunk) == LARGE for chunk in chunks[:-1])
    assert len(chunks) == -(-len(content) // LARGE)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_another_content_is_noticed(tmp_path, method):
    other = member(tmp_path / "a.zip", MIXED, method, promised=MIXED[::-1])
    with pytest.raises(ChangedMemberError):
        list(other.chunks(LARGE))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_size_that_is_not_the_contents_is_noticed(tmp_path, method):
    whole = member(tmp_path / "a.zip", MIXED, method)
    for size in (0, LARGE, len(MIXED) - 1, len(MIXED) + 1):
        wrong = LargeMember(**{**vars(whole), "size": size})
        with pytest.raises(ChangedMemberError):
            list(wrong.chunks(LARGE))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_ends_early_is_noticed(tmp_path, method):
    whole = member(tmp_path / "a.zip", MIXED, method)
    data = whole.wheel.read_bytes()
    whole.wheel.write_bytes(data[: whole.offset + whole.packed_size // 2])
    with pytest.raises(EOFError):
        list(whole.chunks(LARGE))
    short = LargeMember(**{**vars(whole), "packed_size": whole.packed_size // 3})
    with pytest.raises((EOFError, ChangedMemberError)):
        list(short.chunks(LARGE))


def test_bytes_that_are_no_deflated_ones_are_noticed(tmp_path):
    whole = member(tmp_path / "a.zip", MIXED, zipfile.ZIP_DEFLATED)
    stored = member(tmp_path / "b.zip", b"\xff" * LARGE, zipfile.ZIP_STORED)
    wrong = LargeMember(**{**vars(whole), "wheel": stored.wheel, "offset": stored.offset})
    with pytest.raises(zlib.error):
        list(wrong.chunks(LARGE))


def test_what_keeps_half_of_its_size_is_dense(tmp_path):
    assert member(tmp_path / "a.zip", NOISE, zipfile.ZIP_DEFLATED).dense
    assert not member(tmp_path / "b.zip", MIXED, zipfile.ZIP_DEFLATED).dense
    assert not member(tmp_path / "c.zip", NOISE, zipfile.ZIP_STORED).dense  # nobody knows


# --- in a layer ----------------------------------------------------------------------------------


def line(name, content, size=None):
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(content) if size is None else size}\n"


def wheel(tmp_path, lines, content):
    path = tmp_path / "lib-1.0-py3-none-any.whl"
    info = "lib-1.0.dist-info"
    tags = b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    metadata = b"Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lib/large.so", content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", tags)
        record = lines + line(f"{info}/METADATA", metadata) + line(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


def build(tmp_path, source):
    with LayerWriter(tmp_path) as writer:
        add_wheel(writer, source, Target.of_host())
        writer.write(tmp_path / "layer", ORIGIN)
    return (tmp_path / "layer").read_bytes()


def test_a_layer_is_the_same_as_from_a_spool(tmp_path, monkeypatch):
    source = wheel(tmp_path, line("lib/large.so", MIXED), MIXED)
    unread = build(tmp_path, source)
    monkeypatch.setattr("stager.layers.wheel.LARGE", 1 << 40)
    assert build(tmp_path, source) == unread


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (line("lib/large.so", NOISE), "does not have the size and hash"),
        (line("lib/large.so", NOISE, len(MIXED)), "does not have the size and hash"),
        (line("lib/large.so", MIXED, 5), "does not have the size and hash"),
        (f"lib/large.so,sha256=no digest,{len(MIXED)}\n", "does not have the size and hash"),
    ],
)
def test_a_large_member_is_compared_with_record(tmp_path, lines, why):
    with pytest.raises(WheelError, match=why) as raised:
        build(tmp_path, wheel(tmp_path, lines, MIXED))
    assert raised.value.message.startswith("lib-1.0-py3-none-any.whl: lib/large.so")


def test_a_wheel_that_is_cut_while_its_layer_is_written(tmp_path):
    source = wheel(tmp_path, line("lib/large.so", MIXED), MIXED)
    with LayerWriter(tmp_path) as writer:
        add_wheel(writer, source, Target.of_host())
        source.write_bytes(source.read_bytes()[:LARGE])
        with pytest.raises(WheelError, match="damaged or cut short"):
            writer.write(tmp_path / "layer", ORIGIN)


def test_a_file_that_is_read_later_clashes_like_others(tmp_path):
    digest = hashlib.sha256(b"one").digest()
    later = Unread(size=3, sha256=digest, chunks=lambda _length: iter([b"one"]))
    with LayerWriter(tmp_path) as writer:
        writer.add("a/file", io.BytesIO(b"one"))
        writer.add_unread("a/file", later)  # the same content
        with pytest.raises(WheelError, match="twice"):
            writer.add("a/file", io.BytesIO(b"two"))
        with pytest.raises(WheelError, match="unsafe"):
            writer.add_unread("../file", later)


@pytest.mark.parametrize(
    ("pieces", "dense", "level"),
    [
        (0, False, layer_file.LEVEL),
        (1, False, layer_file.LEVEL),
        (1, True, layer_file.DENSE_LEVEL),
        (layer_file.HUGE // LARGE, False, layer_file.HUGE_LEVEL),
        (layer_file.HUGE // LARGE, True, layer_file.DENSE_LEVEL),
    ],
)
def test_most_of_a_frame_decides_its_level(tmp_path, pieces, dense, level):
    piece = bytes(random.Random(6).choices(b"abcdefgh", k=LARGE))
    later = Unread(
        size=LARGE * pieces,
        sha256=hashlib.sha256(piece * pieces).digest(),
        chunks=lambda _length: iter([piece] * pieces),
        dense=dense,
    )
    with LayerWriter(tmp_path) as writer:
        writer.add("a/small", io.BytesIO(piece[: LARGE - 1] if not pieces else b"x"))
        writer.add_unread("b/large", later)
        writer.write(tmp_path / "layer", ORIGIN)
    layer = (tmp_path / "layer").read_bytes()
    head = head_summary(layer).head_size
    first = decode_head(layer[:head], layer_file.decompress_index).frames[0].size
    frame = layer[head : head + first]
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=layer_file.WINDOW_LOG, write_checksum=False
    )
    content = zstandard.ZstdDecompressor().decompress(frame)
    assert frame == zstandard.ZstdCompressor(compression_params=parameters).compress(content)


def test_the_settings_name_every_level():
    settings = layer_file.compression()
    assert f"-level{layer_file.LEVEL}-" in settings
    assert f"huge{layer_file.HUGE}level{layer_file.HUGE_LEVEL}-" in settings
    assert f"dense0.5level{layer_file.DENSE_LEVEL}-" in settings
