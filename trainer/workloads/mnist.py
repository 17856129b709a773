"""Workload ``mnist``: a small convolutional network reads handwritten digits.

The data are the IDX files of MNIST (LeCun et al. 1998), plain or compressed, as they are published.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim import AdamW

from ..config import Options
from ..data import images
from ..engine.loop import train
from ..engine.run import Task

MEAN, SPREAD = 0.1307, 0.3081  # of all pixels of the training split, from 0 to 1


def make_task(options: Options) -> Task:
    """Return the model with its images."""
    splits = images.choose_images(images.read_mnist(images.find_mnist_folder(options)), options)
    train_rows, held_out = (images.normalize_images(rows, MEAN, SPREAD) for rows in splits)
    return Task(
        model=make_model(options.seed),
        train=train_rows,
        held_out=held_out,
        lr=2e-3,
        optimizer=partial(AdamW, weight_decay=1e-2),
    )


run = partial(train, make_task)


def make_model(seed: int) -> nn.Module:
    """Return two convolutions, each followed by pooling, and two layers on top."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, images.CLASSES),
    )
