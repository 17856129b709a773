"""The training loop: plain PyTorch, one page, the same for one process and for a thousand.

Everything random (the order of rows, augmentation, dropout) is a function of the seed and of the
position in the run. So a run that resumes from a checkpoint ends with the same weights as one that
was never interrupted.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..config import Options, TrainerError
from ..network import dist
from ..network.dist import World
from ..task import Rows, Task
from . import saving
from .progress import Progress
from .rows import Position, Share
from .run import Run
from .sync import Ddp

if TYPE_CHECKING:
    from torch import Tensor


# --- Signals to stop: from a scheduler before its time limit, from an administrator, from Ctrl-C

# A rank that stopped at once would leave the others waiting in a collective. So it only records the
# signal, and all ranks stop together after a step (see :class:`Reduction`), with a checkpoint.

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_INTERVAL_SECONDS = 0.3
"""Between two reductions: each wakes every rank, which costs most if ranks share CPUs."""
_MOST_STEPS = 50
"""Steps between two reductions at most."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that was stopped by a signal and has saved a checkpoint."""


class TrainingStopped(Exception):
    """The run was stopped by a signal, and has saved a checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")


class StopSignal:
    """The signal to stop that this rank has received, if any."""

    def __init__(self) -> None:
        self.name: str = ""
        """The signal's name; empty if there was none."""

    @property
    def received(self) -> bool:
        """True once there was a signal."""
        return bool(self.name)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. A second SIGINT ends the process as usual."""
        self.name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def record_signals() -> Iterator[StopSignal]:
    """Record the signals while the block runs, instead of ending."""
    stop_signal = StopSignal()
    before = {number: signal.signal(number, stop_signal.note) for number in SIGNALS}
    try:
        yield stop_signal
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class StepResults:
    """The results of some steps over all ranks."""

    losses: tuple[float, ...]
    """The sum of the losses of each of some steps, in order."""
    stop: bool
    """True if any rank has received a signal to stop."""


class Reduction:
    """Adds up the losses and stop signals of all ranks, some steps late, so that no rank waits.

    All ranks get the same results at the same step, and so make the same decisions. Several short
    steps are reduced together.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: list[Tensor] = []
        self._every = 1
        self._since = time.perf_counter()
        self._sent: Tensor | None = None
        self._work: Any = None

    def add(self, part: Tensor, stop: bool) -> StepResults | None:
        """Add this rank's part of a step's loss, and whether it has received a signal.

        Returns:
            The results of earlier steps, when they are due.
        """
        self._parts.append(part)
        if len(self._parts) < self._every:
            return None
        results = self._receive()
        self._send(stop)
        return results

    def rest(self, stop: bool) -> Iterator[StepResults]:
        """Wait for all results that are still missing, and yield them."""
        for _ in range(2):
            results = self._receive()
            if results is not None:
                yield results
            if self._parts:
                self._send(stop)

    def _send(self, stop: bool) -> None:
        import torch

        now = time.perf_counter()
        values = torch.zeros(len(self._parts) + 2, dtype=torch.float64, device=self._world.device)
        values[:-2] = torch.stack(self._parts)
        values[-2], values[-1] = float(stop), now - self._since
        self._since, self._sent = now, values
        self._parts.clear()
        if self._world.size > 1:
            self._work = torch.distributed.all_reduce(values, async_op=True)

    def _receive(self) -> StepResults | None:
        if self._sent is None:
            return None
        if self._work is not None:
            self._work.wait()
        *losses, stops, seconds = self._sent.tolist()
        # The same numbers on every rank, so the same number of steps.
        seconds_a_step = max(seconds / self._world.size / len(losses), 1e-9)
        self._every = max(1, min(_MOST_STEPS, int(_INTERVAL_SECONDS / seconds_a_step)))
        self._sent = self._work = None
        return StepResults(losses=tuple(losses), stop=stops > 0)


_EVALUATION_ROWS = 256
"""Rows of one batch of an evaluation, which takes less memory than training."""


@dataclass
class _Mean:
    total: float = 0.0
    rows: int = 0
    waiting: deque[tuple[Position, float, int]] = field(default_factory=deque)
    """Position, rate and rows of the steps whose losses are not known yet."""


def train(
    task: Task, options: Options, world: World, environ: Mapping[str, str] = os.environ
) -> None:
    """Train to the end, with a checkpoint after each epoch; then write model and metrics.

    Raises:
        TrainerError: on every rank, if the output folder or a checkpoint is unusable.
        Stopped: a signal came. A checkpoint has been written.
    """
    run = Run(task, options, world)
    saving.prepare_folder(run, environ)
    progress = dist.run_on_all_ranks(
        world, lambda: Progress(options.out, run.steps, speaks=world.is_first)
    )
    accuracy = loss = 0.0
    if run.at.epoch < options.epochs:
        _warm_up(run)
    with record_signals() as stop_signal, closing(progress):
        while run.at.epoch < options.epochs:
            average = _train_epoch(run, progress, stop_signal)
            accuracy, loss = evaluate(task, world)
            progress.epoch(run.at.epoch, run.at.step, average, accuracy)
            saving.save_epoch(run, accuracy)
            if run.stopping and run.at.epoch < options.epochs:
                raise TrainingStopped(run.at.step)
        if not progress.rows:  # the run was complete before
            accuracy, loss = evaluate(task, world)
    saving.write_results(run, progress, accuracy, loss)


