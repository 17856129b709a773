"""Output of ranks in JSON events, which hold any bytes exactly and are readable if it is text.

``{"event": "output", "rank": 3, "text": "..."}``, or ``"base64"`` in place of ``"text"`` for bytes
that are not UTF-8.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from .counts import counted


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


def line(event: Mapping[str, Any]) -> bytes:
    """Return an event as JSON in one line, without a line end."""
    # Output is UTF-8 and stays readable; file names in other events may be invalid UTF-8.
    is_output = event.get("event") == "output"
    return json.dumps(event, ensure_ascii=not is_output).encode()


def described(loss: Mapping[str, Any]) -> str:
    """Return a loss of output in words: ``rank 3 (120 bytes)``."""
    rank = loss.get("rank")
    source = "the node's ranks" if rank is None else f"rank {rank}"
    if "bytes" in loss:
        amount = counted(loss["bytes"], "byte")
    elif "frames" in loss:
        amount = f"{counted(loss['frames'], 'frame')} of messages"
    else:
        amount = "some frames of messages"
    return f"{source} ({amount})"
