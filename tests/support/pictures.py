"""Small data sets of pictures, in the files that the trainer reads; each class is easy to tell."""

from __future__ import annotations

import gzip
import random
import struct
from pathlib import Path
from typing import Any


def nothing(folder: Path) -> None:
    """No data."""


def digits(folder: Path) -> None:
    """Images whose brightness tells their class."""
    draw, count = random.Random(1), 240
    labels = bytes(number % 10 for number in range(count))
    pixels = b"".join(
        bytes(min(255, label * 25 + draw.randrange(8)) for _ in range(28 * 28)) for label in labels
    )
    for kind, shape, data in (("images", (count, 28, 28), pixels), ("labels", (count,), labels)):
        _write(folder / f"t10k-{kind}-idx{len(shape)}-ubyte.gz", shape, data)


def things(folder: Path) -> None:
    """Images of one grey each."""
    import numpy as np

    arrays = {}
    for side, count in (("train", 120), ("test", 40)):
        labels = np.arange(count) % 10
        shape = (count, 3, 32, 32)
        arrays[f"x_{side}"] = np.broadcast_to((labels * 25)[:, None, None, None], shape)
        arrays[f"y_{side}"] = labels
    np.savez_compressed(folder / "cifar10_tiny.npz", **{
        name: array.astype(np.uint8) for name, array in arrays.items()
    })  # fmt: skip


def idx(path: Path, array: Any) -> Path:
    import numpy as np

    array = np.asarray(array, dtype=np.uint8)
    return _write(path, array.shape, array.tobytes())


def _write(path: Path, shape: tuple[int, ...], data: bytes) -> Path:
    data = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + data
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def mnist(folder: Path, split: str, count: int, ending: str = ".gz", prefix: str = "") -> Any:
    """Write so many images of one split, and their labels, as MNIST's files; return the images."""
    import numpy as np

    pictures = np.arange(count * 28 * 28).reshape(count, 28, 28) % 251
    idx(folder / f"{prefix}{split}-images-idx3-ubyte{ending}", pictures)
    idx(folder / f"{prefix}{split}-labels-idx1-ubyte{ending}", np.arange(count) % 10)
    return pictures
