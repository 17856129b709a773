"""Counts in words: the trainer's own helper, as it imports nothing of the tool."""

from __future__ import annotations


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``3 nodes``; or with the plural ``several``."""
    if number == 1:
        return f"1 {noun}"
    plural = several or f"{noun}s"
    return f"{number} {plural}"
