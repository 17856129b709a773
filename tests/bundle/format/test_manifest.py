"""The manifest: one byte string for each value, and no other is taken for it."""

import json
import subprocess
import tarfile
from dataclasses import asdict, replace

import pytest

from bundle.format.manifest import (
    BLOCK,
    HEAD_LIMIT,
    PART_LIMIT,
    Layer,
    Manifest,
    ManifestError,
    Part,
    count_padding,
    member_header,
    parse,
)
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.job import Requires
from stager.pack.bundle import Packed


def digest(text: str) -> Digest:
    return Digest.of(text.encode())


def layer(name: str = "alpha", size: int = 900) -> Layer:
    ids = digest(f"id of {name}"), digest(f"head of {name}")
    return Layer(ids[0], "wheel", name, "1.0", ids[1], 100, size, unpacked_size=2000, files=7)


MANIFEST = Manifest(
    name="demo",
    requires=Requires(python="3.11", machine="x86_64", libc="glibc", libc_version="2.17"),
    node=Part(name="node.pyz", sha256=digest("node"), size=1234),
    decompressor=Part(name="zstandard-1-x.whl", sha256=digest("zstd"), size=56),
    layers=(layer(), layer("beta", 512)),
    packages=("alpha",),
    imports=("alpha", "données"),
)


def test_a_digest_is_64_hexadecimal_digits() -> None:
    assert Digest.of(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    for wrong in ("", "e3b0", "E" * 64, "g" * 64, "0" * 64 + "\n", "0" * 65, None, 7):
        with pytest.raises(ValueError, match="not a sha256"):
            Digest(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("manifest", [MANIFEST, replace(MANIFEST, decompressor=None, layers=())])
def test_what_is_written_is_read_again(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    assert parse(data) == manifest
    assert parse(data).to_bytes() == data
    raw = json.loads(data)
    assert raw.pop("id") == manifest.id == Digest.of(canonical_json(raw))


def test_the_members_are_those_that_tar_lists(standard: Packed) -> None:
    listed = subprocess.run(
        ["tar", "-tvf", standard.path], capture_output=True, text=True, check=True
    )
    assert listed.stderr == ""
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert {(row[0], row[1]) for row in rows} == {("-rw-r--r--", "0/0")}
    assert [(row[-1], int(row[2])) for row in rows] == standard.manifest.members()
    assert (MANIFEST.unpacked_size, MANIFEST.files) == (4000, 14)


def leaves(value: object, path: tuple[object, ...] = ()) -> list[tuple[tuple[object, ...], object]]:
    """Every value in a JSON document that is no container, with the way to it."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, inner in items for found in leaves(inner, (*path, key))]
    return [(path, value)]


def test_a_change_of_any_field_is_noticed() -> None:
    data = MANIFEST.to_bytes()
    fields = leaves(json.loads(data))
    assert len(fields) == 36
    for path, value in fields:
        raw = json.loads(data)
        holder = raw
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value + 1 if isinstance(value, int) else f"{value}0"
        with pytest.raises(ManifestError):
            parse(canonical_json(raw))
        del holder[path[-1]]
        with pytest.raises(ManifestError):
            parse(canonical_json(raw))


@pytest.mark.parametrize("spelling", [b" ", b"\n", b"\0"])
def test_another_spelling_of_the_same_value_is_refused(spelling: bytes) -> None:
    with pytest.raises(ManifestError):
        parse(MANIFEST.to_bytes() + spelling)
    with pytest.raises(ManifestError, match="changed"):
        parse(json.dumps(json.loads(MANIFEST.to_bytes())).encode())
    with pytest.raises(ManifestError):
        parse(MANIFEST.to_bytes().decode().encode("utf-16"))


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"7", b"null", b'"id"', b"\xff\xfe", b'{"id":1}', b"[" * 200_000, b"NaN"],
)
def test_what_is_no_manifest_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError, match="not a stager manifest"):
        parse(data)


def forged(**changes: object) -> bytes:
    """A manifest with other fields and the id that fits them; ``layer_x`` changes the first layer's
    ``x``, and likewise ``node_x`` and ``requires_x``."""
    raw = asdict(MANIFEST)
    for name, value in changes.items():
        whole, _, field = name.partition("_")
        inner = {"layer": raw["layers"][0], "node": raw["node"], "requires": raw["requires"]}
        if whole in inner and field:
            inner[whole][field] = value
        else:
            raw[name] = value
    return canonical_json({**raw, "id": Digest.of(canonical_json(raw))})


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1}, {"format": "1"}, {"name": 7}, {"name": "a\nb"}, {"name": "\ud800"},
        {"unknown": 1}, {"packages": "alpha"}, {"packages": [["alpha"]]}, {"imports": None},
        {"imports": [1]}, {"layers": {}}, {"layers": [[]]},
        {"layers": [asdict(layer()), asdict(layer())]}, {"decompressor": []},
        {"decompressor": {"name": "a/b.whl", "sha256": "0" * 64, "size": 1}},
        {"decompressor": {"name": "node.pyz", "sha256": "0" * 64, "size": 1}},
        {"decompressor": {"name": "x" * 101, "sha256": "0" * 64, "size": PART_LIMIT + 1}},
        {"node_name": "../node.pyz"}, {"node_name": "manifest.json"}, {"node_name": ""},
        {"node_size": -512}, {"node_size": "12"}, {"node_size": True}, {"node_size": 1.0},
        {"node_size": 10**30}, {"node_sha256": "00"}, {"requires_python": "3.11/../../../.."},
        {"requires_python": "3"}, {"requires_python": 3.11}, {"requires_machine": None},
        {"requires_libc_version": "9" * 5000}, {"requires_libc_version": "2." + "1" * 5000},
        {"requires_libc_version": "2.x"}, {"requires_libc_version": "two"},
        {"requires_bundled_python": True}, {"requires_bundled_python": 1, "layer_kind": "python"},
        {"layer_kind": "python"}, {"layer_kind": "other"}, {"layer_kind": []},
        {"layer_id": "../" + "0" * 61}, {"layer_name": None}, {"layer_version": 1},
        {"layer_size": -1}, {"layer_size": 2**61}, {"layer_head_size": 901},
        {"layer_head_size": HEAD_LIMIT + 1, "layer_size": HEAD_LIMIT * 2}, {"layer_files": "7"},
        {"layer_unpacked_size": -1}, {"layer_extra": 1},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_no_build_writes_are_refused(changes: dict[str, object]) -> None:
    assert parse(forged(name="other", layer_size=901)).name == "other"
    bundled = parse(forged(requires_bundled_python=True, layer_kind="python"))
    assert bundled.requires.bundled_python
    with pytest.raises(ManifestError):
        parse(forged(**changes))


@pytest.mark.parametrize("size", [0, 1, 511, 512, 8**11 - 1, 8 << 30, 1 << 50])
def test_headers_are_read_by_tarfile_as_they_are_meant(size: int) -> None:
    header = member_header("layers/one.tar.zst", size)
    assert len(header) == BLOCK
    info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")  # checks the checksum, too
    assert (info.name, info.size, info.mode) == ("layers/one.tar.zst", size, 0o644)
    assert (info.uid, info.gid, info.mtime, info.uname, info.gname) == (0, 0, 0, "", "")
    assert info.type == tarfile.REGTYPE
    assert (size + count_padding(size)) % BLOCK == 0
    assert 0 <= count_padding(size) < BLOCK
    assert len(member_header("n" * 100, size)) == BLOCK
    for long in ("n" * 101, "é" * 51):
        with pytest.raises(ManifestError, match="longer than 100 bytes"):
            member_header(long, size)
