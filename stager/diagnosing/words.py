"""Ranks and times, as a person reads them."""

from __future__ import annotations

import time
from collections.abc import Iterable


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
