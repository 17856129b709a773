"""Amounts for a person: seconds, shares, and the round numbers of an axis."""

from __future__ import annotations

import math

_STEPS = (1.0, 2.0, 5.0)
_CLOCK = (1, 2, 5, 10, 15, 30)
"""Steps that are round on a clock; 60 of them are one of the next unit."""

_ALIKE = 1e-9
"""Numbers that differ by less than this part of them are one to an axis."""

__all__ = ["decimal", "duration", "nice", "percent", "ticks", "time_ticks"]


def duration(seconds: float) -> str:
    """Return seconds in words: ``0.08 s``, ``12.3 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if seconds < 59.95:
        places = 2 if seconds < 1 else 1
        return f"{seconds:.{places}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def decimal(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share of one, as a length in SVG."""
    return f"{min(max(share, 0.0), 1.0) * 100:.4g}%"


def nice(width: float, most: int) -> float:
    """Return the smallest round step of which no more than so many are needed."""
    rough = width / most
    power = 10.0 ** math.floor(math.log10(rough))
    fitting = (step * power for step in (*_STEPS, 10.0) if step * power >= rough * (1 - 1e-9))
    return next(fitting)


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Return round numbers that reach from below ``low`` to above ``high``, each with its text."""
    if high - low <= _ALIKE * max(abs(low), abs(high)):
        spare = abs(low) / 10 or 1.0
        low, high = low - spare, high + spare
    step = nice(high - low, most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [(number * step, _text(number * step, step)) for number in range(first, last + 1)]


def time_ticks(seconds: float, most: int = 6) -> tuple[list[tuple[float, str]], str]:
    """Return round times from 0 up to a length in seconds, each with its text, and their unit."""
    if seconds < 90:
        unit, length = "seconds", 1.0
        step = nice(max(seconds, 1e-3), most)
    else:
        unit, length = ("minutes", 60.0) if seconds < 90 * 60 else ("hours", 3600.0)
        amount = seconds / length
        fitting = [step for step in _CLOCK if step * most >= amount]
        step = float(fitting[0]) if fitting else nice(amount, most)
    last = math.floor(seconds / length / step + 1e-9)
    steps = [number * step for number in range(last + 1)]
    return [(value * length, _text(value, step)) for value in steps], unit


def _text(value: float, step: float) -> str:
    """Return the number of a tick, with as many decimals as the step has."""
    if abs(value) >= 1e7 or 0 < step < 1e-6:
        return f"{value:.4g}"
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{places}f}" if value else "0"
