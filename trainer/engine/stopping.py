"""Signals to stop: from a scheduler before its time limit, from an administrator, from Ctrl-C.

A rank that stopped at once would leave the others waiting in a collective. So it only records the
signal, and all ranks stop together after a step (see :class:`Reduction`), with a checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..network.dist import World

if TYPE_CHECKING:
    from torch import Tensor

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
def recording_signals() -> Iterator[StopSignal]:
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
