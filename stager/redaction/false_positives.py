"""Values that are no secret whatever their name says, and words that look like a secret."""

from __future__ import annotations

import re

from bundle.redaction.secret_names import meaning

from .names import Name

LONG = 256
"""A value of more bytes is no placeholder and no number, and is not compared with any."""
_PLACEHOLDER = re.compile(
    rb"none|null|nil|true|false|yes|no|on|off|undefined|unset|missing|empty|default|required"
    rb"|\*+|\.{2,}|x{3,}|<[a-z _.-]*>|\[redacted[^\]]*\]?[\"']?|\$\{?[A-Z_][A-Z0-9_]*\}?|%\w+%"
    rb"|\{\{?[\w. ]*\}?\}|%\(?\w*\)?s|str|int|bytes|os\.(?:environ|getenv)\b.*|self\.[\w.]+"
    rb"|(?:args|kwargs|config|cfg|opts|options|settings)\b[\w.\[\]\"'()]*|getpass\b.*"
    rb"|oauth2?|basic|bearer|digest|munge|auth/\w+|kerberos|function|object|class|optional\[.*",
    re.I,
)
_NUMBER = re.compile(rb"[+-]?[0-9][0-9_,.]*(?:e[+-]?[0-9]+)?[ %a-z/]{0,12}", re.I)
_PIECE = re.compile(rb"\[[A-Z_]+\]|<[^<>]{0,20}>|[^\w]{1,4}|.{0,2}|[/~.].*", re.S)
"""What a token may be that is a piece of a text, or a path."""
_TURNS = re.compile(rb"[0-9](?=[A-Za-z])|[A-Za-z](?=[0-9])|[a-z](?=[A-Z])")
_HEX = re.compile(rb"[0-9a-f]{32,}|[0-9A-F]{32,}")


def looks_random(text: bytes) -> bool:
    """Whether a word looks as if no person had made it up; a bare digest does not count."""
    return (
        len(text) >= 16
        and len(_TURNS.findall(text[:256])) >= 4
        and not _HEX.fullmatch(text)
        and not text.startswith(b"/")
    )


def is_placeholder(raw: bytes) -> bool:
    """Whether a value stands for one: nothing, a variable, an expression, a word of a manual."""
    return len(raw) <= LONG and _PLACEHOLDER.fullmatch(raw) is not None


def is_digest(raw: bytes) -> bool:
    """Whether it is nothing but many hexadecimal digits."""
    return _HEX.fullmatch(raw) is not None


def is_of_text(text: bytes, name: Name, start: int, raw: bytes) -> bool:
    """Whether it looks like a token of a text, or words say so: ``unexpected token: else``."""
    if len(raw) > LONG:
        return False
    if _NUMBER.fullmatch(raw) or _PIECE.fullmatch(raw):
        return True
    if b"=" in text[name.end : start] or not raw.isalpha():
        return False
    said = text[max(0, name.start - 24) : name.start].split()
    before = said[-1] if said and text[name.start - 1 : name.start] == b" " else b""
    return before.isalpha() and meaning(before + b"_token") is None
