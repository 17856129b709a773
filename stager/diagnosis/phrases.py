"""The wording of ranks, times, and ranks that run for too long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as ``ranks 0-3,7``, a single one as ``rank 7``; empty for none."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    if not ranges:
        return ""
    shown = ",".join("-".join(map(str, ends)) for ends in ranges)
    return f"rank {shown}" if shown.isdigit() else f"ranks {shown}"


def when(seconds: float) -> str:
    """Return a time in this machine's zone, to the second; empty for one that cannot be."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def lingering_in_words(
    finished: float | None, left: float | None, waits_for: Sequence[str]
) -> tuple[str, str]:
    """Return cause and hint for a rank whose process goes on for too long."""
    if finished is None and left is not None:
        return (
            "it has left its process group and goes on, and others may wait for it there",
            "call destroy_process_group on every rank, after the last thing they do together",
        )
    if finished is None:
        return (
            "it goes on though other ranks of its node have ended",
            "see what only this rank does at the end, and whom it waits for there",
        )
    ended = "its program has ended, but its process goes on"
    if not waits_for:
        return (
            f"{ended}: its exit handlers do not come to an end",
            "see what is registered with atexit, and what open libraries do as they are closed",
        )
    return (
        f"{ended}: it waits for {', '.join(waits_for)}",
        "end such threads and processes before the program ends, or make them daemons",
    )
