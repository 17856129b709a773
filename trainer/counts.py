"""Counts in words: the trainer's own helper, as it imports nothing of the tool."""

from __future__ import annotations


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``3 nodes``.

    Args:
        number: how many there are.
        noun: what one of them is called, ``other layer``.
        several: the plural, where it is not the singular with an s: ``entries``.
    """
    return f"{number} {noun if number == 1 else several or f'{noun}s'}"
