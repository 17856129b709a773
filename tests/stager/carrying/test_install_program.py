"""The program in a carried file: which wheels it takes out, and what it refuses."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from stager.carrying.install_program import InstallRefused, unpack

WHEEL = b"a wheel"


def carried(path: Path, files: Mapping[str, bytes], named: Mapping[str, bytes]) -> Path:
    """A tar with these files whose label names others."""
    parts = [
        {"name": name, "sha256": hashlib.sha256(data).hexdigest()} for name, data in named.items()
    ]
    content = {"carried.json": json.dumps({"parts": parts}).encode(), **files}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


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
