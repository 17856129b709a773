"""What an index says of a wheel: nothing in a hostile one costs more than reading it."""

from __future__ import annotations

import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from bundle.protocol.digest import Digest
from stager.carrying.mirror_folder import listed_wheel
from stager.inventory.package_metadata import PackageMetadata, metadata_of_wheel

Held = TypeVar("Held")
NAME = "a-1.0-py3-none-any.whl"
LONG = 96 << 20


def wheel(folder: Path, compression: int, length: int = 0, claimed: int | None = None) -> Path:
    """A wheel whose METADATA has a long description, and claims to have another length."""
    path = folder / NAME
    head = b"Metadata-Version: 2.1\nName: a\nVersion: 1.0\n\n"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("a-1.0.dist-info/METADATA")
        info.compress_type = compression
        with archive.open(info, "w") as member:
            member.write(head)
            for _ in range(length >> 20):
                member.write(bytes(1 << 20))
        if claimed is not None:
            info.file_size = claimed
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=f"^{NAME}: it cannot be read as a wheel: ") as caught:
        listed_wheel(path, Digest.of(b""))
    return str(caught.value)


def allocated_by(work: Callable[[Held], object], held: Held) -> int:
    """The most bytes that were allocated at a time."""
    tracemalloc.start()
    try:
        work(held)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claimed", [None, 100])
@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_long_description_is_never_unpacked(
    tmp_path: Path, compression: int, claimed: int | None
) -> None:
    """A few kilobytes of file, and 96 MiB of text: none of it is held in memory."""
    path = wheel(tmp_path, compression, LONG, claimed)
    assert allocated_by(refusal, path) < LONG // 2
    data = path.read_bytes()
    assert allocated_by(metadata_of_wheel, data) < LONG // 2


def test_a_damaged_member_is_a_message_whatever_its_compression(tmp_path: Path) -> None:
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = wheel(tmp_path, compression)
        data = bytearray(path.read_bytes())
        start = 30 + len("a-1.0.dist-info/METADATA")
        data[start + 4 : start + 9] = b"\xff" * 5
        path.write_bytes(data)
        assert refusal(path)
        assert metadata_of_wheel(bytes(data)) == PackageMetadata()
