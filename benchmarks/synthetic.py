"""Wheels of any size and number of files, made here: what the curve over the size is drawn with.

Their content is half noise and half text, so that it shrinks to about half, as real packages do.
The bytes follow from the arguments alone.
"""

from __future__ import annotations

import base64
import hashlib
import random
import zipfile
from dataclasses import dataclass
from pathlib import Path

_EPOCH = (2020, 1, 1, 0, 0, 0)
_TEXT = b"def area(width, height):\n    return width * height\n\n\nVALUES = [1, 2, 3, 5, 8, 13]\n"
_MODULE_SHARE = 3
"""Every so manyth file is a Python module, the others are data."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a synthetic environment."""

    packages: int
    """How many wheels."""
    files: int
    """Files in each."""
    size: int
    """Bytes of all of them together, unpacked."""

    @property
    def name(self) -> str:
        """As the curve calls it."""
        return f"{self.packages} x {self.files} files, {self.size / 1e9:g} GB"

    @property
    def pins(self) -> list[str]:
        """The requirements."""
        return [f"synthetic{number:03d}==1.0" for number in range(self.packages)]


def make_wheels(shape: Shape, folder: Path) -> None:
    """Write the wheels of a shape into a folder."""
    for number in range(shape.packages):
        _make_wheel(f"synthetic{number:03d}", shape, folder, random.Random(number))  # noqa: S311


def _make_wheel(name: str, shape: Shape, folder: Path, noise: random.Random) -> None:
    each = max(32, shape.size // (shape.packages * shape.files))
    info = f"{name}-1.0.dist-info"
    rows = []
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as made:

        def add(path: str, data: bytes) -> None:
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            made.writestr(entry, data, compresslevel=1)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(data)}\n")

        add(f"{name}/__init__.py", b"")
        for number in range(1, shape.files):
            folder_name = f"{name}/part{number % 20:02d}"
            if number % _MODULE_SHARE == 0 and each < 1 << 16:
                add(f"{folder_name}/module{number}.py", _module(each, noise))
            else:
                add(f"{folder_name}/data{number}.bin", _data(each, noise))
        add(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode())
        tag = b"Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        add(f"{info}/WHEEL", tag)
        record = f"{''.join(rows)}{info}/RECORD,,\n"
        made.writestr(zipfile.ZipInfo(f"{info}/RECORD", _EPOCH), record)


def _module(size: int, noise: random.Random) -> bytes:
    seed = f"NUMBER = {noise.getrandbits(64)}\n".encode()
    return seed + _TEXT * max(0, (size - len(seed)) // len(_TEXT))


def _data(size: int, noise: random.Random) -> bytes:
    half = size // 2
    return noise.randbytes(half) + bytes(size - half)
