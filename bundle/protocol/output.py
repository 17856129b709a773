"""Output as it travels: JSON events that hold any bytes exactly, and are readable for text.

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
    """Return the part of an event that holds these bytes."""
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
    """Return the lines that an event holds, as far as they are text."""
    lines = decoded(event).decode(errors="replace").split("\n")
    return lines if lines[-1] else lines[:-1]


def readable(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event with ``lines`` in place of its bytes, for those who show it."""
    rest = {key: value for key, value in event.items() if key not in ("text", "base64")}
    return {**rest, "lines": shown(event)}


def line(event: Mapping[str, Any]) -> bytes:
    """Return an event as JSON in one line, without a line end."""
    # What is no ASCII stays as it is in output, which is UTF-8; names of files may be none.
    return json.dumps(event, ensure_ascii=event.get("event") != "output").encode()


def described(loss: Mapping[str, Any]) -> str:
    """Return a loss in words: ``rank 3 (120 bytes)``."""
    who = "the node's ranks" if loss.get("rank") is None else f"rank {loss['rank']}"
    if "bytes" in loss:
        return f"{who} ({counted(loss['bytes'], 'byte')})"
    many = counted(loss["frames"], "frame") if "frames" in loss else "some frames"
    return f"{who} ({many} of messages)"


def lost(loss: Mapping[str, Any]) -> str:
    """Return what is wrong where output is lost, as the driver's problem and a warning say it."""
    return f"output of {described(loss)} is lost"
