"""Ranks, times and ranks that go on, as a person reads them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Ranks as ``ranks 0-3,7``, one as ``rank 7``; none as nothing."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    shown = ",".join("-".join(map(str, part)) for part in parts)
    return f"rank{'s' if not shown.isdigit() else ''} {shown}" if shown else ""


def when(seconds: float) -> str:
    """A time of this machine's zone, to the second; nothing for one that cannot be."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def goes_on(event: Mapping[str, Any]) -> tuple[str, str]:
    """What there is to say of a rank whose process goes on for too long, and what to do."""
    if event["finished"] is None and event.get("left") is not None:
        cause = "it has left its process group and goes on, and others may wait for it there"
        return cause, (
            "call destroy_process_group on every rank, after the last thing they do together"
        )
    if event["finished"] is None:
        cause = "it goes on though other ranks of its node have ended"
        return cause, "see what only this rank does at the end, and whom it waits for there"
    names = ", ".join(event["waits_for"])
    cause = "its program has ended, but its process goes on: "
    if not names:
        return f"{cause}its exit handlers do not come to an end", (
            "see what is registered with atexit, and what open libraries do as they are closed"
        )
    return f"{cause}it waits for {names}", (
        "end such threads and processes before the program ends, or make them daemons"
    )
