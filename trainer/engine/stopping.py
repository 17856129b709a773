"""Being told to stop: by a scheduler before its time limit, by an administrator, by Ctrl-C.

A rank that stopped at once would leave the others waiting in a collective. So it only notes it, and
all ranks stop together after a step (see :class:`Pulse`), with a checkpoint.
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
_PULSE_SECONDS = 0.3
"""Between two pulses: each wakes every rank, which costs most where ranks share CPUs."""
_MOST_STEPS = 50
STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that was told to stop and has saved where it was."""


class Stopped(Exception):
    """The run was told to stop, and has saved where it was."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")


class Told:
    """Whether this rank has been told to stop."""

    def __init__(self) -> None:
        """Begin: it has not."""
        self.by: str = ""
        """The signal's name; empty while there was none."""

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal. A second SIGINT ends the process as ever."""
        self.by = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def listening() -> Iterator[Told]:
    """Note the signals instead of ending, as long as the block runs."""
    told = Told()
    before = {number: signal.signal(number, told.note) for number in SIGNALS}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What all ranks have said together."""

    losses: tuple[float, ...]
    """The sum of the losses of each of some steps, in order."""
    stop: bool
    """Whether any rank was told to stop."""


class Pulse:
    """Adds up over all ranks what each says of its steps, some steps late: nobody waits for it.

    All ranks get the same answer at the same step, and so come to the same decisions. Of short
    steps several are told of at a time.
    """

    def __init__(self, world: World) -> None:
        """Begin with nothing on its way."""
        self._world = world
        self._parts: list[Tensor] = []
        self._every = 1
        self._since = time.perf_counter()
        self._sent: Tensor | None = None
        self._work: Any = None

    def beat(self, part: Tensor, stop: bool) -> Heard | None:
        """Say this rank's part of a step's loss, and whether it was told to stop.

        Returns:
            What all ranks said of earlier steps, when it is time to hear it.
        """
        self._parts.append(part)
        if len(self._parts) < self._every:
            return None
        heard = self._receive()
        self._send(stop)
        return heard

    def rest(self, stop: bool) -> Iterator[Heard]:
        """All that was said and not heard yet, waiting for it."""
        for _ in range(2):
            heard = self._receive()
            if heard is not None:
                yield heard
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

    def _receive(self) -> Heard | None:
        if self._sent is None:
            return None
        if self._work is not None:
            self._work.wait()
        *losses, stops, seconds = self._sent.tolist()
        # The same numbers on every rank, so the same number of steps.
        a_step = max(seconds / self._world.size / len(losses), 1e-9)
        self._every = max(1, min(_MOST_STEPS, int(_PULSE_SECONDS / a_step)))
        self._sent = self._work = None
        return Heard(losses=tuple(losses), stop=stops > 0)
