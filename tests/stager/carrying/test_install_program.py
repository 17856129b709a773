"""The program in a carried file: which wheels it takes out, and what it refuses."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from stager.carrying.install_program import LIMIT, InstallRefused, unpack

WHEEL = b"a wheel"


def carried(
    path: Path, files: Mapping[str, bytes], named: Mapping[str, bytes], larger: int = 0
) -> Path:
    """A tar with these files whose label names others; at its end a bundle's large member."""
    parts = [
        {"name": name, "sha256": hashlib.sha256(data).hexdigest()} for name, data in named.items()
    ]
    content = {"carried.json": json.dumps({"parts": parts}).encode(), **files}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    if larger:
        member = tarfile.TarInfo("layers/torch.tar.zst")
        member.size = larger
        with path.open("r+b") as handle, tarfile.open(path) as archive:
            archive.getmembers()
            handle.seek(archive.offset)
            handle.write(member.tobuf(tarfile.USTAR_FORMAT))
            handle.truncate(handle.tell() + larger + 1536)  # sparse
    return path


def test_the_wheels_are_taken_out_however_large_the_bundle_is(tmp_path: Path) -> None:
    """A layer of a CUDA build or a model may well be larger than any wheel of the tool."""
    files = {"tool/a.whl": WHEEL}
    file = carried(tmp_path / "f.carry.tar", files, files, larger=LIMIT + 1)
    assert unpack(file, tmp_path) == ["a.whl"]
    assert (tmp_path / "a.whl").read_bytes() == WHEEL


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, {}),
        ({}, {"tool/a.whl": WHEEL}),
        ({"tool/a.whl": b"other"}, {"tool/a.whl": WHEEL}),
        ({"tool/../../a.whl": WHEEL}, {"tool/../../a.whl": WHEEL}),
    ],
)
def test_what_is_not_as_named_is_refused(
    files: dict[str, bytes], named: dict[str, bytes], tmp_path: Path
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(InstallRefused, match="is damaged"):
        unpack(carried(tmp_path / "f.carry.tar", files, named), inside)
    assert list(inside.iterdir()) == []
