"""Counts in words: the one place that knows a noun's singular from its plural."""

from __future__ import annotations


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``3 nodes``, ``12,000 files``.

    Args:
        number: how many there are.
        noun: what one of them is called, ``other layer``.
        several: the plural, where it is not the singular with an s: ``entries``.
    """
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"
