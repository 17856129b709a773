"""The last lines of output, kept while all of it is passed on."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field

OnOutput = Callable[["int | None", bytes], None]
"""Called with the rank, None for the launcher itself, and its next output: whole lines, except for
very long ones, and the last."""
KEPT = 200
"""The number of last lines that are kept, of all ranks together and of each."""
_KEPT_BYTES = 1 << 12
"""Bytes that are kept of each of these lines; the beginning tells what is wrong."""


@dataclass
class RecentOutput:
    """The last lines of a launcher and its ranks."""

    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=KEPT))
    """The last lines of all together, in the order in which they were read."""
    by_rank: dict[int, collections.deque[str]] = field(default_factory=dict)
    """The last lines of each rank."""
    launcher: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=KEPT))
    """The last lines of the launcher, and of ranks that write to its output."""


class OutputRecorder:
    """Keeps the last lines of output, and passes all of it on."""

    def __init__(self, recent: RecentOutput, on_output: OnOutput) -> None:
        self._recent = recent
        self._on_output = on_output

    def write(self, rank: int | None, data: bytes) -> None:
        """Record the next output of a rank, or of the launcher (None)."""
        if not data:
            return
        recent, lines = self._recent, _last_lines(data)
        recent.tail.extend(lines)
        if rank is None:
            recent.launcher.extend(lines)
        else:
            recent.by_rank.setdefault(rank, collections.deque(maxlen=KEPT)).extend(lines)
        self._on_output(rank, data)


def _last_lines(data: bytes) -> list[str]:
    lines = data.rsplit(b"\n", KEPT + 1)[-KEPT - 1 :]
    if not lines[-1]:
        lines.pop()
    return [line[:_KEPT_BYTES].decode(errors="replace") for line in lines[-KEPT:]]
