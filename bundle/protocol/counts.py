"""Numbers for people: counts with their noun in the singular or the plural, and bytes."""

from __future__ import annotations


def format_count(number: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``3 nodes``, ``12,000 files``."""
    if number == 1:
        return f"1 {noun}"
    plural = several or f"{noun}s"
    return f"{number:,} {plural}"


def format_size(count: int) -> str:
    """Return a number of bytes for people: ``1.4 GB``."""
    if count < 1000:
        return format_count(count, "byte")
    amount = count / 1000
    for unit in ("kB", "MB"):
        if amount < 1000:
            return f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
