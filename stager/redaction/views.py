"""A text as it reads once colours, zero bytes and escapes are gone; places map back to the text."""

from __future__ import annotations

import bisect
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_LEVELS = 6
"""The number of times a text may be escaped: JSON within JSON within a shell's quotes, and more."""
_ATOM = re.compile(
    rb"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[()][A-Z0-9])"
    rb"|\0|\xef\xbb\xbf|\xff\xfe|\xe2\x80[\x8b-\x8d]|\xc2[\xad\xa0]|[^\n]\x08"
    rb"|\\u00[0-7][0-9A-Fa-f]|\\u2028|\\x[0-7][0-9A-Fa-f]|\\[\"'\\/nrtb`]|\\[01][0-7]{2}"
    rb"|\\\r?\n[ \t]{0,80}|=\r?\n"
    rb"|%[0-7][0-9A-Fa-f]"
    rb"|&(?:quot|apos|amp|lt|gt|#(?:[0-9]{2,3}|x[0-9A-Fa-f]{2}));"
)
_ESCAPED_LETTERS = {b"t": b"\t", b"b": b"\b", b"n": b"\n", b"r": b"\n"}
_NO_BREAK_SPACE = b"\xc2\xa0"
_ASCII = 0x80
_MARKS = (
    b"\\",
    b"%",
    b"\x1b",
    b"\0",
    b"&",
    b"\x08",
    b"=\n",
    b"=\r\n",
    b"\xe2\x80",
    b"\xc2\xad",
    b"\xc2\xa0",
)
"""A text with none of these reads as it stands."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A text, read at one level."""

    text: bytes
    """The text as it reads."""
    under: View | None = None
    """The level that it was made from; None for the text itself."""
    starts: list[int] = field(default_factory=list)
    """The start of each piece, here."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """The start of each piece in the level below, and its length there."""

    def back(self, start: int, end: int) -> tuple[int, int]:
        """Return a place here as one in the text itself."""
        if self.under is None:
            return start, end
        first = self._below(start)
        last = self._below(end - 1, whole=True) if end > start else first
        return self.under.back(first, last)

    def _below(self, at: int, *, whole: bool = False) -> int:
        """Return a byte's place in the level below; with ``whole`` the place after it."""
        number = max(0, bisect.bisect_right(self.starts, at) - 1)
        below, length = self.places[number]
        here = self.starts[number]
        is_last = number + 1 == len(self.starts)
        unchanged = is_last or self.starts[number + 1] - here == length
        if unchanged:
            return below + at - here + whole
        return below + length if whole else below


def views(text: bytes) -> Iterator[View]:
    """Yield a text itself, then what it reads as, level by level, as long as that differs."""
    view = View(text=text)
    yield view
    for _ in range(_LEVELS):
        read = _read(view)
        if read is None:
            return
        yield read
        view = read


def _read(under: View) -> View | None:
    """Return the next level; None where nothing changes."""
    text = under.text
    if not any(mark in text for mark in _MARKS):
        return None
    read = bytearray()
    starts: list[int] = []
    places: list[tuple[int, int]] = []

    def add(piece: bytes, place: int, length: int) -> None:
        starts.append(len(read))
        places.append((place, length))
        read.extend(piece)

    done = 0
    for match in _ATOM.finditer(text):
        start = match.start()
        if start > done:
            add(text[done:start], done, start - done)
        meant = _meant(text, match)
        if meant:
            add(meant, start, len(match[0]))
        done = match.end()
    if not done:
        return None
    add(text[done:], done, len(text) - done)
    return View(text=bytes(read), under=under, starts=starts, places=places)


def _meant(text: bytes, match: re.Match[bytes]) -> bytes:
    """Return what an escape stands for; nothing for a colour."""
    atom = match[0]
    if atom == b"\0":
        return _zero_byte(text, match.start())
    if atom == _NO_BREAK_SPACE:
        return b" "
    if atom.endswith(b"\x08"):  # struck out
        return b""
    if atom.startswith(b"&"):
        return html.unescape(atom.decode("ascii")).encode()
    if atom.startswith(b"%"):
        return bytes([int(atom[1:], 16)])
    return _escaped(atom[1:]) if atom.startswith(b"\\") else b""


def _zero_byte(text: bytes, at: int) -> bytes:
    """Return nothing for half of a wide letter, a line's end after a variable or an argument."""
    is_wide = text[at + 2 : at + 3] == b"\0" or text[max(0, at - 2) : at - 1] == b"\0"
    return b"" if is_wide else b"\n"


def _escaped(body: bytes) -> bytes:
    first = body[:1]
    if first in (b"\r", b"\n"):
        return b""
    if not (first in b"ux" or first.isdigit()):
        return _ESCAPED_LETTERS.get(first, first)
    code = int(body, 8) if first.isdigit() else int(body[1:], 16)
    return bytes([code]) if code < _ASCII else b"\n"
