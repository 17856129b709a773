"""Counts in words, with the noun in the singular or the plural."""

from __future__ import annotations


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``3 nodes``, ``12,000 files``.

    Args:
        number: the count.
        noun: the singular, ``other layer``.
        several: the plural, where it is not the singular with an s: ``entries``.
    """
    if number == 1:
        return f"1 {noun}"
    plural = several or f"{noun}s"
    return f"{number:,} {plural}"
