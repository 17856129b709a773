"""Workload ``cifar10``: an 18-layer residual network tells ten kinds of things apart.

The network is that of He et al. 2015 in its form for small images. It normalises over groups of
channels (Wu and He 2018), not over the rows of a batch, which depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu
from torch.optim import AdamW

from ..config import Options
from ..data import images
from ..engine.loop import train
from ..engine.run import Task

MEAN, SPREAD = 0.4734, 0.2516  # of all pixels of the training split, from 0 to 1
_STAGES = 4
_GROUPS = 8
_PADDING = 4
_EPOCHS = 1 << 20


def make_task(options: Options) -> Task:
    """Return the model with its images, which are shifted and mirrored while it learns."""
    path = images.find_data_file(options, "cifar10*.npz")
    splits = images.choose_images(images.read_npz(path), options)
    train_rows, held_out = (images.normalize_images(rows, MEAN, SPREAD) for rows in splits)

    def augment(inputs: Tensor, numbers: Tensor, epoch: int) -> Tensor:
        return shift_and_mirror(inputs, numbers, len(train_rows), options.seed * _EPOCHS + epoch)

    return Task(
        model=make_model(options.seed, [options.width << stage for stage in range(_STAGES)]),
        train=train_rows,
        held_out=held_out,
        lr=4e-3,
        optimizer=partial(AdamW, weight_decay=5e-2),  # few epochs are enough, whatever the width
        augment=augment,
    )


run = partial(train, make_task)


def make_model(seed: int, widths: Sequence[int]) -> nn.Module:
    """Return ResNet-18: stages of two residual blocks, each twice as wide and half as large."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False)]
    layers += [nn.GroupNorm(_GROUPS, widths[0]), nn.ReLU()]
    before = widths[0]
    for stage, width in enumerate(widths):
        layers += [Residual(before, width, 2 if stage else 1), Residual(width, width, 1)]
        before = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, images.CLASSES)
    )


class Residual(nn.Module):  # type: ignore[misc]  # torch may be missing where types are checked
    """Two convolutions whose output is added to their input, and rectified."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        """Map ``before`` channels to ``width``."""
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(_GROUPS, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(_GROUPS, width),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.around = nn.Sequential(
                nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.GroupNorm(_GROUPS, width)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute it; same number of rows as ``inputs``."""
        return relu(self.inner(inputs) + self.around(inputs))


def shift_and_mirror(inputs: Tensor, numbers: Tensor, rows: int, seed: int) -> Tensor:
    """Mirror and shift images by up to four pixels, by row number: the same on every rank."""
    source = torch.Generator().manual_seed(seed)
    mirrored = torch.rand(rows, generator=source)[numbers] < 0.5
    places = torch.randint(0, 2 * _PADDING + 1, (rows, 2), generator=source)[numbers]
    height, width = inputs.shape[-2:]
    cut = [
        image[:, top : top + height, left : left + width]
        for image, (top, left) in zip(pad(inputs, (_PADDING,) * 4), places.tolist(), strict=True)
    ]
    shifted = torch.stack(cut)
    return torch.where(mirrored[:, None, None, None], shifted.flip(-1), shifted)
