"""Making foreign text safe to print: a log, a wheel, a bundle or an index may hold anything.

What would make a terminal or a reader's eye do more than read (set a title or the clipboard, clear
the screen, turn the text around) is written out as an escape, in a pipe as on a terminal: what is
piped is often looked at in the end. Files keep every byte.
"""

from __future__ import annotations

import json
import re

from bundle.protocol.codec import encode

_COLOUR = re.compile(r"(?:\x1b\[|\x9b)[0-9;:]*m")
TURNING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of the text around them (Unicode's ``Bidi_Control``)."""
_TURNING = "".join(map(chr, TURNING))
_UNSEEN = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_TURNING}\u2028\u2029\ud800-\udfff]")
"""Control characters but for tabs and line feeds; those of Unicode that end a line or turn it."""


def visible(text: str) -> str:
    r"""Return a text without colours, with other invisible characters written as ``\x1b``.

    A carriage return at its end, as files from elsewhere have it, goes without a word.
    """
    text = text.removesuffix("\r")
    if _UNSEEN.search(text) is None:
        return text
    return _UNSEEN.sub(_escape, _COLOUR.sub("", text))


def overwritten(line: str) -> str:
    """Return what a terminal shows of a line in the end: a progress bar is its last state."""
    return line.removesuffix("\r").rpartition("\r")[2]


def in_one_line(text: str) -> str:
    r"""Return a text like :func:`visible`, with line feeds, too, as ``\n``: for names of files."""
    return visible(text).replace("\n", r"\n")


def json_object(result: object) -> str:
    """Return a command's result as JSON for scripts; its escapes keep a terminal safe."""
    text = json.dumps({"schema": 1, **encode(result)}, indent=2, ensure_ascii=True)
    return text.replace("\x7f", "\\u007f") + "\n"


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
