"""Labelled images from files: IDX, as MNIST is published in, and NumPy's ``npz``."""

from __future__ import annotations

import gzip
import math
import random
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Options, TrainerError, format_count
from ..task import Rows

if TYPE_CHECKING:
    from torch import Tensor

CLASSES = 10
DIGIT, THING = (28, 28), (3, 32, 32)
"""The shape of an image of MNIST, and of CIFAR-10."""
_UNSIGNED_BYTES = 0x08
"""The only type of number that MNIST's files have (http://yann.lecun.com/exdb/mnist)."""
_SPLITS = ("train", "t10k")
_KINDS = {"images": 3, "labels": 1}
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_SOUND = "check that it arrived complete, and copy it again"


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Images to learn from, and others that are held out; None where the source has no others."""

    train: Rows
    held_out: Rows | None


@dataclass(frozen=True, kw_only=True)
class RunImages:
    """The images of one run."""

    train: Rows
    held_out: Rows


def find_mnist_folder(options: Options) -> Path:
    """Return the folder that ``--data`` names."""
    if options.data is None or not options.data.is_dir():
        raise TrainerError(
            f"{options.workload} needs --data, a folder with the IDX files of MNIST"
            + ("" if options.data is None else f"; {options.data} is a file"),
            hint="name the folder with train-images-idx3-ubyte.gz and the files that belong to "
            "it; nothing is fetched",
        )
    return options.data


def find_data_file(options: Options, pattern: str) -> Path:
    """Return the file that ``--data`` names, or the one in its folder that fits a pattern."""
    data = options.data
    if data is None:
        setting, paths = "--data is missing", []
    elif data.is_file():
        return data
    else:
        setting, paths = f"--data {data}", sorted(data.glob(pattern))
    if len(paths) == 1:
        return paths[0]
    names = ", ".join(path.name for path in paths) or "no such file"
    raise TrainerError(
        f"{setting}: {options.workload} needs one file {pattern} ({names})",
        hint="name the file; it is read as it is, nothing is fetched",
    )


def read_mnist(folder: Path) -> Splits:
    """Return the training and the test split of MNIST, or the only one that is there."""
    splits = []
    for split in _SPLITS:
        paths = _idx_paths(folder, split)
        if paths:
            images, labels = read_idx(paths["images"], 3), read_idx(paths["labels"], 1)
            splits.append(_join_images_and_labels(images, labels, paths, DIGIT))
    if not splits:
        raise TrainerError(
            f"--data {folder} has no IDX files of MNIST",
            hint="their names are train-images-idx3-ubyte, t10k-labels-idx1-ubyte and so on, "
            "with .gz or without",
        )
    first, *more = splits
    return Splits(train=first, held_out=more[0] if more else None)


def _idx_paths(folder: Path, split: str) -> dict[str, Path]:
    """Return the files of a split by kind; empty if both are missing, TrainerError if one is."""
    paths = {}
    missing = ""
    for kind, axes in _KINDS.items():
        path = _idx_path(folder, split, kind, axes)
        if path is None:
            missing = kind
        else:
            paths[kind] = path
    if missing and paths:
        raise TrainerError(
            f"{next(iter(paths.values()))} is there, and the {missing} that belong to it are not",
            hint=f"copy {split}-{missing}-idx{_KINDS[missing]}-ubyte.gz to the same folder",
        )
    return paths


def read_idx(path: Path, axes: int) -> Tensor:
    """Return the array in an IDX file: bytes, with ``axes`` axes."""
    import torch

    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise TrainerError(f"{path} cannot be read: {error}", hint=_SOUND) from error
    head = 4 + 4 * axes
    if len(data) < head or data[:4] != bytes((0, 0, _UNSIGNED_BYTES, axes)):
        raise TrainerError(
            f"{path}: byte 0: not an IDX file of bytes with {axes} axes (it begins with "
            f"{data[:4].hex(' ') or 'nothing'})",
            hint=_SOUND,
        )
    shape = struct.unpack(f">{axes}I", data[4:head])
    expected = head + math.prod(shape)
    if len(data) != expected:
        raise TrainerError(
            f"{path}: byte {min(len(data), expected)}: its header says "
            f"{' x '.join(map(str, shape))}, which is {expected} bytes in all, and there are "
            f"{len(data)}",
            hint=_SOUND,
        )
    if not math.prod(shape):
        return torch.zeros(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data[head:]), dtype=torch.uint8).view(shape)


def read_npz(path: Path) -> Splits:
    """Return the images in the arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test``."""
    import numpy as np
    import torch

    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in _ARRAYS if name not in file.files]
            if missing:
                raise TrainerError(
                    f"{path} has no {', '.join(missing)} (it has {', '.join(file.files)})",
                    hint=f"it needs the arrays {', '.join(_ARRAYS)}",
                )
            arrays = {name: torch.from_numpy(np.ascontiguousarray(file[name])) for name in _ARRAYS}
    except TrainerError:
        raise
    except Exception as error:  # numpy's, zip's and zlib's own, some of them undocumented
        raise TrainerError(f"{path} cannot be read as npz: {error}", hint=_SOUND) from error
    splits = []
    for split in ("train", "test"):
        names = {"images": path / f"x_{split}", "labels": path / f"y_{split}"}
        splits.append(
            _join_images_and_labels(arrays[f"x_{split}"], arrays[f"y_{split}"], names, THING)
        )
    return Splits(train=splits[0], held_out=splits[1])


def choose_images(splits: Splits, options: Options) -> RunImages:
    """Return the images that the command line asks for."""
    train, held_out = splits.train, splits.held_out
    if held_out is None:
        train, held_out = _split(train, options)
    elif options.held_out is not None:
        held_out = _select_rows(held_out, range(min(options.held_out, len(held_out))))
    if options.subset is not None and options.subset < len(train):
        chosen = random.Random(options.seed).sample(range(len(train)), options.subset)  # noqa: S311
        train = _select_rows(train, sorted(chosen))
    if not len(train) or not len(held_out):
        raise TrainerError(
            f"{options.data}: {format_count(len(train), 'image')} to train on and "
            f"{len(held_out)} held out: there is nothing to learn",
            hint="give at least one of each",
        )
    return RunImages(train=train, held_out=held_out)


def _split(rows: Rows, options: Options) -> tuple[Rows, Rows]:
    count = options.held_out or min(1000, len(rows) // 7)
    if count >= len(rows):
        raise TrainerError(
            f"--held-out {count} leaves none of the {format_count(len(rows), 'image')} of "
            f"{options.data} to train on",
            hint="hold out fewer",
        )
    edge = len(rows) - count
    return _select_rows(rows, range(edge)), _select_rows(rows, range(edge, len(rows)))


def normalize_images(rows: Rows, mean: float, spread: float) -> Rows:
    """Return images as numbers around 0, of shape (rows, channels, height, width).

    Args:
        rows: images of bytes, shape (rows, height, width) or (rows, channels, height, width).
        mean: of all pixels, where a byte stands for 0 to 1.
        spread: their standard deviation.
    """
    inputs = rows.inputs if rows.inputs.dim() == 4 else rows.inputs[:, None]
    return Rows(inputs=(inputs.float() / 255 - mean) / spread, labels=rows.labels)


def _idx_path(folder: Path, split: str, kind: str, axes: int) -> Path | None:
    """Return the file of one kind, with or without the prefix that some mirrors use."""
    stem = f"{split}-{kind}-idx{axes}-ubyte"
    for name in (stem, f"{stem}.gz", f"mnist-{stem}", f"mnist-{stem}.gz"):
        path = folder / name
        if path.is_file():
            return path
    return None


def _join_images_and_labels(
    inputs: Tensor, labels: Tensor, names: dict[str, Path], shape: tuple[int, ...]
) -> Rows:
    """Return images with their labels; TrainerError if they or ``shape`` do not match."""
    import torch

    if inputs.dtype != torch.uint8 or labels.is_floating_point() or labels.is_complex():
        raise TrainerError(
            f"{names['images']} has numbers of type {inputs.dtype}, and {names['labels']} of type "
            f"{labels.dtype}",
            hint="images are bytes (uint8, 0 to 255), and labels are whole numbers",
        )
    if tuple(inputs.shape[1:]) != shape:
        raise TrainerError(
            f"{names['images']} has the shape {tuple(inputs.shape)}, and an image has to be "
            f"{' x '.join(map(str, shape))}",
            hint="with the channels last, bring them to the front: x.transpose(0, 3, 1, 2)",
        )
    if len(inputs) != labels.numel():
        raise TrainerError(
            f"{names['images']} has the shape {tuple(inputs.shape)}, and {names['labels']} has "
            f"{labels.numel()} labels",
            hint="both have to be of the same data set, an image for each label",
        )
    labels = labels.reshape(-1).long()
    wrong = ((labels < 0) | (labels >= CLASSES)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise TrainerError(
            f"{names['labels']}: label {place} is {int(labels[place])}, and {len(wrong)} of "
            f"{len(labels)} are not from 0 to {CLASSES - 1}",
            hint=_SOUND,
        )
    return Rows(inputs=inputs, labels=labels)


def _select_rows(rows: Rows, numbers: Iterable[int]) -> Rows:
    import torch

    chosen = torch.tensor(list(numbers), dtype=torch.long)
    return Rows(inputs=rows.inputs[chosen], labels=rows.labels[chosen])
