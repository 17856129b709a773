"""A sign of life while a phase prints nothing: its seconds, and the bytes that were written."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from bundle.protocol.counts import sized

SILENT_SECONDS = 4.0
"""Time without a line after which there is one."""
RANKS_SECONDS = 60.0
"""Time without output of any rank after which a line says so."""
_NO_OUTPUT = ", no output yet (does the script set MASTER_ADDR or MASTER_PORT?)"
_LEAST = 1_000_000
"""Bytes from which on they are worth a word."""


class PulseReceiver(Protocol):
    """Where a phase talks."""

    told: float
    """The time of the last line, by the monotonic clock."""

    progress: str
    """What is done of how much, after a comma; empty if it is not known."""

    def show_pulse(self, line: str) -> None:
        """Show a line."""


class Pulse:
    """Shows every few seconds that a phase goes on, until it is stopped or nobody has the talk."""

    def __init__(self, talk: PulseReceiver, *, of_ranks: bool = False) -> None:
        """Start; ``of_ranks`` is for a phase in which only ranks print, until the first does."""
        self._talk = weakref.ref(talk)
        self._patience = RANKS_SECONDS if of_ranks else SILENT_SECONDS
        self._of_ranks = of_ranks
        self._begun = time.monotonic()
        self._before = _written()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        new = 0
        while not self._over.wait(1.0):
            new = max(new, _written() - self._before)  # a process may end while they are counted
            talk = self._talk()
            if talk is None:
                return
            if time.monotonic() - talk.told >= self._patience:
                size = f", {sized(new)} written" if new >= _LEAST else ""
                done = _NO_OUTPUT if self._of_ranks else f"{talk.progress}{size}"
                with suppress(OSError, ValueError):  # the reader has gone
                    talk.show_pulse(f"  {time.monotonic() - self._begun:.0f} s{done}")
            del talk


def _written() -> int:
    """Return the bytes that this process and those below it have written.

    The kernel adds those of a process that has ended to its parent's (``wait_task_zombie``).
    """
    written = 0
    pending = [os.getpid()]
    while pending:
        process = pending.pop()
        with suppress(OSError, ValueError, IndexError):  # it has ended
            folder = Path(f"/proc/{process}")
            written += int((folder / "io").read_text().split("wchar: ")[1].split()[0])
            for children in folder.glob("task/*/children"):
                pending += map(int, children.read_text().split())
    return written
