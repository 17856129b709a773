"""Labelled images from files: IDX, as MNIST is published in, and NumPy's ``npz``."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..config import Options, TrainerError, explain_errors, format_count
from .rows import Rows, choose_rows

CLASSES = 10
DIGIT, THING = (28, 28), (3, 32, 32)  # the shape of an image of MNIST, and of CIFAR-10
_UNSIGNED_BYTES = 0x08
"""The only type of number that MNIST's files have (http://yann.lecun.com/exdb/mnist)."""
_SPLITS = ("train", "t10k")
_KINDS = {"images": 3, "labels": 1}
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_SOUND = "check that it arrived complete, and copy it again"


Splits = Sequence[Rows]
"""Images to learn from, then others that are held out, unless the source has no others."""


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
        paths = {kind: _find_idx_file(folder, split, kind) for kind in _KINDS}
        names = {kind: path for kind, path in paths.items() if path is not None}
        if len(names) == len(_KINDS):
            images, labels = names.values()
            inputs, numbers = (read_idx(path, _KINDS[kind]) for kind, path in names.items())
            splits.append(_join_images_and_labels(inputs, numbers, images, labels, DIGIT))
        elif names:
            (kind,), (path,) = set(_KINDS) - set(names), names.values()
            raise TrainerError(
                f"{path} is there, and the {kind} that belong to it are not",
                hint=f"copy {split}-{kind}-idx{_KINDS[kind]}-ubyte.gz to the same folder",
            )
    if not splits:
        raise TrainerError(
            f"--data {folder} has no IDX files of MNIST",
            hint="their names are train-images-idx3-ubyte, t10k-labels-idx1-ubyte and so on, "
            "with .gz or without",
        )
    return splits


def _find_idx_file(folder: Path, split: str, kind: str) -> Path | None:
    """Return the file of one kind, with or without the prefix that some mirrors use."""
    stem = f"{split}-{kind}-idx{_KINDS[kind]}-ubyte"
    paths = (folder / f"{prefix}{stem}{end}" for prefix in ("", "mnist-") for end in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def read_idx(path: Path, axes: int) -> Tensor:
    """Return the array in an IDX file: bytes, with ``axes`` axes."""
    with explain_errors(f"{path} cannot be read", _SOUND, (OSError, EOFError, zlib.error)):
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
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
        x, y = f"x_{split}", f"y_{split}"
        rows = _join_images_and_labels(arrays[x], arrays[y], path / x, path / y, THING)
        splits.append(rows)
    return splits


def choose_images(splits: Splits, options: Options) -> tuple[Rows, Rows]:
    """Return the images to train on and to hold out that the command line asks for."""
    others = len(splits[1]) if len(splits) > 1 else None
    chosen, held_out = choose_rows(options, len(splits[0]), others, "image", options.data)
    if not chosen or not held_out:
        raise TrainerError(
            f"{options.data}: {format_count(len(chosen), 'image')} to train on and "
            f"{len(held_out)} held out: there is nothing to learn",
            hint="give at least one of each",
        )
    return splits[0].select(chosen), splits[-1].select(held_out)


def normalize_images(rows: Rows, mean: float, spread: float) -> Rows:
    """Return images as numbers around 0, of shape (rows, channels, height, width).

    Args:
        rows: images of bytes, shape (rows, height, width) or (rows, channels, height, width).
        mean: of all pixels, where a byte stands for 0 to 1.
        spread: their standard deviation.
    """
    inputs = rows.inputs if rows.inputs.dim() == 4 else rows.inputs[:, None]
    return Rows(inputs=(inputs.float() / 255 - mean) / spread, labels=rows.labels)


def _join_images_and_labels(
    inputs: Tensor, labels: Tensor, images: Path, where: Path, shape: tuple[int, ...]
) -> Rows:
    """Return images with their labels; TrainerError if they or ``shape`` do not match.

    ``images`` and ``where`` name the places of images and labels in messages.
    """
    if inputs.dtype != torch.uint8 or labels.is_floating_point() or labels.is_complex():
        raise TrainerError(
            f"{images} has numbers of type {inputs.dtype}, and {where} of type {labels.dtype}",
            hint="images are bytes (uint8, 0 to 255), and labels are whole numbers",
        )
    if tuple(inputs.shape[1:]) != shape:
        raise TrainerError(
            f"{images} has the shape {tuple(inputs.shape)}, and an image has to be "
            f"{' x '.join(map(str, shape))}",
            hint="with the channels last, bring them to the front: x.transpose(0, 3, 1, 2)",
        )
    if len(inputs) != labels.numel():
        raise TrainerError(
            f"{images} has the shape {tuple(inputs.shape)}, and {where} has "
            f"{labels.numel()} labels",
            hint="both have to be of the same data set, an image for each label",
        )
    labels = labels.reshape(-1).long()
    wrong = ((labels < 0) | (labels >= CLASSES)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise TrainerError(
            f"{where}: label {place} is {int(labels[place])}, and {len(wrong)} of "
            f"{len(labels)} are not from 0 to {CLASSES - 1}",
            hint=_SOUND,
        )
    return Rows(inputs=inputs, labels=labels)
