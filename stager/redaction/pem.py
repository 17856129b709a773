"""Private keys in PEM: whole ones, and what is left of one that has lost an end."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

from .spans import Span, end_of

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
    """Find the keys in PEM; of one that has lost its beginning or its end, what is left of it."""
    if b"PRIVATE KEY" not in text and b"PuTTY-User-Key" not in text:
        return
    ends = list(_END.finditer(text))
    yield from _with_beginning(text, [match.end() for match in ends])
    for end in ends:
        first = _first_key_line(text, end.start())
        if first < end.start():
            yield Span.at(first, end.end(), "private-key")


def _with_beginning(text: bytes, ends: list[int]) -> Iterator[Span]:
    """Find the keys whose first line is there: up to their last line, else as far as they go."""
    begins = list(_BEGIN.finditer(text))
    next_begins = [match.start() for match in begins[1:]] + [len(text)]
    for begin, next_begin in zip(begins, next_begins, strict=False):
        stop = min(begin.end() + _KEY_BYTES, len(text), next_begin)
        nearest = bisect.bisect_right(ends, begin.end())
        if nearest < len(ends) and ends[nearest] <= stop:
            end = ends[nearest]
        else:
            body = text[begin.end() : end_of(_BODY, text, begin.end(), stop)]
            end = begin.end() + len(body.rstrip(b" \t\r\n,\"'\\"))
        yield Span.at(begin.start(), end, "private-key")


def _first_key_line(text: bytes, end_line: int) -> int:
    """Return where the lines of a key begin that stand before its last line."""
    first = line = end_line
    while first > 0 and end_line - line < _KEY_BYTES // 4:
        line = text.rfind(b"\n", max(0, first - 160), max(0, first - 1)) + 1
        if not _KEY_LINE.fullmatch(text[line:first].strip()):
            break
        first = line
    return first
