"""Workload ``cifar10``: an 18-layer residual network tells ten kinds of things apart.

The network is that of He et al. 2015 in its form for small images. It normalises over groups of
channels (Wu and He 2018) where the original does so over the rows of a batch: what a rank computes
for one image then does not depend on which others it has, and so not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config import Options
from ..data import images
from ..engine.loop import train
from ..network import dist
from ..network.dist import World
from ..task import Task

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

MEAN, SPREAD = 0.4734, 0.2516
"""Of all pixels of the training split, from 0 to 1."""
_STAGES = 4
_GROUPS = 8
_PADDING = 4
_EPOCHS = 1 << 20


def run(options: Options, world: World) -> None:
    """Train it."""
    train(dist.run_on_all_ranks(world, lambda: task(options)), options, world)


def task(options: Options) -> Task:
    """The model with its images, which are shifted and mirrored while it learns."""
    chosen = images.choose_images(
        images.read_npz(images.find_data_file(options, "cifar10*.npz")), options
    )
    rows = len(chosen.train)

    def augment(inputs: Tensor, numbers: Tensor, epoch: int) -> Tensor:
        return shift_and_mirror(inputs, numbers, rows, options.seed * _EPOCHS + epoch)

    return Task(
        model=model(options.seed, tuple(options.width << stage for stage in range(_STAGES))),
        train=images.normalize_images(chosen.train, MEAN, SPREAD),
        held_out=images.normalize_images(chosen.held_out, MEAN, SPREAD),
        lr=4e-3,
        optimizer=optimizer,
        augment=augment,
    )


def model(seed: int, widths: Sequence[int]) -> Module:
    """ResNet-18: four stages of two residual blocks, each twice as wide and half as large."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers: list[Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), *_norm(widths[0])]
    before = widths[0]
    for stage, width in enumerate(widths):
        layers += [_block(before, width, 2 if stage else 1), _block(width, width, 1)]
        before = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, images.CLASSES)
    )


def optimizer(model: Module) -> Optimizer:
    """AdamW: few epochs are enough, whatever the width."""
    import torch

    return torch.optim.AdamW(model.parameters(), weight_decay=5e-2)


def shift_and_mirror(inputs: Tensor, numbers: Tensor, rows: int, seed: int) -> Tensor:
    """Mirror and shift images by up to four pixels, by row number: the same on every rank."""
    import torch
    from torch.nn.functional import pad

    source = torch.Generator().manual_seed(seed)
    mirrored = torch.rand(rows, generator=source)[numbers] < 0.5
    places = torch.randint(0, 2 * _PADDING + 1, (rows, 2), generator=source)[numbers]
    height, width = inputs.shape[-2:]
    padded = pad(inputs, (_PADDING,) * 4)
    cut = [
        image[:, top : top + height, left : left + width]
        for image, (top, left) in zip(padded, places.tolist(), strict=True)
    ]
    found = torch.stack(cut)
    return torch.where(mirrored[:, None, None, None], found.flip(-1), found)


def _norm(width: int) -> list[Module]:
    from torch import nn

    return [nn.GroupNorm(_GROUPS, width), nn.ReLU()]


def _block(before: int, width: int, stride: int) -> Module:
    from torch import nn

    from ..engine.layers import Residual

    inner = nn.Sequential(
        nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
        *_norm(width),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.GroupNorm(_GROUPS, width),
    )
    around: Module = nn.Identity()
    if stride != 1 or before != width:
        around = nn.Sequential(
            nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.GroupNorm(_GROUPS, width)
        )
    return Residual(inner, around)
