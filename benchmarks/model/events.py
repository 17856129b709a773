"""Time that is simulated: events in their order, processors that processes share, and links."""

from __future__ import annotations

import gc
import heapq
import math
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions at their times.

    Attributes:
        now: the simulated time in seconds.
    """

    def __init__(self) -> None:
        """Begin at 0 with nothing to do."""
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time: float, action: Action) -> None:
        """Run an action at a time; those of the same time run in the order of these calls.

        Raises:
            ValueError: the time has passed.
        """
        if time < self.now:
            raise ValueError(f"an action at {time} s comes too late: it is {self.now} s")
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def run(self) -> float:
        """Run until nothing is left to do; return the time of the last action."""
        events = self._events
        collects = gc.isenabled()
        gc.disable()  # it would look at all hosts and events again and again, and find nothing
        try:
            while events:
                self.now, _, action = heapq.heappop(events)
                action()
        finally:
            if collects:
                gc.enable()
        return self.now


class Processors:
    """Processors that some processes share, each for one piece of work at a time."""

    def __init__(self, clock: Clock, count: int, turn: float = math.inf) -> None:
        """Begin with all of them free.

        Args:
            clock: the time.
            count: the number of processors.
            turn: seconds after which a process that works on lets the next one have its turn.
        """
        self._clock, self._free, self._turn = clock, count, turn
        self._ready: deque[Process] = deque()

    def request(self, process: Process) -> None:
        """Let a process run its next piece of work, once a processor is free."""
        if self._free:
            self._free -= 1
            self._start(process)
        else:
            self._ready.append(process)

    def _start(self, process: Process) -> None:
        seconds, action = process.work.popleft()
        if seconds > self._turn:
            process.work.appendleft((seconds - self._turn, action))
            seconds, action = self._turn, _nothing

        def end() -> None:
            action()
            if process.work:
                self._ready.append(process)
            else:
                process.running = False
            if self._ready:
                self._start(self._ready.popleft())
            else:
                self._free += 1

        self._clock.at(self._clock.now + seconds, end)


def _nothing() -> None:
    """Do nothing: the work is not done yet."""


class Process:
    """A process: it does one piece of work after the other.

    Attributes:
        work: the CPU seconds of what it has to do, each with what follows.
        running: True while it has work.
    """

    def __init__(self, processors: Processors) -> None:
        """Begin with nothing to do."""
        self._processors = processors
        self.work: deque[tuple[float, Action]] = deque()
        self.running = False

    def do(self, seconds: float, action: Action) -> None:
        """Work for some CPU seconds after all that was asked before; then run an action."""
        self.work.append((seconds, action))
        if not self.running:
            self.running = True
            self._processors.request(self)


class Queue:
    """A link's end, or a disk: bytes go through it one after the other, at a rate."""

    def __init__(self, clock: Clock, rate: float) -> None:
        """Begin idle.

        Args:
            clock: the time.
            rate: bytes a second; infinite where nothing limits them.
        """
        self._clock, self._rate = clock, rate
        self._free = 0.0

    def begin(self, size: float, action: Action) -> None:
        """Let some bytes through after those before; run an action when their turn comes."""
        now, start = self._clock.now, self._free
        if start <= now:
            self._free = now + size / self._rate
            action()
        else:
            self._free = start + size / self._rate
            self._clock.at(start, action)

    def take(self, size: float, earliest: float) -> float:
        """Let some bytes through, the first not before a time; return the time of the last."""
        self._free = max(self._free, earliest) + size / self._rate
        return self._free