def _train_epoch(run: Run, progress: Progress, stop_signal: StopSignal) -> float:
    """Train for the rest of an epoch; return its mean loss. TrainingStopped after a signal."""
    world, epoch = run.world, run.at.epoch
    reduction, mean = Reduction(world), _Mean()
    run.task.model.train()
    while run.at.epoch == epoch:
        share = run.order.share(run.at, world.rank, world.size)
        lr = _set_rate(run)
        part = _train_step(run, share)
        run.at = run.order.get_position_after(run.at)
        mean.waiting.append((run.at, lr, share.total))
        _record(run, reduction.add(part, stop_signal.received), mean, progress)
        if run.at.epoch == epoch and (run.stopping or _is_checkpoint_due(run)):
            for results in reduction.rest(stop_signal.received):
                _record(run, results, mean, progress)  # up to the step that is saved
            saving.save_step(run)
            if run.stopping:
                raise TrainingStopped(run.at.step)
    for results in reduction.rest(stop_signal.received):
        _record(run, results, mean, progress)
    run.sync.share()
    return mean.total / max(1, mean.rows)


def _is_checkpoint_due(run: Run) -> bool:
    every = run.options.save_every
    return bool(every) and run.at.step % (every or 1) == 0


def _record(run: Run, results: StepResults | None, mean: _Mean, progress: Progress) -> None:
    """Record results of earlier steps; TrainerError on every rank if a loss is not finite."""
    if results is None:
        return
    run.stopping = run.stopping or results.stop
    for loss in results.losses:
        at, lr, rows = mean.waiting.popleft()
        if not math.isfinite(loss):
            raise TrainerError(
                f"the loss of step {at.step} is {loss}: training cannot continue from there",
                hint="lower --lr, or look for broken rows; checkpoints of earlier epochs are kept",
                everywhere=True,  # all ranks have the same numbers
            )
        mean.total, mean.rows = mean.total + loss, mean.rows + rows
        progress.step(at.step, at.epoch + at.row / run.order.rows, loss / rows, lr, rows)


def _warm_up(run: Run) -> None:
    """Run a step that changes nothing.

    After its first backward pass, DistributedDataParallel rearranges its buckets, and Gloo then
    adds numbers in another order. In a run that resumes this would happen at another step than in
    the original one, and it would end with other bits.
    """
    if isinstance(run.sync, Ddp):
        share = run.order.share(run.at, run.world.rank, run.world.size)
        _forward(run, share)[0].backward()
        run.optimizer.zero_grad(set_to_none=True)


def _train_step(run: Run, share: Share) -> Tensor:
    """Run one step of this rank; return its part of the sum of the losses."""
    import torch

    # torch.manual_seed would record its call stack for each kind of GPU that is missing: a tenth of
    # a short step, and memory that is never released.
    seed = _mix_seeds(run.options.seed, run.at.step, run.world.rank)
    torch.default_generator.manual_seed(seed)
    if run.world.device != "cpu":
        torch.cuda.manual_seed(seed)
    started = time.perf_counter()
    run.sync.pull()
    run.optimizer.zero_grad(set_to_none=True)
    loss, part = _forward(run, share)
    loss.backward()
    run.sync.update(run.optimizer)
    run.stepping += time.perf_counter() - started
    return part


def _forward(run: Run, share: Share) -> tuple[Tensor, Tensor]:
    """Return the value that this rank minimises, and its part of the sum of the losses."""
    task, device = run.task, run.world.device
    started = time.perf_counter()
    inputs, labels = task.train.inputs[share.rows], task.train.labels[share.rows]
    if task.augment is not None:
        inputs = task.augment(inputs, share.rows, run.at.epoch)
    run.reading += time.perf_counter() - started
    scores = run.sync.forward(inputs.to(device))
    return compute_loss(scores, labels.to(device), share, run.world.size)


def compute_loss(scores: Tensor, labels: Tensor, share: Share, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the value that a rank minimises, and its part of the sum of a step's losses.

    The mean over all ranks of the first is the mean loss of all rows of the step, also where the
    ranks have different numbers of them; a mean of the ranks' means would not be.
    """
    from torch.nn.functional import cross_entropy

    weights = share.weights.to(scores.device)
    part = (cross_entropy(scores.float(), labels, reduction="none") * weights).sum()
    return part * (ranks / share.total), part.detach()


def evaluate(task: Task, world: World) -> tuple[float, float]:
    """Return the accuracy on the held-out rows, and their mean loss; each row counts once."""
    import torch
    from torch.nn.functional import cross_entropy

    rows: Rows = task.held_out
    right = loss = 0.0
    task.model.eval()
    mine = torch.arange(len(rows))[world.rank :: world.size]
    with torch.inference_mode():
        for chosen in mine.split(_EVALUATION_ROWS) if len(mine) else ():
            labels = rows.labels[chosen].to(world.device)
            scores = task.model(rows.inputs[chosen].to(world.device)).float()
            right += float((scores.argmax(dim=-1) == labels).sum())
            loss += float(cross_entropy(scores, labels, reduction="sum"))
    right, loss = dist.sum_over_ranks(world, [right, loss])
    return right / len(rows), loss / len(rows)


def compute_rate(done: float, peak: float, warmup: float) -> float:
    """Return the rate at ``done`` (0 to 1): a linear rise over ``warmup``, then a fall to zero."""
    if done < warmup:
        return peak * (0.1 + 0.9 * done / warmup)
    return peak * max(0.0, 1 - done) / (1 - warmup)


def _set_rate(run: Run) -> float:
    lr = compute_rate(run.done, run.options.lr or run.task.lr, run.task.warmup)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    return lr


def _mix_seeds(*numbers: int) -> int:
    """Return one seed made of several numbers, the same on every machine."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed
