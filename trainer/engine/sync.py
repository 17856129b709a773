"""Equal ranks: the same inputs, and synchronised copies of the model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ..config import Options, TrainerError
from ..data.rows import Rows
from ..network import dist
from ..network.dist import World

# Options that decide the steps and their content.
_OPTIONS = (
    *("workload", "epochs", "subset", "held_out", "batch_size", "lr", "seed"),
    *("sync", "precision", "save_every"),
)


def require_same_inputs(world: World, options: Options, rows: Mapping[str, str]) -> None:
    """Continue only if every rank has the options and rows of rank 0.

    Otherwise the ranks would average whatever they have, or wait in different collectives.
    """
    mine = {f"--{name.replace('_', '-')}": str(getattr(options, name)) for name in _OPTIONS}
    mine |= rows
    first = dist.run_on_first_rank(world, lambda: mine)
    differences = [
        f"{name} {value} (rank 0: {first[name]})"
        for name, value in mine.items()
        if first[name] != value
    ]

    def refuse_differences() -> None:
        if differences:
            raise TrainerError(
                f"not what rank 0 has: {', '.join(differences)}",
                hint="start all ranks with the same command; check whether the data on that "
                "node is a different copy",
            )

    dist.run_on_all_ranks(world, refuse_differences)


def describe_rows(rows: Rows) -> str:
    """Return the number of rows and a digest of their labels, which no processor rounds."""
    labels = ",".join(map(str, rows.labels.tolist()))
    return f"{len(rows)}, labels {hashlib.sha256(labels.encode()).hexdigest()[:8]}"


# --- Synchronisation of the models on all ranks, in four ways with the same result ---------------

# A rank's loss is scaled so that the *mean* of all gradients is that of the whole step.


class Precise(nn.Module):  # type: ignore[misc]  # torch may be missing where types are checked
    """A model in bfloat16 where that is accurate enough, also in DataParallel's threads."""

    def __init__(self, inner: nn.Module, device: str) -> None:
        super().__init__()
        self.inner, self._device = inner, device

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the model."""
        with torch.autocast(self._device, dtype=torch.bfloat16):
            return self.inner(inputs)


class Alone:
    """One process, without anything to synchronise; ``whole`` computes the model."""

    def __init__(self, model: nn.Module, whole: nn.Module) -> None:
        self.model, self.forward = model, whole
        self.spent = 0.0  # seconds in which this rank only exchanged data with the others

    def pull(self) -> None:
        """Get the weights before a step."""

    def update(self, optimizer: Optimizer) -> None:
        """Change the weights by the gradients of all ranks, after the backward pass."""
        optimizer.step()

    def share(self) -> None:
        """Copy the weights to all ranks, at the end of an epoch."""


class Ddp(Alone):
    """DistributedDataParallel: it averages gradients in buckets during the backward pass."""

    def __init__(self, model: nn.Module, whole: nn.Module) -> None:
        super().__init__(model, nn.parallel.DistributedDataParallel(whole))
        self._computed = 0.0
        # In most networks the first parameters get their gradients last. A call for each parameter
        # took two per cent of a small network's time.
        first = next((one for one in model.parameters() if one.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._note)

    def update(self, optimizer: Optimizer) -> None:
        """Take the step; DistributedDataParallel has averaged the gradients already."""
        # The time after the last gradient was computed was not hidden behind the backward pass.
        self.spent += max(0.0, time.perf_counter() - self._computed)
        super().update(optimizer)

    def _note(self, _: Tensor) -> None:
        self._computed = time.perf_counter()


class AllReduce(Alone):
    """After the backward pass the gradients of all ranks are added up, and divided by the ranks."""

    def __init__(self, model: nn.Module, whole: nn.Module, world: World) -> None:
        super().__init__(model, whole)
        self._world = world
        self.share()

    def update(self, optimizer: Optimizer) -> None:
        """Average the gradients, then every rank takes the same step."""
        gradients = self._collect_gradients()
        with self._measure_exchange():
            distributed.all_reduce(gradients)
        self._step(optimizer, gradients)

    def share(self) -> None:
        """Copy rank 0's weights to all."""
        with torch.no_grad(), self._measure_exchange():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                distributed.broadcast(tensor, src=0)

    @contextmanager
    def _measure_exchange(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent += time.perf_counter() - started

    def _collect_gradients(self) -> Tensor:
        gradients = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.model.parameters()
        )
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    def _step(self, optimizer: Optimizer, sums: Tensor) -> None:
        parameters = list(self.model.parameters())
        means = (sums / self._world.size).split([one.numel() for one in parameters])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)
        optimizer.step()


class ParameterServer(AllReduce):
    """Rank 0 has the weights: all pull them and push gradients; rank 0 alone takes the step."""

    def pull(self) -> None:
        """Get the weights from rank 0."""
        self.share()

    def update(self, optimizer: Optimizer) -> None:
        """Add up the gradients on rank 0, which changes its weights by their mean."""
        gradients = self._collect_gradients()
        with self._measure_exchange():
            distributed.reduce(gradients, dst=0)
        if self._world.is_first:
            self._step(optimizer, gradients)


def synchronise_model(name: str, model: nn.Module, world: World, *, mixed: bool) -> Alone:
    """Return a model that is synchronised over all ranks."""
    if name == "dp" and world.size > 1:
        raise TrainerError(
            f"--sync dp is for one process, and this is a job of {world.size}",
            hint="start one process (stager run --nodes 1 --nproc-per-node 1), or use --sync ddp",
        )
    whole = Precise(model, world.device) if mixed else model
    if world.size == 1:
        # On a CPU there is nothing to split.
        is_split = name == "dp" and world.device != "cpu"
        return Alone(model, nn.DataParallel(whole) if is_split else whole)
    if name == "ddp":
        return Ddp(model, whole)
    return (AllReduce if name == "all-reduce" else ParameterServer)(model, whole, world)
