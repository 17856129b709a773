"""Values from untrusted JSON, each of the type that was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LARGEST = 1e15
"""Beyond this a number is an accident, and no axis can show it beside others."""


def number(raw: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a usual size; None where there is none."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        known = float(value)
    except OverflowError:
        return None
    return known if math.isfinite(known) and abs(known) < _LARGEST else None


def whole(raw: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number; None where there is none."""
    value = number(raw, key)
    if value is None or value != int(value):
        return None
    return int(value)


def text(raw: Mapping[str, Any], key: str) -> str:
    """Return a text, or a number as one; empty where there is neither."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    return str(value)


def table(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object; empty where there is none."""
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def listing(raw: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list; empty where there is none."""
    value = raw.get(key)
    return value if isinstance(value, list) else []


def texts(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the texts of a list."""
    return tuple(value for value in listing(raw, key) if isinstance(value, str))
