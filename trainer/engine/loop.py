"""The training loop: plain PyTorch, the same for one process and for a thousand.

Everything random (the order of rows, augmentation, dropout) is a function of the seed and of the
position in the run, so that a run that resumes ends with the same weights.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..config import Options, TrainerError, TrainingStopped
from ..network import dist
from ..network.dist import World
from . import saving, sync
from .progress import Progress
from .run import Position, Run, Share, Task

# Between two reductions: each wakes every rank, which costs most if ranks share CPUs.
_INTERVAL_SECONDS, _MOST_STEPS = 0.3, 50
_EVALUATION_ROWS = 256  # rows of one batch of an evaluation, which takes less memory than training


class StopSignal:
    """Whether this rank has received a signal to stop: from a scheduler, an administrator, Ctrl-C.

    A rank that stopped at once would leave the others waiting in a collective. So it only records
    the signal, and all ranks stop together after a step (see :class:`Reduction`).
    """

    def __init__(self) -> None:
        self.received = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. A second SIGINT ends the process as usual."""
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def record_signals() -> Iterator[StopSignal]:
    """Record the signals while the block runs, instead of ending."""
    stop_signal = StopSignal()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, stop_signal.note) for number in numbers}
    try:
        yield stop_signal
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Reduction:
    """The losses and stop signals of all ranks, added up some steps late, so that no rank waits.

    All ranks get the same results at the same step. Several short steps are reduced together.
    """

    def __init__(self, run: Run, progress: Progress, stop_signal: StopSignal) -> None:
        self._run, self._progress, self._signal = run, progress, stop_signal
        self._parts: list[Tensor] = []
        self._every = 1
        self._since = time.perf_counter()
        self._sent: Tensor | None = None
        self._work: Any = None
        # Position, rate and rows of the steps whose losses are not known yet.
        self._waiting: deque[tuple[Position, float, int]] = deque()
        self._total, self._rows = 0.0, 0

    def add(self, part: Tensor, at: Position, lr: float, rows: int) -> None:
        """Add this rank's part of a step's loss; record earlier results when they are due."""
        self._parts.append(part)
        self._waiting.append((at, lr, rows))
        if len(self._parts) >= self._every:
            self._receive()
            self._send()

    def finish(self) -> float:
        """Record all results that are still missing; return the mean loss of all rows."""
        for _ in range(2):
            self._receive()
            if self._parts:
                self._send()
        return self._total / max(1, self._rows)

    def _send(self) -> None:
        now, world = time.perf_counter(), self._run.world
        values = torch.zeros(len(self._parts) + 2, dtype=torch.float64, device=world.device)
        values[:-2] = torch.stack(self._parts)
        values[-2], values[-1] = float(self._signal.received), now - self._since
        self._since, self._sent = now, values
        self._parts.clear()
        if world.size > 1:
            self._work = torch.distributed.all_reduce(values, async_op=True)

    def _receive(self) -> None:
        """Record the results on their way; TrainerError on every rank if a loss is not finite."""
        if self._sent is None:
            return
        if self._work is not None:
            self._work.wait()
        *losses, stops, seconds = self._sent.tolist()
        # The same numbers on every rank, so the same number of steps.
        seconds_a_step = max(seconds / self._run.world.size / len(losses), 1e-9)
        self._every = max(1, min(_MOST_STEPS, int(_INTERVAL_SECONDS / seconds_a_step)))
        self._sent = self._work = None
        self._run.stopping = self._run.stopping or stops > 0
        for loss in losses:
            self._record(loss, *self._waiting.popleft())

    def _record(self, loss: float, at: Position, lr: float, rows: int) -> None:
        if not math.isfinite(loss):
            raise TrainerError(
                f"the loss of step {at.step} is {loss}: training cannot continue from there",
                hint="lower --lr, or look for broken rows; checkpoints of earlier epochs are kept",
                everywhere=True,  # all ranks have the same numbers
            )
        self._total, self._rows = self._total + loss, self._rows + rows
        epoch = at.epoch + at.row / self._run.order.rows
        self._progress.step(at.step, epoch, loss / rows, lr, rows)


