"""Removal of secrets from a stream of bytes: lines keep their numbers, memory stays flat.

A text comes in pieces. What has been looked at goes out, but for the last part, which is looked at
again together with what follows: so no secret is missed because it was cut in two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from . import names, shapes
from .assignments import value_of
from .known_values import KnownValues
from .spans import Span, end_of, merged
from .values import looks_random
from .views import View, views

BLOCK = 1 << 18
"""Bytes that go out at a time."""
HELD = 1 << 16
"""Bytes that are looked at again with what follows; no secret of a few lines is longer."""
LONGEST = 1 << 22
"""Bytes that are kept at most; of a secret that is longer the rest is taken out as it comes."""
MAX_LEARNED_BYTES = 400
"""Bytes of a value that is learned: a longer one is not repeated by chance."""
MAX_LEARNED = 500
"""Values that are learned from texts at most."""
_WIDTHS = frozenset((79, 80, 88, 99, 100, 119, 120, 132, 159, 160, 199, 200))
"""Characters of a line at which programs begin a new one, whatever it says."""
_WIDEST = 1000
_REST = re.compile(rb"(?:\r?\n[A-Za-z0-9+/_.=-]{1,200}){1,2}")
_BREAKS = b" \t,;"
_WORD_BYTES = bytes(set(range(256)) - set(b" \t\r\n\"'"))


class Finder(Protocol):
    """Finds what is to be hidden besides secrets."""

    def spans(self, text: bytes) -> Iterator[Span]:
        """Find all of it, each with its pseudonym."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The part of a stream that goes out; the rest is read for what it means."""

    start: int = 0
    """Its first byte."""
    end: int | None = None
    """The byte after its last one; None for the end of the stream."""


class _Window:
    """The part of a stream that is looked at; it grows until it can be cut between two secrets."""

    def __init__(self) -> None:
        self.data = b""
        self.start = 0
        self.wanted = BLOCK + HELD
        self.in_secret = False

    def cut(self, length: int) -> None:
        self.data = self.data[length:]
        self.start += length
        self.wanted = BLOCK + HELD

    def cut_at(self, spans: list[Span]) -> int:
        """Return how many bytes can go out; 0 where the window has to grow first."""
        length = _cut(self.data, spans)
        if length:
            return length
        if len(self.data) < LONGEST:
            self.wanted = 2 * len(self.data)
            return 0
        self.in_secret = True
        return len(self.data)

    def skip_secret(self) -> None:
        """Let go of the rest of a secret that was too long to be kept."""
        if self.in_secret:
            self.cut(len(self.data) - len(self.data.lstrip(_WORD_BYTES)))
            self.in_secret = not self.data


