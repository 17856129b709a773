"""Keeping the copies of a model the same on all ranks, in four ways that give the same result.

``ddp`` is what one uses. The others do by hand what it does: ``all-reduce`` adds up the gradients
on all ranks, ``parameter-server`` keeps weights and optimizer on rank 0, and ``dp`` splits each
batch over the GPUs of one process.

A rank's loss is made so that the *mean* of all gradients is that of the whole step, see
:func:`trainer.engine.loop.loss_of`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..config import TrainerError
from ..network.dist import World

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


class Alone:
    """One process: nothing to keep the same."""

    def __init__(self, model: Module, whole: Module) -> None:
        """Take the model, and the form it is computed in (:class:`.layers.Precise`)."""
        self.model = model
        self.forward: Module = whole
        self.spent = 0.0
        """Seconds in which this rank did nothing but exchange with the others."""

    def pull(self) -> None:
        """Before a step: get the weights that it starts from."""

    def update(self, optimizer: Optimizer) -> None:
        """After the backward pass: change the weights by the gradients of all ranks."""
        optimizer.step()

    def share(self) -> None:
        """At the end of an epoch: have the same weights everywhere."""


class DataParallel(Alone):
    """One process that splits each batch over its GPUs; on a CPU there is nothing to split."""

    def __init__(self, model: Module, whole: Module) -> None:
        """Wrap the model."""
        from torch import nn

        super().__init__(model, whole)
        self.forward = nn.DataParallel(whole)


class Ddp(Alone):
    """DistributedDataParallel: gradients are averaged in buckets while the backward pass runs."""

    def __init__(self, model: Module, whole: Module) -> None:
        """Wrap the model; rank 0's weights go to all."""
        from torch import nn

        super().__init__(model, whole)
        self.forward = nn.parallel.DistributedDataParallel(whole)
        self._computed = 0.0
        # Of most networks the first parameters get their gradients last. One call a step is next to
        # nothing; one for each parameter took two per cent of a small network's time.
        trained = [one for one in model.parameters() if one.requires_grad]
        for one in trained[:1]:
            one.register_post_accumulate_grad_hook(self._note)

    def update(self, optimizer: Optimizer) -> None:
        """The gradients are averaged already, in part while they were computed."""
        # What that took after the last one was computed was not hidden behind the backward pass.
        self.spent += max(0.0, time.perf_counter() - self._computed)
        super().update(optimizer)

    def _note(self, _: Tensor) -> None:
        self._computed = time.perf_counter()


class AllReduce(Alone):
    """After the backward pass the gradients of all ranks are added up, and divided by the ranks."""

    def __init__(self, model: Module, whole: Module, world: World) -> None:
        """Begin with rank 0's weights everywhere."""
        super().__init__(model, whole)
        self._world = world
        self.share()

    def update(self, optimizer: Optimizer) -> None:
        """Average the gradients, then every rank takes the same step."""
        from torch import distributed

        gradients = _flat([_gradient(one) for one in self.model.parameters()])
        with self._timed():
            distributed.all_reduce(gradients)
        self._put(gradients / self._world.size)
        optimizer.step()

    def share(self) -> None:
        """Copy rank 0's weights to all."""
        import torch
        from torch import distributed

        with torch.no_grad(), self._timed():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                distributed.broadcast(tensor, src=0)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent += time.perf_counter() - started

    def _put(self, gradients: Tensor) -> None:
        first = 0
        for one in self.model.parameters():
            one.grad = gradients[first : first + one.numel()].view_as(one)
            first += one.numel()


class ParameterServer(AllReduce):
    """Rank 0 has the weights: all pull them and push gradients; rank 0 alone takes the step."""

    def pull(self) -> None:
        """Get the weights from rank 0."""
        self.share()

    def update(self, optimizer: Optimizer) -> None:
        """Add up the gradients on rank 0, which changes its weights by their mean."""
        from torch import distributed

        gradients = _flat([_gradient(one) for one in self.model.parameters()])
        with self._timed():
            distributed.reduce(gradients, dst=0)
        if self._world.is_first:
            self._put(gradients / self._world.size)
            optimizer.step()


def synchronised(name: str, model: Module, world: World, *, mixed: bool) -> Alone:
    """The model, kept the same on all ranks in the way that is named.

    Args:
        name: one of :data:`trainer.config.SYNCS`.
        model: where it is trained.
        world: the ranks.
        mixed: whether it is computed in bfloat16.

    Raises:
        TrainerError: ``dp`` with more than one process.
    """
    from .layers import Precise

    if name == "dp" and world.size > 1:
        raise TrainerError(
            f"--sync dp is for one process, and this is a job of {world.size}",
            hint="start one process (stager run --nodes 1 --nproc-per-node 1), or use --sync ddp",
        )
    whole = Precise(model, world.device) if mixed else model
    if name == "dp" and world.device != "cpu":
        return DataParallel(model, whole)
    if world.size == 1:
        return Alone(model, whole)
    if name == "ddp":
        return Ddp(model, whole)
    if name == "all-reduce":
        return AllReduce(model, whole, world)
    return ParameterServer(model, whole, world)


def _flat(tensors: list[Tensor]) -> Tensor:
    import torch

    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _gradient(parameter: Tensor) -> Tensor:
    import torch

    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
