"""Workload ``mnist``: a small convolutional network reads handwritten digits.

The data are the IDX files of MNIST (LeCun et al. 1998), plain or compressed, as they are published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import Options
from ..data import images
from ..engine.loop import train
from ..network import dist
from ..network.dist import World
from ..task import Task

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

MEAN, SPREAD = 0.1307, 0.3081
"""Of all pixels of the training split, from 0 to 1."""


def run(options: Options, world: World) -> None:
    """Train it."""
    train(dist.run_on_all_ranks(world, lambda: task(options)), options, world)


def task(options: Options) -> Task:
    """The model with its images."""
    chosen = images.choose_images(images.read_mnist(images.find_mnist_folder(options)), options)
    return Task(
        model=model(options.seed),
        train=images.normalize_images(chosen.train, MEAN, SPREAD),
        held_out=images.normalize_images(chosen.held_out, MEAN, SPREAD),
        lr=2e-3,
        optimizer=optimizer,
    )


def model(seed: int) -> Module:
    """Two convolutions, each followed by pooling, and two layers on top."""
    import torch
    from torch import nn

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


def optimizer(model: Module) -> Optimizer:
    """AdamW."""
    import torch

    return torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