def train(make_task: Callable[[Options], Task], options: Options, world: World) -> None:
    """Train to the end, with a checkpoint after each epoch; then write model and metrics."""
    task = dist.run_on_all_ranks(world, lambda: make_task(options))
    run = Run(task, options, world)
    saving.prepare_folder(run, os.environ)
    progress = dist.run_on_all_ranks(
        world, lambda: Progress(options.out, run.steps, speaks=world.is_first)
    )
    accuracy = loss = 0.0
    if run.at.epoch < options.epochs:
        _warm_up(run)
    with record_signals() as stop_signal, closing(progress):
        while run.at.epoch < options.epochs:
            average = _train_epoch(run, Reduction(run, progress, stop_signal))
            accuracy, loss = evaluate(task, world)
            progress.epoch(run.at.epoch, run.at.step, average, accuracy)
            saving.save_epoch(run, accuracy)
            if run.stopping and run.at.epoch < options.epochs:
                raise TrainingStopped(f"stopped after step {run.at.step}")
        if not progress.rows:  # the run was complete before
            accuracy, loss = evaluate(task, world)
    saving.write_results(run, progress, accuracy, loss)


def _train_epoch(run: Run, reduction: Reduction) -> float:
    """Train for the rest of an epoch; return its mean loss. TrainingStopped after a signal."""
    world, epoch, every = run.world, run.at.epoch, run.options.save_every
    run.task.model.train()
    while run.at.epoch == epoch:
        share = run.order.share(run.at, world.rank, world.size)
        lr = run.set_rate()
        part = _train_step(run, share)
        run.at = run.order.advance(run.at)
        reduction.add(part, run.at, lr, share.total)
        is_due = every is not None and run.at.step % every == 0
        if run.at.epoch == epoch and (run.stopping or is_due):
            reduction.finish()  # up to the step that is saved
            saving.save_step(run)
            if run.stopping:
                raise TrainingStopped(f"stopped after step {run.at.step}")
    mean_loss = reduction.finish()
    run.sync.share()
    return mean_loss


def _warm_up(run: Run) -> None:
    """Run a step that changes nothing: after it, DDP rearranges its buckets once and for all.

    Else a run that resumes would add numbers in another order, and end with other bits.
    """
    if isinstance(run.sync, sync.Ddp):
        share = run.order.share(run.at, run.world.rank, run.world.size)
        _forward(run, share)[0].backward()
        run.optimizer.zero_grad(set_to_none=True)


def _train_step(run: Run, share: Share) -> Tensor:
    # torch.manual_seed would record its call stack for each kind of GPU that is missing: a tenth of
    # a short step, and memory that is never released.
    seed = 0
    for number in (run.options.seed, run.at.step, run.world.rank):
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
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
    """Return the value that this rank minimises, and its part of the sum of the losses.

    The ranks' mean of the first is that of all rows of the step, however many a rank has.
    """
    task, device = run.task, run.world.device
    started = time.perf_counter()
    inputs, labels = task.train.inputs[share.rows], task.train.labels[share.rows]
    if task.augment is not None:
        inputs = task.augment(inputs, share.rows, run.at.epoch)
    run.reading += time.perf_counter() - started
    scores = run.sync.forward(inputs.to(device))
    losses = cross_entropy(scores.float(), labels.to(device), reduction="none")
    part = (losses * share.weights.to(scores.device)).sum()
    return part * (run.world.size / share.total), part.detach()


def evaluate(task: Task, world: World) -> tuple[float, float]:
    """Return the accuracy on the held-out rows, and their mean loss in nats."""
    rows = task.held_out

    def score(numbers: Tensor) -> tuple[Tensor, Tensor]:
        return task.model(rows.inputs[numbers].to(world.device)), rows.labels[numbers]

    return measure_accuracy(task.model, len(rows), _EVALUATION_ROWS, world, score)


def measure_accuracy(
    model: nn.Module,
    rows: int,
    batch: int,
    world: World,
    score: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[float, float]:
    """Return the share of right answers, and the mean cross-entropy in nats.

    The ranks take turns with the rows, so that each counts once; shares padded to the same length
    would count some twice. ``score`` returns scores for each class, and labels, of numbered rows.
    """
    right = loss = 0.0
    model.eval()
    with torch.inference_mode():
        for numbers in torch.arange(rows)[world.rank :: world.size].split(batch):
            if not len(numbers):
                continue  # a rank without rows
            scores, labels = score(numbers)
            scores, labels = scores.float(), labels.to(world.device)
            right += float((scores.argmax(dim=-1) == labels).sum())
            loss += float(cross_entropy(scores, labels, reduction="sum"))
    right, loss = dist.sum_over_ranks(world, [right, loss])
    return right / rows, loss / rows
