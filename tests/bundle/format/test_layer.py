"""A layer's index: what the build writes is read, and what could do harm is refused."""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bundle.format.layer import (
    DEPTH_LIMIT,
    FRAME_LIMIT,
    HEAD_PREFIX,
    LINK_LIMIT,
    NAME_LIMIT,
    PATH_LIMIT,
    Entry,
    Frame,
    Index,
    LayerError,
    Link,
    check_link,
    check_links,
    check_path,
    decode_head,
    encode_head,
    head_summary,
    read_origin,
)
from bundle.protocol.digest import Digest
from stager.core.store import Store
from stager.pack.bundle import Packed
from tests.support.building import ORIGIN
from tests.support.bundles import forged_head

D = Digest.of(b"")
FILES = (Entry("bin/tool", 10, 0o755, D, 512), Entry("lib/a.py", 600, 0o644, D, 1536))
LINKS = (Link("lib/b.py", "a.py"), Link("lib/inner/up", "../a.py"))
FRAMES = (Frame(100, 2048, D), Frame(50, 2048, D))
INDEX = Index(files=FILES, links=LINKS, frames=FRAMES)


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def unpack(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def raw(**changes: Any) -> dict[str, Any]:
    """The index as JSON has it, with some of its lists replaced."""
    base = {"format": 2, "files": FILES, "links": LINKS, "frames": FRAMES}
    return json.loads(json.dumps({**base, **changes}))


def decode(**changes: Any) -> Index:
    return decode_head(forged_head(raw(**changes), 150), unpack)


def refused(**changes: Any) -> None:
    """The index is refused, and not merely because the head's sums differ."""
    with pytest.raises(LayerError) as caught:
        decode(**changes)
    assert "summary" not in str(caught.value)


def test_what_is_written_is_read_again() -> None:
    head = encode_head(INDEX, ORIGIN, compress)
    assert decode_head(head, unpack) == INDEX
    assert decode() == INDEX  # so that what follows is refused for what it changes
    assert decode(files=[], links=[], frames=[]) == Index((), (), ())
    summary = head_summary(head[:HEAD_PREFIX])
    assert summary == (len(head), len(head) + 150, 610, 2, len(ORIGIN.to_bytes()))
    assert read_origin(head) == ORIGIN


def test_a_layer_is_a_tar_for_everybody(standard: Packed, store: Store, tmp_path: Path) -> None:
    """``zstd -d | tar -t`` skips the head; the index says where each file lies in that tar."""
    for layer in standard.manifest.layers:
        packed = store.layer(layer.id).read_bytes()
        body = packed[layer.head_size :]
        plain = zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True).read()
        index = decode_head(packed[: layer.head_size], unpack)
        with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
            members = {member.name: member for member in archive}
            assert {m.name for m in members.values() if m.isfile()} == {e.path for e in index.files}
            assert {m.name: m.linkname for m in members.values() if m.issym()} == dict(index.links)
            for entry in index.files:
                member = members[entry.path]
                found = (member.size, member.mode, member.offset_data)
                assert found == (entry.size, entry.mode, entry.offset)
                content = plain[entry.offset : entry.offset + entry.size]
                assert Digest.of(content) == entry.sha256
        listed = subprocess.run(["tar", "-tf", "-"], input=plain, capture_output=True, check=True)
        assert listed.stdout.decode().split("\n")[:-1] == list(members)
    assert any(layer.kind == "project" for layer in standard.manifest.layers)


def test_damage_to_the_head_is_refused() -> None:
    head = encode_head(INDEX, ORIGIN, compress)
    with pytest.raises(LayerError, match="does not begin with an index"):
        head_summary(b"\x28" + head[1:])
    for length in (0, HEAD_PREFIX - 1):
        with pytest.raises(LayerError, match="cut short"):
            head_summary(head[:length])
    for wrong in (head[:-1], head + b"\0", head[:HEAD_PREFIX]):
        with pytest.raises(LayerError, match="cut short"):
            decode_head(wrong, unpack)
    for place in (16, 24):  # the summary's sum of sizes, and number of files
        wrong = bytearray(head)
        wrong[place] ^= 1
        with pytest.raises(LayerError, match="does not agree with its summary"):
            decode_head(bytes(wrong), unpack)


PATHS = [
    "", "/etc/passwd", "../up", "lib/../../up", "lib/..", "..", ".", "./a", "a//b", "a/", "a/./b",
    "a\0b", "a\nb", "a\x1b[2Jb", "a\u202eb", "\ud800", 7, None, ["a"], {}, True,
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_unsafe_paths_are_refused(path: Any) -> None:
    with pytest.raises(LayerError, match="unsafe path"):
        check_path(path)
    refused(files=[[path, 10, 0o644, D, 512]])
    refused(links=[[path, "a"]])


@pytest.mark.parametrize(
    "path",
    [
        "lib/" + "x" * (NAME_LIMIT + 1),
        "lib/" + "é" * (NAME_LIMIT // 2 + 1),
        "lib/" + "/".join(["d"] * DEPTH_LIMIT),
        "/".join(["y" * 200] * (PATH_LIMIT // 200 + 1)),
    ],
    ids=["name", "letters", "levels", "path"],
)
def test_paths_that_no_node_can_hold_are_refused(path: str) -> None:
    with pytest.raises(LayerError, match="no node can hold"):
        check_path(path)
    refused(files=[[path, 10, 0o644, D, 512]])


LONGEST = ("lib/" + "x" * NAME_LIMIT, "/".join(["d"] * DEPTH_LIMIT))


@pytest.mark.parametrize(
    "path", ["a", "lib/a b/..c/...", "lib/données.txt", "-rf", "a\\b", "~", *LONGEST]
)
def test_unusual_paths_are_not(path: str) -> None:
    assert check_path(path) == path
    assert decode(files=[[path, 10, 0o644, D, 512]]).files[0].path == path


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("lib/l", "/etc/passwd"), ("lib/l", ""), ("lib/l", ".."), ("lib/l", "../project"),
        ("lib/l", "../../up"), ("lib/inner/l", "../../bin/tool"), ("lib/inner/l", "x/../../.."),
        ("l", ".."), ("l", "."), ("lib/l", "a\0b"), ("lib/l", "a\nb"), ("lib/l", 7),
        ("lib/l", None), ("lib/l", ["a"]), ("lib/l", "b/" * PATH_LIMIT),
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_links_that_lead_outside_are_refused(path: str, target: Any) -> None:
    with pytest.raises(LayerError, match="link"):
        check_link(Link(path, target))
    refused(links=[[path, target]])
    for inside in (("lib/x/y/l", "../../a.py"), ("lib/x/l", "y/../../a.py"), ("l", "lib/a")):
        assert decode(links=[inside]).links == (Link(*inside),)


CHAINED = {"lib/x/l1": "..", "lib/x/y/l2": "../l1/..", "lib/x/y/z/l3": "../l2/../other"}
"""Each stays inside by its words; followed one after the other they climb above the environment."""


def test_links_that_lead_outside_together_are_refused(tmp_path: Path) -> None:
    for path, target in CHAINED.items():
        check_link(Link(path, target))
    env = tmp_path / "envs" / "env"
    (env / "lib/x/y/z").mkdir(parents=True)
    for path, target in CHAINED.items():
        (env / path).symlink_to(target)
    # That they do is the kernel's word.
    assert (env / "lib/x/y/z/l3").resolve() == tmp_path / "envs" / "other"
    with pytest.raises(LayerError, match="leads outside"):
        check_links(CHAINED)
    with pytest.raises(LayerError, match="leads outside"):
        decode(links=sorted(CHAINED.items()))
    check_links({path: target for path, target in CHAINED.items() if path == "lib/x/l1"})


def test_links_in_circles_are_refused_and_long_chains_are_not() -> None:
    with pytest.raises(LayerError, match="circles"):
        check_links({"a/x": "y", "a/y": "x"})
    with pytest.raises(LayerError, match="circles"):
        check_links({"a/x": "x/x"})
    chain = {f"a/{number}": str(number + 1) for number in range(LINK_LIMIT)}
    check_links(chain)
    with pytest.raises(LayerError, match="circles"):
        check_links({**chain, f"a/{LINK_LIMIT}": "end", "a/first": "0"})


FILE = ["lib/f", 10, 0o644, D, 512]


def changed(place: int, value: Any) -> list[Any]:
    entry = list(FILE)
    entry[place] = value
    return entry


@pytest.mark.parametrize(
    "files",
    [
        *[[changed(2, mode)] for mode in (0o4755, 0o666, 0o777, 0, -1, "420", None, 420.0, [420])],
        *[[changed(1, size)] for size in (-1, 100 << 30, "10", 1.0, True, None, 3073 - 512)],
        *[[changed(4, offset)] for offset in (-512, 0, 511, 3063, 1 << 60, "512", 512.0, None)],
        *[[changed(3, digest)] for digest in (None, 7, [])],
        [[*FILE, 1]],
        [FILE[:4]],
        [7],
        ["abcde"],
        {"a": FILE},
        [FILE, changed(4, 1536)],  # twice
        [FILE, ["lib/g", 10, 0o644, D, 600]],  # over the first one
        [FILE, ["lib/g", 10, 0o644, D, 1033]],  # no room for its header
        [["lib/g", 10, 0o644, D, 1536], FILE],  # not in order
        [["lib", 10, 0o644, D, 512], ["lib/f", 1, 0o644, D, 1536]],  # a file as a directory
        [["lib/f/g", 10, 0o644, D, 512], ["lib/f", 1, 0o644, D, 1536]],
    ],
    ids=lambda files: ascii(files).replace(D, "D"),
)
def test_impossible_files_are_refused(files: Any) -> None:
    assert decode(files=[FILE], links=[])
    refused(files=files, links=[])


@pytest.mark.parametrize(
    "links",
    [
        [["lib/f", "g"]],  # a file and a link
        [["lib", "bin"]],  # a file under a link
        [["lib/f/l", "g"]],  # a link under a file
        [["lib/l", "g"], ["lib/l", "h"]],
        [["lib/l", "g"], ["lib/l/m", "h"]],  # a link under a link
        [["lib/l"]],
        [7],
        7,
        {},
        "",
    ],
    ids=ascii,
)
def test_impossible_links_are_refused(links: Any) -> None:
    refused(files=[FILE], links=links)


@pytest.mark.parametrize(
    "frames",
    [
        [[100, FRAME_LIMIT + 1, D]], [[FRAME_LIMIT + 1, 4096, D]], [[100, 0, D]], [[0, 4096, D]],
        [[-1, 4096, D]], [[100, 100 << 30, D]], [["100", 4096, D]], [[100, 4096.0, D]],
        [[True, 4096, D]], [[100, 4096, "00"]], [[100, 4096, None]], [[100, 4096]], [], None, {},
        "",
    ],
    ids=lambda frames: ascii(frames).replace(D, "D"),
)  # fmt: skip
def test_impossible_frames_are_refused(frames: Any) -> None:
    refused(frames=frames)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"7", b"{}", b'{"format":2}', b"\xff", b"[" * 200_000, b'{"format":1}']
)
def test_an_index_that_is_none_is_refused(body: bytes) -> None:
    head = forged_head(raw(), 150)
    with pytest.raises(LayerError):
        decode_head(head, lambda data: body)
