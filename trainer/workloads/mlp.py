"""Workload ``mlp``: 10 numbers, 50 hidden units, 2 classes; rows that the seed makes up.

It needs no data and no time, and so shows whether a cluster can train at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import Options
from ..engine.loop import train
from ..network.dist import World
from ..task import Rows, Task

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

ROWS, HELD_OUT = 4096, 512
"""To train on and to hold out, when the command line does not say."""


def run(options: Options, world: World) -> None:
    """Train it."""
    train(task(options), options, world)


def task(options: Options) -> Task:
    """The model with its rows: which of two hidden directions is a point nearer to?"""
    import torch

    source = torch.Generator().manual_seed(options.seed)
    count, held_out = options.subset or ROWS, options.held_out or HELD_OUT
    directions = torch.randn(10, 2, generator=source)
    inputs = torch.randn(count + held_out, 10, generator=source)
    labels = (inputs @ directions).argmax(dim=1)
    return Task(
        model=model(options.seed),
        train=Rows(inputs=inputs[:count], labels=labels[:count]),
        held_out=Rows(inputs=inputs[count:], labels=labels[count:]),
        lr=0.1,
        optimizer=optimizer,
    )


def model(seed: int) -> Module:
    """Two layers, with first weights of the seed."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))


def optimizer(model: Module) -> Optimizer:
    """Plain gradient descent with momentum."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
