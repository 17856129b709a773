"""Tracebacks, and marks of the rank that wrote a line, in logs that several ranks write to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

TRACEBACK = "Traceback (most recent call last)"
_LINES = 200
"""Lines of a traceback that are kept."""
_WINDOW = 1_000
"""Lines among which those of one traceback are looked for, where several ranks' are mixed."""
_CHAIN = 4
"""Lines within which one traceback says that it led to another one."""
_FRAME = 4
"""Lines of the place that stands above an exception: file, source, marks below it, and one more."""
_MARK = re.compile(
    r"(?:\[(?P<name>rank|default|trainer|worker)?(?P<number>\d+)\]:| *(?P<task>\d+):(?= |$)) ?"
)
"""Torch's ``[rank3]:``, torchrun's ``[default3]:`` and ``[3]:``, ``3:`` of ``srun --label``."""
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::\s*(?P<message>.*))?$")
_CHAINED = re.compile(
    r"^(?:During handling of the above|The above exception was the direct|-- Process \d+ term)"
)
_ORIGINAL = "Original Traceback"
"""The words after the message of an exception that came from another process."""
_FRAMED = " \t╰"
"""The first characters of the line above an exception; the last is drawn by ``rich``."""


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A line without its marks, and its rank as far as they tell."""

    text: str
    """The line without its marks."""
    rank: int | None
    """The rank, if a mark names it; torchrun's ``[default3]`` is the third of its node."""
    task: int | None
    """The task that ``srun --label`` names: a rank, unless each task is a torchrun."""
    marks: tuple[tuple[str, int], ...] = ()
    """The name and the number of each mark; lines of one process have the same."""


def marked(text: str) -> Marked:
    """Take the marks off a line."""
    rank: int | None = None
    task: int | None = None
    local = False
    marks: list[tuple[str, int]] = []
    for _ in range(3):
        mark = _MARK.match(text)
        if mark is None:
            break
        if mark["task"] is not None:
            task = int(mark["task"])
        elif mark["name"] in (None, "rank"):
            rank = int(mark["number"])
        else:
            local = True
        marks.append((mark["name"] or "", int(mark["number"] or mark["task"])))
        text = text[mark.end() :]
    return Marked(text=text, rank=rank, task=None if local else task, marks=tuple(marks))


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
    """Return the traceback that begins in a line.

    Args:
        lines: the lines of a log.
        start: the place of its first line.
        longest: characters of a line that count.
    """
    reader = _Reader()
    first = shown(lines[start], longest)
    reader.take(start, first[first.find(TRACEBACK) :])
    end = min(start + 1 + _WINDOW, len(lines))
    below = shown(lines[start + 1], longest) if start + 1 < end else ""
    mark = _mark_of_all(first, below)
    for place in range(start + 1, end):
        text = shown(lines[place], longest)
        if text.startswith(mark.rstrip()):
            reader.take(place, text[len(mark) :])
        if reader.ended:
            break
    return reader.trace(more=end == len(lines) and end < start + 1 + _WINDOW)


def _mark_of_all(first: str, below: str) -> str:
    """Return the mark that all lines of a traceback begin with; empty for none.

    Args:
        first: the line that begins the traceback.
        below: the line below it.
    """
    head = first[: first.find(TRACEBACK)]
    if not head.strip():
        return ""
    # What stands before the first line of a rank's traceback stands before all of them.
    of_rank = marked(first).text.startswith(TRACEBACK)
    return head if of_rank or below.startswith(head) else ""


def frame_above(lines: Sequence[bytes], at: int, longest: int) -> tuple[str, ...]:
    """Return an exception with the place above it: all that Python shows of an unreadable file.

    Returns:
        The lines from ``File "..."`` to the exception; none where no such place is shown.
    """
    frame = [marked(shown(lines[at], longest)).text]
    for line in reversed(lines[max(0, at - _FRAME) : at]):
        text = marked(shown(line, longest)).text
        if not text.startswith("  "):
            break
        frame.insert(0, text)
        if text.startswith('  File "'):
            return tuple(frame)
    return ()


class _Reader:
    """Takes lines until a traceback, and those that it led to, are at their end."""

    def __init__(self) -> None:
        self.ended = False
        self._at: list[int] = []
        self._texts: list[str] = []
        self._closing: list[int] = []
        self._inside = True
        self._chained = True  # the first line says "Traceback" as well

    def take(self, place: int, text: str) -> None:
        """Look at one more line."""
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

    def _look_for_exception(self) -> None:
        last = len(self._texts) - 1
        if _is_exception(self._texts, last):
            self._inside = False
            self._closing.append(last)

    def _look_for_another(self, text: str) -> None:
        """Look, below an exception, for a traceback that it led to."""
        if _CHAINED.match(text):
            self._inside = self._chained = True
            return
        below = len(self._texts) - 1 - self._closing[-1]
        self.ended = below >= _CHAIN

    def trace(self, *, more: bool) -> Trace:
        """Return what was taken; ``more`` is set where further lines may come."""
        end = self._closing[-1] + 1 if self._closing else len(self._texts)
        return Trace(
            at=tuple(self._at[:end]),
            texts=tuple(self._texts[:end]),
            closing=tuple(self._closing),
            open=more and not self.ended,
        )


def shown(line: bytes, longest: int) -> str:
    """Return a line as a terminal shows it: overwritten text is left out."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2][:longest].decode(errors="replace")
    return text.replace("\0", "")


def _is_exception(texts: Sequence[str], at: int) -> bool:
    """Return whether a line closes a traceback: the exception, which is not indented."""
    text = texts[at]
    if at == 0 or not text or text[0].isspace() or _CHAINED.match(text):
        return False
    above = texts[at - 1]
    return bool(_EXCEPTION.match(text)) and bool(above) and above[0] in _FRAMED
