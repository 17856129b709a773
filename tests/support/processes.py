"""Looking for what still runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def living(*places: str | Path) -> list[str]:
    """Command lines of processes, zombies aside, that name one of these places."""
    wanted = [os.fsencode(place) for place in places]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if any(place in line for place in wanted):
                found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process is there, and more than an entry in a table that nobody has looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 600, *, pause: float = 0.1) -> bool:
    """Whether something comes true in that time; it is looked at after each pause, in seconds.

    The time is no more than a guard: a machine may be busy with other tests.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
