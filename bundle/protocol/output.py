"""Output of ranks in JSON events, which hold any bytes exactly and are readable if it is text.

``{"event": "output", "rank": 3, "text": "..."}``, or ``"base64"`` in place of ``"text"`` for bytes
that are not UTF-8.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping


def encoded(data: bytes) -> dict[str, str]:
    """Return these bytes as part of an event."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def decoded(event: Mapping[str, object]) -> bytes:
    """Return the bytes that an event holds."""
    if "base64" in event:
        return base64.b64decode(str(event["base64"]))
    return str(event["text"]).encode(errors="replace")


def lines_of(data: bytes) -> list[str]:
    """Return output as lines of text."""
    lines = data.decode(errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def line(node: str, rank: int | None, data: bytes) -> bytes:
    """Return output of a rank, or of the launcher (None), as an event in one line of JSON.

    UTF-8 stays readable. The line has no end.
    """
    event = {"v": 1, "node": node, "event": "output", "rank": rank, **encoded(data)}
    return json.dumps(event, ensure_ascii=False).encode()
