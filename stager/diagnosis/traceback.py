"""Tracebacks in logs that several ranks write to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..logs.prefixes import TRACEBACK, TracebackPrefix, parse_line, show_as_terminal

_LINES = 200
"""Lines of a traceback that are kept."""
_WINDOW = 1_000
"""Lines among which those of one traceback are looked for, where several ranks' are mixed."""
_CHAIN = 4
"""Lines within which one traceback says that it led to another one."""
_OTHERS = 25
"""Lines of other processes among which a traceback that another one led to is still looked for."""
_FRAME = 4
"""Lines of the place that stands above an exception: file, source, marks below it, and one more."""
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::\s*(?P<message>.*))?$")
_CHAINED = re.compile(
    r"^(?:During handling of the above|The above exception was the direct|-- Process \d+ term)"
)
_ORIGINAL = "Original Traceback"
"""The words after the message of an exception that came from another process."""
_FRAMED = " \t╰+"
"""The first characters of the line above an exception; ``rich`` draws the last two."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traceback, with those that led to it."""

    at: tuple[int, ...]
    """The places of its lines among those that were given."""
    texts: tuple[str, ...]
    """Its lines, without the mark before each of them."""
    closing: tuple[int, ...]
    """The indexes of its exceptions; empty where it breaks off."""
    open: bool
    """Whether lines that are not there yet may belong to it."""


def trace_at(lines: Sequence[bytes], start: int, longest: int) -> Trace:
    """Return the traceback that begins in a line."""
    reader = _Reader()
    end = min(start + 1 + _WINDOW, len(lines))
    below = shown(lines[start + 1], longest) if start + 1 < end else ""
    prefix = TracebackPrefix(shown(lines[start], longest), below)
    reader.take(start, prefix.first)
    for place in range(start + 1, end):
        text = prefix.strip(shown(lines[place], longest))
        if text is not None:
            reader.take(place, text)
        else:
            reader.skip(place)
        if reader.ended:
            break
    return reader.trace(more=end == len(lines) and end < start + 1 + _WINDOW)


def frame_above(lines: Sequence[bytes], at: int, longest: int) -> tuple[str, ...]:
    """Return an exception with the place above it: all that Python shows of an unreadable file.

    Returns:
        The lines from ``File "..."`` to the exception; none where no such place is shown.
    """
    frame = [parse_line(shown(lines[at], longest)).text]
    for line in reversed(lines[max(0, at - _FRAME) : at]):
        text = parse_line(shown(line, longest)).text
        if not text.startswith("  "):
            break
        frame.insert(0, text)
        if text.startswith('  File "'):
            return tuple(frame)
    return ()


class _Reader:
    def __init__(self) -> None:
        self.ended = False
        self._at: list[int] = []
        self._texts: list[str] = []
        self._closing: list[int] = []
        self._inside = True
        self._chained = True  # the first line says "Traceback" as well

    def take(self, place: int, text: str) -> None:
        if TRACEBACK in text:
            original = text.startswith(_ORIGINAL)
            # Another one, with nothing that connects it to this one, does not belong to it.
            self.ended = not self._chained and not original
            self._inside, self._chained = True, False
        if self.ended:
            return
        self._at.append(place)
        self._texts.append(text)
        if self._inside:
            self._look_for_exception()
        else:
            self._look_for_another(text)
        if len(self._texts) >= _LINES:
            self.ended = True

    def skip(self, place: int) -> None:
        """Skip a line of another process; many of them below an exception end the search."""
        self.ended = not self._inside and place - self._at[-1] > _OTHERS

    def _look_for_exception(self) -> None:
        last = len(self._texts) - 1
        if _is_exception(self._texts, last):
            self._inside = False
            self._closing.append(last)

    def _look_for_another(self, text: str) -> None:
        """Look below an exception for a traceback that is chained to it."""
        if _CHAINED.match(text):
            self._inside = self._chained = True
            return
        last = self._closing[-1]
        exception = _EXCEPTION.match(self._texts[last])
        if exception and exception["message"] == "" and text.strip():  # it begins on another line
            self._texts[last] = f"{exception['type']}: {text.strip()}"
        self.ended = len(self._texts) - 1 - last >= _CHAIN

    def trace(self, *, more: bool) -> Trace:
        """Return the traceback; ``more`` says that further lines may come."""
        end = self._closing[-1] + 1 if self._closing else len(self._texts)
        return Trace(
            at=tuple(self._at[:end]),
            texts=tuple(self._texts[:end]),
            closing=tuple(self._closing),
            open=more and not self.ended,
        )


def shown(line: bytes, longest: int) -> str:
    """Return a line as a terminal shows it: overwritten text is left out."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2][: 2 * longest].decode(errors="replace")
    return show_as_terminal(text)[:longest]


def _is_exception(texts: Sequence[str], at: int) -> bool:
    text = texts[at]
    if at == 0 or not text or text[0].isspace() or _CHAINED.match(text):
        return False
    above = texts[at - 1]
    if not above and texts[1:2] == [""]:  # loguru puts empty lines between frames
        above = next((line for line in reversed(texts[:at]) if line), "")
    return bool(_EXCEPTION.match(text)) and bool(above) and above[0] in _FRAMED