class Redactor:
    """Takes secrets out of texts, and counts them.

    Attributes:
        counts: the number of secrets of each kind that were taken out.
        known: values that are looked for everywhere; it learns those that a name gave away.
        learned: the number of values it has learned: what went out before may have them.
    """

    def __init__(self, known: KnownValues | None = None, others: Finder | None = None) -> None:
        self.known = known or KnownValues()
        self.counts: Counter[str] = Counter()
        self.learned = 0
        self._others = others

    def text(self, data: bytes) -> bytes:
        """Return a whole text without its secrets."""
        return b"".join(self.stream([data]))

    def words(self, text: str) -> str:
        """Return a string without its secrets."""
        how = "surrogateescape"  # a name's bytes
        try:
            data = text.encode(errors=how)
        except UnicodeEncodeError:  # half of a character, as JSON may have it
            how = "surrogatepass"
            data = text.encode(errors=how)
        return self.text(data).decode(errors=how)

    def stream(self, pieces: Iterable[bytes], kept: Kept | None = None) -> Iterator[bytes]:
        """Yield the ``kept`` part of a text that comes in pieces, without its secrets."""
        kept = kept or Kept()
        window = _Window()
        for piece in _blocks(pieces):
            window.data += piece
            if len(window.data) < window.wanted:
                continue
            window.skip_secret()
            if window.in_secret:
                continue
            spans = self._look(window.data)
            length = window.cut_at(spans)
            if length:
                yield self._redacted(window.data[:length], spans, window.start, kept)
                window.cut(length)
        window.skip_secret()
        spans = self._look(window.data)
        yield self._redacted(window.data, spans, window.start, kept)

    def find(self, text: bytes) -> list[Span]:
        """Return all that must not stay in a text, in order."""
        spans: list[Span] = []
        for view in views(text):
            spans += [_mapped_back(text, view, span) for span in self._in_view(view.text)]
        return merged(spans)

    def _look(self, text: bytes) -> list[Span]:
        """Find secrets, and again if values were learned: they may be anywhere in the text."""
        spans = self.find(text)
        before = self.learned
        for span in spans:
            if span.learned and self.learned < MAX_LEARNED:
                self.learned += self.known.add(span.learned)
        return self.find(text) if self.learned > before else spans

    def _in_view(self, text: bytes) -> Iterator[Span]:
        yield from _named_values(text)
        yield from shapes.spans(text)
        for start, end in self.known.find(text):
            yield Span.at(start, end, "known-value")
        if self._others is not None:
            yield from self._others.spans(text)

    def _redacted(self, text: bytes, spans: list[Span], base: int, kept: Kept) -> bytes:
        """Return the ``kept`` bytes of a text at ``base`` in the stream, redacted."""
        stop = len(text) if kept.end is None else max(0, min(len(text), kept.end - base))
        at = max(0, kept.start - base)
        out: list[bytes] = []
        for span in spans:
            if span.end <= at or span.start >= stop:
                continue
            newlines = text.count(b"\n", max(at, span.start), min(span.end, stop))
            out.append(text[at : span.start])
            out.append(span.replacement(newlines))
            self.counts[span.kind] += 1
            at = span.end
        out.append(text[at:stop])
        return b"".join(out)


def _named_values(text: bytes) -> Iterator[Span]:
    end = 0
    for name in names.names(text):
        if name.start < end:  # a part of another one's value
            continue
        value = value_of(text, name)
        if value is not None:
            end = value.end
            yield Span(
                start=value.start,
                end=value.end,
                kind=name.meaning.kind,
                anchor=name.start,
                quote=value.quote,
                learned=_worth_learning(text[value.start : value.end]),
            )


def _worth_learning(value: bytes) -> bytes:
    return value if len(value) <= MAX_LEARNED_BYTES and looks_random(value) else b""


def _mapped_back(text: bytes, view: View, span: Span) -> Span:
    start, end = view.back(span.start, span.end)
    anchor, _ = view.back(span.anchor, span.anchor + 1)
    if not span.pseudonym:
        end = _unwrapped(text, end)
    return replace(span, start=start, end=end, anchor=min(start, anchor))


def _unwrapped(text: bytes, end: int) -> int:
    """Return where a secret ends that was broken at the end of its line to fit a width."""
    if text[end : end + 1] not in (b"\n", b"\r"):
        return end
    width = end - text.rfind(b"\n", max(0, end - _WIDEST), end) - 1
    return end_of(_REST, text, end) if width in _WIDTHS else end


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        for at in range(0, len(piece), BLOCK):
            yield piece[at : at + BLOCK]


def _cut(text: bytes, spans: list[Span]) -> int:
    """Return how much of a text can go out: up to the end of a line, and not within a secret."""
    target = _break(text, len(text) - HELD)
    for span in reversed(spans):
        if span.anchor < target < span.end:
            target = span.anchor
    return max(target, 0)


def _break(text: bytes, target: int) -> int:
    """Return the last end of a line before a place, else of a word, else the place itself."""
    line = text.rfind(b"\n", 0, target) + 1
    if line > target // 2:
        return line
    word = max(text.rfind(bytes([mark]), target // 2, target) + 1 for mark in _BREAKS)
    return word or target
