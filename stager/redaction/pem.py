"""Private keys in PEM: whole ones, and what is left of one that has lost an end."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

from .spans import Span

_BEGIN = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key"
)
_END = re.compile(rb"-----END (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----|Private-MAC: \w+")
_BODY = re.compile(
    rb"(?:[A-Za-z0-9+/=]{16,}|\\+[nr]|[\s,\"']|\[\w{1,20}\]: |(?:Proc-Type|DEK-Info): [^\n]{1,80})*"
)
_KEY_LINE = re.compile(rb"(?:\[\w{1,20}\]: )?[A-Za-z0-9+/=]{4,}")
_KEY_BYTES = 1 << 16
"""No private key is longer."""


def spans(text: bytes) -> Iterator[Span]:
    """Keys in PEM; of one that has lost its beginning or its end what is left of it."""
    if b"PRIVATE KEY" not in text and b"PuTTY-User-Key" not in text:
        return
    begins, ends = list(_BEGIN.finditer(text)), list(_END.finditer(text))
    last = [found.end() for found in ends]
    for number, begun in enumerate(begins):
        nearest = bisect.bisect_right(last, begun.end())
        stop = min(begun.end() + _KEY_BYTES, len(text))
        if number + 1 < len(begins):
            stop = min(stop, begins[number + 1].start())
        if nearest < len(last) and last[nearest] <= stop:
            yield Span.at(begun.start(), last[nearest], "private-key")
            continue
        body = _BODY.match(text, begun.end(), stop)
        left = body[0].rstrip(b" \t\r\n,\"'\\") if body else b""
        yield Span.at(begun.start(), begun.end() + len(left), "private-key")
    for ended in ends:
        start = end = ended.start()
        while end > 0 and ended.start() - start < _KEY_BYTES // 4:
            start = text.rfind(b"\n", max(0, end - 160), max(0, end - 1)) + 1
            if not _KEY_LINE.fullmatch(text[start:end].strip()):
                break
            end = start
        if end < ended.start():
            yield Span.at(end, ended.end(), "private-key")
