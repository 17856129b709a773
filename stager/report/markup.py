"""Markup that is safe by construction: text is escaped wherever it is put, markup is not.

What a job has left may hold anything, so no text reaches a page except through :func:`element`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TypeAlias

from ..core.printable import TURNING

_VOID = {"meta", "link", "br"}
_LONGEST = 600
"""Characters of a text that are shown; what ranks write may have no end."""
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: "\u2421"}
_SHOWN |= dict.fromkeys(
    (
        *range(0x80, 0xA0),  # a terminal's, as escape is
        *range(0xD800, 0xE000),  # halves of characters, which no file can hold
    ),
    "\ufffd",
)
_SHOWN |= {code: f"\\u{code:04x}" for code in TURNING}


class Html(str):
    """Markup. Any other string is text."""

    __slots__ = ()


Content: TypeAlias = "Html | str | Sequence[Content] | None"
Attribute = str | int | float | None


def escaped(text: str) -> Html:
    """Return a text as markup; characters that are invisible or change the display are shown."""
    return Html(html.escape(text.translate(_SHOWN), quote=True))


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Return a text, or its beginning where it is very long."""
    return text if len(text) <= longest else f"{text[:longest]}\N{HORIZONTAL ELLIPSIS}"


def element(name: str, /, *content: Content, **attributes: Attribute) -> Html:
    """Return an element.

    Args:
        name: its tag.
        *content: what is in it; None is nothing.
        **attributes: ``class_`` is ``class``, ``aria_label`` is ``aria-label``; None leaves one
            out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def joined(content: Content) -> Html:
    """Return pieces one after the other, each text among them escaped."""
    if content is None:
        return Html("")
    if isinstance(content, str):
        return content if isinstance(content, Html) else escaped(content)
    return Html("".join(joined(piece) for piece in content))
