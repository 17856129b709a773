"""Output of ranks in JSON events, which hold any bytes exactly and are readable if it is text.

``{"event": "output", "rank": 3, "text": "..."}``, or ``"base64"`` in place of ``"text"`` for bytes
that are not UTF-8. Much output at once is compressed where that saves a quarter: ``"zlib"``, in
base64. What travels through ``srun`` costs more time than compressing it does.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping

_WORTH_BYTES = 1 << 12
"""Bytes from which on output is compressed."""
_MOST_BYTES = 1 << 24
"""Bytes that one event may hold, many times what an agent sends at once."""


def encoded(data: bytes) -> dict[str, str]:
    """Return these bytes as part of an event."""
    if len(data) >= _WORTH_BYTES:
        packed = binascii.b2a_base64(zlib.compress(data, 1), newline=False)
        if len(packed) < len(data) * 3 // 4:
            return {"zlib": packed.decode("ascii")}
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def decoded(event: Mapping[str, object]) -> bytes:
    """Return the bytes that an event holds.

    Raises:
        KeyError, ValueError: it holds none, or more than any agent sends.
    """
    if "zlib" in event:
        return _decompressed(binascii.a2b_base64(str(event["zlib"])))
    if "base64" in event:
        return base64.b64decode(str(event["base64"]))
    return str(event["text"]).encode(errors="replace")


def _decompressed(packed: bytes) -> bytes:
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(packed, _MOST_BYTES)
    except zlib.error as exc:
        raise ValueError(str(exc)) from exc
    if not reader.eof:
        raise ValueError("the output is cut off, or too long")
    return data


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
