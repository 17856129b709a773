"""The places in a text that must not stay as they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Span:
    """A place in a text that is to be replaced."""

    start: int
    """Its first byte."""
    end: int
    """The byte after its last one."""
    kind: str
    """The kind of secret or name, for the reader and for the count."""
    anchor: int
    """The start of what gave it away: the name before a value, or the span itself."""
    quote: bytes = b""
    """Quotes to put around the replacement."""
    pseudonym: bytes = b""
    """The replacement; empty for a secret, which becomes a word that tells its kind."""
    learned: bytes = b""
    """The value, where it is worth looking for elsewhere, too."""

    @classmethod
    def at(cls, start: int, end: int, kind: str, anchor: int | None = None) -> Span:
        """Return a secret at a place; without an anchor it gave itself away."""
        return cls(start=start, end=end, kind=kind, anchor=start if anchor is None else anchor)

    def replacement(self, newlines: int) -> bytes:
        """Return the text instead; ``newlines`` within the span stay: lines keep their numbers."""
        text = self.pseudonym or b"[redacted: " + self.kind.encode() + b"]"
        return self.quote + text + self.quote + b"\n" * newlines


def end_of(pattern: re.Pattern[bytes], text: bytes, start: int = 0, stop: int = sys.maxsize) -> int:
    """Return where the match of a pattern at a place ends; the place itself for no match."""
    match = pattern.match(text, start, stop)
    return match.end() if match else start


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order of place, with those that overlap made one."""
    done: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if done and span.start < done[-1].end:
            done[-1] = _union(done[-1], span)
        else:
            done.append(span)
    return done


def _union(first: Span, second: Span) -> Span:
    """Return one span that covers both; a secret goes before a pseudonym."""
    anchor = min(first.anchor, second.anchor)
    covers = first.end >= second.end
    prefers_second = bool(first.pseudonym) and not second.pseudonym
    if covers and not prefers_second:
        return replace(first, anchor=anchor)
    return replace(
        second if prefers_second else first,
        start=first.start,
        end=max(first.end, second.end),
        anchor=anchor,
        quote=first.quote if covers else b"",
    )
