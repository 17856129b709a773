"""Values out of JSON that anybody may have written: each is of the type that was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LARGEST = 1e15
"""Beyond this a number is an accident, and no axis can show it beside others."""


def number(raw: Mapping[str, Any], key: str) -> float | None:
    """A number that can be reckoned with; None where there is none."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and abs(found) < _LARGEST else None


def whole(raw: Mapping[str, Any], key: str) -> int | None:
    """A whole number; None where there is none."""
    found = number(raw, key)
    return int(found) if found is not None and found == int(found) else None


def text(raw: Mapping[str, Any], key: str) -> str:
    """A text, or a number as one; empty where there is neither."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    return str(value)


def table(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object; empty where there is none."""
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def listing(raw: Mapping[str, Any], key: str) -> list[Any]:
    """A list; empty where there is none."""
    value = raw.get(key)
    return value if isinstance(value, list) else []


def texts(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The texts of a list."""
    return tuple(one for one in listing(raw, key) if isinstance(one, str))
