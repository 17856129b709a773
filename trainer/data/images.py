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
_UNSIGNED_BYTES = 0x08  # the only type in MNIST's files (http://yann.lecun.com/exdb/mnist)
_KINDS = {"images": 3, "labels": 1}
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_SOUND = "check that it arrived complete, and copy it again"

Splits = Sequence[Rows]  # images to learn from, then those held out, if the source has such


def find_mnist_folder(options: Options) -> Path:
    """Return the folder that ``--data`` names."""
    if options.data is None or not options.data.is_dir():
        raise TrainerError(
            f"{options.workload} needs --data, a folder with the IDX files of MNIST",
            hint="name the folder with train-images-idx3-ubyte.gz and the files that belong to "
            "it; nothing is fetched",
        )
    return options.data


def find_data_file(options: Options, pattern: str) -> Path:
    """Return the file that ``--data`` names, or the one in its folder that fits a pattern."""
    data = options.data
    if data is not None and data.is_file():
        return data
    paths = [] if data is None else sorted(data.glob(pattern))
    if len(paths) == 1:
        return paths[0]
    setting = "--data is missing" if data is None else f"--data {data}"
    names = ", ".join(path.name for path in paths) or "no such file"
    raise TrainerError(
        f"{setting}: {options.workload} needs one file {pattern} ({names})",
        hint="name the file; it is read as it is, nothing is fetched",
    )


def read_mnist(folder: Path) -> Splits:
    """Return the training and the test split of MNIST, or the only one that is there."""
    splits = []
    for split in ("train", "t10k"):
        images, labels = (_find_idx_file(folder, split, kind) for kind in _KINDS)
        if images is not None and labels is not None:
            inputs, numbers = (read_idx(images, 3), read_idx(labels, 1))
            splits.append(_join_images_and_labels(inputs, numbers, images, labels, DIGIT))
        elif images is not None or labels is not None:
            kind = "images" if images is None else "labels"
            raise TrainerError(
                f"{images or labels} is there, and the {kind} that belong to it are not",
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
        begin = data[:4].hex(" ") or "nothing"
        raise TrainerError(
            f"{path}: byte 0: not an IDX file of bytes with {axes} axes (it begins with {begin})",
            hint=_SOUND,
        )
    shape = struct.unpack(f">{axes}I", data[4:head])
    expected, size = head + math.prod(shape), " x ".join(map(str, shape))
    if len(data) != expected:
        raise TrainerError(
            f"{path}: byte {min(len(data), expected)}: its header says {size}, which is {expected} "
            f"bytes in all, and there are {len(data)}",
            hint=_SOUND,
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=head).reshape(shape).copy())


def read_npz(path: Path) -> Splits:
    """Return the images in the arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test``."""
    with (
        explain_errors(f"{path} cannot be read as npz", _SOUND, Exception),
        np.load(path, allow_pickle=False) as file,
    ):
        names = file.files
        found = {name: np.ascontiguousarray(file[name]) for name in _ARRAYS if name in names}
    missing = [name for name in _ARRAYS if name not in found]
    if missing:
        raise TrainerError(
            f"{path} has no {', '.join(missing)} (it has {', '.join(names)})",
            hint=f"it needs the arrays {', '.join(_ARRAYS)}",
        )
    arrays = {name: torch.from_numpy(array) for name, array in found.items()}
    return [
        _join_images_and_labels(arrays[x], arrays[y], path / x, path / y, THING)
        for x, y in (_ARRAYS[:2], _ARRAYS[2:])
    ]


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
    """Return (rows, channels, height, width) around 0, by mean and deviation of pixels 0 to 1."""
    inputs = rows.inputs if rows.inputs.dim() == 4 else rows.inputs[:, None]
    return Rows(inputs=(inputs.float() / 255 - mean) / spread, labels=rows.labels)


def _join_images_and_labels(
    inputs: Tensor, labels: Tensor, images: Path, where: Path, shape: tuple[int, ...]
) -> Rows:
    """Return images with their labels, which ``images`` and ``where`` name in messages."""
    if inputs.dtype != torch.uint8 or labels.is_floating_point() or labels.is_complex():
        raise TrainerError(
            f"{images} has numbers of type {inputs.dtype}, and {where} of type {labels.dtype}",
            hint="images are bytes (uint8, 0 to 255), and labels are whole numbers",
        )
    found = f"{images} has the shape {tuple(inputs.shape)}"
    if tuple(inputs.shape[1:]) != shape:
        raise TrainerError(
            f"{found}, and an image has to be {' x '.join(map(str, shape))}",
            hint="with the channels last, bring them to the front: x.transpose(0, 3, 1, 2)",
        )
    if len(inputs) != labels.numel():
        raise TrainerError(
            f"{found}, and {where} has {labels.numel()} labels",
            hint="both have to be of the same data set, an image for each label",
        )
    labels = labels.reshape(-1).long()
    wrong = ((labels < 0) | (labels >= CLASSES)).nonzero()
    if len(wrong):
        first = f"label {int(wrong[0])} is {int(labels[wrong[0]])}"
        count = f"{len(wrong)} of {len(labels)} are not from 0 to {CLASSES - 1}"
        raise TrainerError(f"{where}: {first}, and {count}", hint=_SOUND)
    return Rows(inputs=inputs, labels=labels)
