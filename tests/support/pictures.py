"""Small data sets of pictures, in the files that the trainer reads; each class is easy to tell."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any


def nothing(folder: Path) -> None:
    """No data."""


def digits(folder: Path) -> None:
    """Images whose brightness tells their class."""
    import numpy as np

    labels = np.arange(240) % 10
    pixels = np.broadcast_to((labels * 25)[:, None, None], (240, 28, 28))
    idx(folder / "t10k-images-idx3-ubyte.gz", pixels)
    idx(folder / "t10k-labels-idx1-ubyte.gz", labels)


def things(folder: Path) -> None:
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
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    data = head + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def mnist(folder: Path, split: str, count: int, ending: str = ".gz", prefix: str = "") -> Any:
    import numpy as np

    pictures = np.arange(count * 28 * 28).reshape(count, 28, 28) % 251
    idx(folder / f"{prefix}{split}-images-idx3-ubyte{ending}", pictures)
    idx(folder / f"{prefix}{split}-labels-idx1-ubyte{ending}", np.arange(count) % 10)
    return pictures
