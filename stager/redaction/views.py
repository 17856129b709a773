"""A text as it reads once colours, zero bytes and escapes are gone; places map back to the text."""

from __future__ import annotations

import bisect
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_LEVELS = 3
"""How often a text may be escaped: JSON within JSON within a shell's quotes."""
_ATOM = re.compile(
    rb"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[()][A-Z0-9])"
    rb"|\0|\xef\xbb\xbf|\xff\xfe|\xe2\x80[\x8b-\x8d]|\xc2[\xad\xa0]|[^\n]\x08"
    rb"|\\u00[0-7][0-9A-Fa-f]|\\u2028|\\x[0-7][0-9A-Fa-f]|\\[\"'\\/nrtb`]|\\[01][0-7]{2}"
    rb"|\\\r?\n[ \t]{0,80}|=\r?\n"
    rb"|%[0-7][0-9A-Fa-f]"
    rb"|&(?:quot|apos|amp|lt|gt|#(?:[0-9]{2,3}|x[0-9A-Fa-f]{2}));"
)
_LETTERS = {b"t": 9, b"b": 8}
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
"""Where none of these is, there is nothing to take away."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A text, read at one level."""

    text: bytes
    """As it reads."""
    under: View | None = None
    """The level that it was made from; None for the text itself."""
    starts: list[int] = field(default_factory=list)
    """Where each piece begins here."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """Where each piece begins below, and its length there."""

    def back(self, start: int, end: int) -> tuple[int, int]:
        """A place here as one in the text itself."""
        if self.under is None:
            return start, end
        first = self._below(start)
        last = self._below(end - 1, whole=True) if end > start else first
        return self.under.back(first, last)

    def _below(self, at: int, *, whole: bool = False) -> int:
        number = max(0, bisect.bisect_right(self.starts, at) - 1)
        begin, length = self.places[number]
        here = self.starts[number]
        size = self.starts[number + 1] - here if number + 1 < len(self.starts) else length
        if size == length:
            return begin + at - here + whole
        return begin + length if whole else begin


def views(text: bytes) -> Iterator[View]:
    """A text itself, and what it reads as, level by level, as long as that is something else."""
    view = View(text=text)
    yield view
    for _ in range(_LEVELS):
        if not any(mark in view.text for mark in _MARKS):
            return
        made = _read(view)
        if made is None:
            return
        yield made
        view = made


def _read(under: View) -> View | None:
    """One level further; None where nothing changes."""
    text, pieces = under.text, list[bytes]()
    starts, places = list[int](), list[tuple[int, int]]()
    done = size = 0
    for found in _ATOM.finditer(text):
        for piece, begin, length in (
            (text[done : found.start()], done, found.start() - done),
            (_meant(text, found), found.start(), len(found[0])),
        ):
            if piece:
                starts.append(size)
                places.append((begin, length))
                pieces.append(piece)
                size += len(piece)
        done = found.end()
    if not done:
        return None
    starts.append(size)
    places.append((done, len(text) - done))
    pieces.append(text[done:])
    return View(text=b"".join(pieces), under=under, starts=starts, places=places)


def _meant(text: bytes, found: re.Match[bytes]) -> bytes:
    """What an escape stands for; nothing for a colour."""
    atom, at = found[0], found.start()
    if atom == b"\0":  # half of a wide letter, or the end of a variable or an argument
        wide = text[at + 2 : at + 3] == b"\0" or text[max(0, at - 2) : at - 1] == b"\0"
        return b"" if wide else b"\n"
    if atom[-1:] == b"\x08" or atom == b"\xc2\xa0":  # struck out, or a blank
        return b" " if atom[0] == 0xC2 else b""
    if atom[:1] == b"&":
        return html.unescape(atom.decode("ascii")).encode()
    if atom[:1] not in b"\\%" or atom[1:2] in (b"\r", b"\n"):
        return b""
    number = 0x80
    if atom[:1] == b"%":
        number = int(atom[1:], 16)
    elif atom[1:2] in b"ux":
        number = int(atom[2:], 16)
    elif atom[1:2].isdigit():
        number = int(atom[1:], 8)
    elif atom[1:2] not in b"nr":
        number = _LETTERS.get(atom[1:2], atom[1])
    return bytes([number]) if number < 0x80 else b"\n"
