"""Taking secrets out of a stream of bytes: lines keep their numbers, memory stays flat.

A text comes in pieces. What has been looked at goes out, but for the last part, which is looked at
again together with what follows: so no secret is missed because it was cut in two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from . import logins, names, pem, token_shapes
from .assignments import value_of
from .false_positives import looks_random
from .known_values import Known
from .spans import Span, in_order
from .views import views

BLOCK = 1 << 18
"""Bytes that go out at a time."""
HELD = 1 << 16
"""Bytes that are looked at again with what follows; no secret of a few lines is longer."""
LONGEST = 1 << 22
"""Bytes that are kept at most; what is longer and a secret still is taken out as it comes."""
LESSON = 400
"""Bytes of a value that is worth to be learned: what is longer is not repeated by chance."""
LEARNED = 500
"""Values that are learned from texts at most."""
_WIDTHS = frozenset((79, 80, 88, 99, 100, 119, 120, 132, 159, 160, 199, 200))
"""Characters of a line at which programs begin a new one, whatever they say."""
_WIDEST = 1000
_REST = re.compile(rb"(?:\r?\n[A-Za-z0-9+/_.=-]{1,200}){1,2}")
_BREAKS = b" \t,;"


class Finder(Protocol):
    """Finds what is to be hidden besides secrets."""

    def spans(self, text: bytes) -> Iterator[Span]:
        """All of it, each with its stand-in."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The part of a stream that goes out; the rest only tells what it means."""

    start: int = 0
    """Its first byte."""
    end: int | None = None
    """The byte after its last one; None for the end of the stream."""


class Redactor:
    """Takes secrets out of texts, and counts them.

    Attributes:
        counts: how many of each kind were taken out.
        known: values that are looked for wherever they are; it learns those that a name gave away.
        learned: whether it has learned any: what went out before may have them.
    """

    def __init__(self, known: Known | None = None, others: Finder | None = None) -> None:
        """Take values that are known, and what else is to be hidden."""
        self.known = known or Known()
        self.counts: Counter[str] = Counter()
        self.learned = 0
        self._others = others

    def text(self, data: bytes) -> bytes:
        """A whole text without its secrets."""
        return b"".join(self.stream([data]))

    def words(self, text: str) -> str:
        """The same for a text of letters."""
        how = "surrogateescape"  # a name's bytes
        try:
            data = text.encode(errors=how)
        except UnicodeEncodeError:  # half of a character, as JSON may have it
            how = "surrogatepass"
            data = text.encode(errors=how)
        return self.text(data).decode(errors=how)

    def stream(self, pieces: Iterable[bytes], kept: Kept | None = None) -> Iterator[bytes]:
        """A text that comes in pieces, without its secrets.

        Args:
            pieces: the text.
            kept: the part that is wanted; None for all of it.
        """
        kept = kept or Kept()
        held, base, wanted, inside = b"", 0, BLOCK + HELD, False
        source = _small(pieces)
        while True:
            piece = next(source, None)
            held += piece or b""
            if piece is not None and len(held) < wanted:
                continue
            if inside:  # of a secret that has no end
                rest = held.lstrip(_WORD_BYTES)
                held, base = rest, base + len(held) - len(rest)
                inside = not rest and piece is not None
                if inside:
                    continue
            spans = self._look(held)
            cut = len(held) if piece is None else _cut(held, spans)
            if piece is not None and not cut and len(held) < LONGEST:
                wanted = 2 * len(held)
                continue
            inside = piece is not None and not cut
            cut = cut or len(held)
            yield self._written(held[:cut], spans, base, kept)
            held, base, wanted = held[cut:], base + cut, BLOCK + HELD
            if piece is None:
                return

    def find(self, text: bytes) -> list[Span]:
        """All that must not stay in a text, in order."""
        found: list[Span] = []
        for view in views(text):
            for span in self._in_view(view.text):
                start, end = view.back(span.start, span.end)
                anchor = min(start, view.back(span.anchor, span.anchor + 1)[0])
                end = _unwrapped(text, end) if not span.instead else end
                found.append(replace(span, start=start, end=end, anchor=anchor))
        return in_order(found)

    def _look(self, text: bytes) -> list[Span]:
        spans = self.find(text)
        new = [span.learned for span in spans if span.learned]
        fresh = [value for value in new if self.learned < LEARNED and self._learn(value)]
        return self.find(text) if fresh else spans

    def _learn(self, value: bytes) -> bool:
        is_new = self.known.add(value)
        self.learned += is_new
        return is_new

    def _in_view(self, text: bytes) -> Iterator[Span]:
        done = 0
        for name in names.names(text):
            if name.start < done:  # a part of another one's value
                continue
            value = value_of(text, name)
            if value is None:
                continue
            done = value.end
            told = text[value.start : value.end]
            yield Span(
                start=value.start,
                end=value.end,
                kind=name.meaning.kind,
                anchor=name.start,
                quote=value.quote,
                learned=told if looks_random(told) and len(told) <= LESSON else b"",
            )
        yield from token_shapes.spans(text)
        yield from logins.spans(text)
        yield from pem.spans(text)
        for start, end in self.known.find(text):
            yield Span.at(start, end, "known-value")
        if self._others is not None:
            yield from self._others.spans(text)

    def _written(self, text: bytes, spans: list[Span], base: int, kept: Kept) -> bytes:
        """A part of the stream as it goes out."""
        out: list[bytes] = []
        stop = len(text) if kept.end is None else max(0, min(len(text), kept.end - base))
        at = max(0, kept.start - base)
        for span in spans:
            if span.end <= at or span.start >= stop:
                continue
            out.append(text[at : span.start])
            out.append(span.text(text.count(b"\n", max(at, span.start), min(span.end, stop))))
            self.counts[span.kind] += 1
            at = span.end
        out.append(text[at:stop])
        return b"".join(out)


def _unwrapped(text: bytes, end: int) -> int:
    """Where a secret ends that ends with its line: on the next one, if lines were made to fit."""
    if text[end : end + 1] not in (b"\n", b"\r"):
        return end
    width = end - text.rfind(b"\n", max(0, end - _WIDEST), end) - 1
    rest = _REST.match(text, end)
    return rest.end() if rest and width in _WIDTHS else end


def _small(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same pieces, none longer than a block."""
    for piece in pieces:
        for at in range(0, len(piece), BLOCK):
            yield piece[at : at + BLOCK]


_WORD_BYTES = bytes(set(range(256)) - set(b" \t\r\n\"'"))


def _cut(text: bytes, spans: list[Span]) -> int:
    """How much of a text can go out: up to the end of a line, and not within a secret."""
    target = len(text) - HELD
    line = text.rfind(b"\n", 0, target) + 1
    if line > target // 2:
        target = line
    else:
        target = (
            max(text.rfind(bytes([mark]), target // 2, target) + 1 for mark in _BREAKS) or target
        )
    for span in reversed(spans):
        if span.anchor < target < span.end:
            target = span.anchor
    return max(target, 0)
