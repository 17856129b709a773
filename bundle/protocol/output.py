"""Output of ranks in JSON events, which hold any bytes exactly and are readable if it is text.

``{"event": "output", "rank": 3, "text": "..."}``, or ``"base64"`` in place of ``"text"`` for bytes
that are not UTF-8.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any


def encoded(data: bytes) -> dict[str, str]:
    """Return these bytes as part of an event."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def decoded(event: Mapping[str, Any]) -> bytes:
    """Return the bytes that an event holds."""
    if "base64" in event:
        return base64.b64decode(event["base64"])
    return str(event["text"]).encode(errors="replace")


def shown(event: Mapping[str, Any]) -> list[str]:
    """Return the output in an event as lines of text."""
    lines = decoded(event).decode(errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def readable(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event with ``lines`` in place of its bytes, to be shown."""
    rest = {key: value for key, value in event.items() if key not in ("text", "base64")}
    return {**rest, "lines": shown(event)}


def line(node: str, rank: int | None, data: bytes) -> bytes:
    """Return output of a rank, or of the launcher (None), as an event in one line of JSON.

    UTF-8 stays readable. The line has no end.
    """
    event = {"v": 1, "node": node, "event": "output", "rank": rank, **encoded(data)}
    return json.dumps(event, ensure_ascii=False).encode()
