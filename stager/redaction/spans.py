"""A place in a text that must not stay as it is, and many of them put in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Span:
    """A place in a text."""

    start: int
    """Where it begins."""
    end: int
    """Where it ends."""
    kind: str
    """What it is, for the reader and for the count."""
    anchor: int
    """Where that begins by which it was found: the name before a value, or the start itself."""
    quote: bytes = b""
    """What a text must be put in to stand here."""
    instead: bytes = b""
    """What stands here then; empty for a word that tells the kind."""
    learned: bytes = b""
    """The value, where it is worth to be looked for elsewhere, too."""

    @classmethod
    def at(cls, start: int, end: int, kind: str, anchor: int | None = None) -> Span:
        """A secret at a place; it was found by itself unless an anchor is given."""
        return cls(start=start, end=end, kind=kind, anchor=start if anchor is None else anchor)

    def text(self, newlines: int) -> bytes:
        """What stands here then.

        Args:
            newlines: how many ends of lines were here: those stay, so that lines keep numbers.
        """
        said = self.instead or b"[redacted: " + self.kind.encode() + b"]"
        return self.quote + said + self.quote + b"\n" * newlines


def in_order(spans: Iterable[Span]) -> list[Span]:
    """Spans by place; of some that overlap one that covers them all, a secret before a stand-in."""
    done: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        if not done or span.start >= done[-1].end:
            done.append(span)
            continue
        last = done[-1]
        if last.end >= span.end and not (last.instead and not span.instead):
            done[-1] = replace(last, anchor=min(last.anchor, span.anchor))
            continue
        kept = span if last.instead and not span.instead else last
        done[-1] = replace(
            kept,
            start=last.start,
            end=max(last.end, span.end),
            anchor=min(last.anchor, span.anchor),
            quote=last.quote if last.end >= span.end else b"",
        )
    return done
