"""Workload ``mlp``: 10 numbers, 50 hidden units, 2 classes; rows that the seed makes up.

It needs no data and no time, and so shows whether a cluster can train at all.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim import SGD

from ..config import Options
from ..data.rows import Rows
from ..engine.loop import train
from ..engine.run import Task

ROWS, HELD_OUT = 4096, 512  # to train on and to hold out, when the command line does not say


def make_task(options: Options) -> Task:
    """Return the model with its rows: which of two hidden directions is a point nearer to?"""
    source = torch.Generator().manual_seed(options.seed)
    count, held_out = options.subset or ROWS, options.held_out or HELD_OUT
    directions = torch.randn(10, 2, generator=source)
    inputs = torch.randn(count + held_out, 10, generator=source)
    labels = (inputs @ directions).argmax(dim=1)
    torch.manual_seed(options.seed)
    return Task(
        model=nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2)),
        train=Rows(inputs=inputs[:count], labels=labels[:count]),
        held_out=Rows(inputs=inputs[count:], labels=labels[count:]),
        lr=0.1,
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
    )


run = partial(train, make_task)
