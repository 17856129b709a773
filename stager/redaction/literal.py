"""The value that begins at a place: quoted, a list, a word, or the rest of a line.

Each pattern is matched at one place, and repeats only what cannot be read in two ways, so that a
line of any length takes time in proportion to it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from .false_positives import is_of_text, is_placeholder
from .names import Name


@dataclass(frozen=True, kw_only=True)
class Value:
    """Where the value of a name is."""

    start: int
    """Where it begins, without quotes."""
    end: int
    """Where it ends."""
    quote: bytes = b""
    """What a text must be put in where the value is a number or a list in JSON."""


QUOTES = rb"\\{0,7}(?:\"\"\"|'''|[\"'`])"
OPEN = re.compile(rb"(?:[bBrRuUfF]{1,2}(?=\\{0,7}[\"']))?(?P<quote>" + QUOTES + rb")")
_WORD = re.compile(
    rb"[^\s\"'<>,;&\\`]*(?:(?:\\(?![\"'nrt\n])|[,;&](?!\s|\Z|[\w.%\[\]-]{1,40}[=:]))"
    rb"[^\s\"'<>,;&\\`]*)*"
)
_NUMBER_OR_WORD = re.compile(rb"[^\s,\]}\"'\\]+")
_IN_QUERY = re.compile(rb"[^\s\"'<>&#\\]+")
_TO_END = re.compile(
    rb"[^\r\n\"'\\]*(?:(?:[\"'](?!\s{0,80}(?:[,\]})]|\Z|[\r\n]))|\\(?![\"'nr]))[^\r\n\"'\\]*)*"
)
_PLAIN = {
    b'"': re.compile(rb'[^"\\\n]*(?:\\[^\n][^"\\\n]*)*'),
    b"'": re.compile(rb"[^'\\\n]*(?:(?:\\[^\n]|'\"'\"'|'\\'')[^'\\\n]*)*"),
    b"`": re.compile(rb"[^`\n]*"),
}
"""The inside of quotes; a shell writes a quote within single ones in two ways."""
_GLUED = re.compile(rb"(?P<quote>[\"'])(?=[A-Za-z0-9_])|(?=[A-Za-z0-9_])")
_LINE = re.compile(rb"[^\n]*")
_CALL = re.compile(rb"(?:[A-Za-z_][\w.]{0,60}(?=\())?[\[{(]")
_TAG = re.compile(rb"(?:[!&][A-Za-z][\w/:-]{0,40}[ \t]{1,9}){1,3}")
"""What YAML may have before a value."""
_BRACKET = re.compile(rb"[\[\]{}()]")
_LISTED = 4096
"""Bytes of a list that are looked through for its end."""
_QUOTED = 1 << 16
"""Bytes of a quoted text in which escapes are understood."""

_SHELL_LINE = re.compile(
    rb"(?:\A|[\r\n])(?:\[\w{1,20}\]: ?)?[ \t>+$#]*(?:(?:export|set|declare -\w+|typeset -\w+) )?\Z"
)
_BEFORE = 120
_WHOLE = ("authorization", "cookie")
"""Kinds whose value may be several words: a scheme and a token, or pairs."""


def value_at(text: bytes, name: Name, at: int, op: bytes, close: bytes = b"") -> Value | None:
    """The value that begins here."""
    if tag := _TAG.match(text, at):
        at = tag.end()
    opened = OPEN.match(text, at)
    if opened is not None:
        start, quote = opened.end(), opened["quote"]
        return checked(text, name, Value(start=start, end=_end_of_all(text, start, quote)))
    quote = close if op.startswith(b":") else b""
    called = _CALL.match(text, at)
    if called is not None:
        value = _bracketed(text, name, at, called.end() - 1, quote)
        if value is not None or not name.meaning.sure:
            return value
    around = text[name.start - 1 : name.start] if not close and name.start else b""
    if around in (b'"', b"'") and (name.meaning.kind in _WHOLE or op.startswith(b":")):
        return checked(text, name, Value(start=at, end=_end_of(text, at, around)))
    if name.query:
        word = _IN_QUERY.match(text, at)
    elif close:
        word = _NUMBER_OR_WORD.match(text, at)
    else:
        word = (_TO_END if _takes_all(text, name, at, op) else _WORD).match(text, at)
    if word is None:
        return None
    return checked(text, name, Value(start=at, end=word.end(), quote=quote))


def _takes_all(text: bytes, name: Name, at: int, op: bytes) -> bool:
    """Whether an unquoted value goes on to the end of its line: a header's, or a passphrase."""
    if name.meaning.kind in _WHOLE:
        return True
    if name.meaning.kind not in ("password", "secret", "credential") or name.option:
        return False
    word = _WORD.match(text, at)
    if word is None or is_placeholder(word[0]):
        return False
    if op == b":":
        return True
    return bool(_SHELL_LINE.search(text[max(0, name.start - _BEFORE) : name.start]))


def checked(text: bytes, name: Name, value: Value) -> Value | None:
    """The value, unless it is a placeholder, an expression, or plainly something else."""
    whole = text[value.start : value.end]
    start = value.start + len(whole) - len(whole.lstrip())
    raw = whole.strip()
    if text[value.start - 1 : value.start] not in (b'"', b"'", b"`"):
        # Brackets that were open before the name.
        for _ in range(_DEEP):
            raw = (raw.removesuffix(b":") if raw.endswith(b"):") else raw).rstrip(b"\\")
            if raw[-1:] in _MATE and raw.count(raw[-1:]) > raw.count(_MATE[raw[-1:]]):
                raw = raw[:-1]
    if not raw or raw == text[name.start : name.end] or is_placeholder(raw):
        return None
    if not name.meaning.sure and is_of_text(text, name, value.start, raw):
        return None
    return Value(start=start, end=start + len(raw), quote=value.quote)


_DEEP = 4
_MATE = {b")": b"(", b"]": b"[", b"}": b"{"}


def _end_of_all(text: bytes, start: int, quote: bytes) -> int:
    """The same, with what a shell takes for more of the same word: ``"abc"'def'``."""
    end = _end_of(text, start, quote)
    for _ in range(_DEEP):
        glued = _GLUED.match(text, end + 1) if len(quote) == 1 and end < len(text) else None
        if glued is None or text[end : end + 1] != quote:
            break
        quote = glued["quote"] or quote
        if not glued["quote"]:
            word = _WORD.match(text, glued.end())
            return word.end() if word else end
        end = _end_of(text, glued.end(), quote)
    return end


def _end_of(text: bytes, start: int, quote: bytes) -> int:
    """Where a quoted text ends: at its quote, or at the end of the line where that is missing."""
    limit = min(len(text), start + _QUOTED)
    plain = _PLAIN.get(quote)
    if plain is not None:
        found = plain.match(text, start, limit)
        end = found.end() if found else start
        if end < limit or limit == len(text):
            return end
        end = text.find(quote, end)
        return end if end >= 0 else len(text)
    line = text.find(b"\n", start, limit)
    whole = len(quote) >= 3 and quote[-3:] in (b'"""', b"'''")
    stop = limit if whole or line < 0 else line
    closing = _closing(quote).search(text, start, stop)
    return closing.start() if closing is not None else limit if line < 0 else line


@functools.cache
def _closing(quote: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"(?<!\\)" + re.escape(quote))


def _bracketed(text: bytes, name: Name, at: int, bracket: int, quote: bytes) -> Value | None:
    """A list, a table or a call as a whole, where the name is sure to mean secrets."""
    if not name.meaning.sure or text.startswith(b"[redacted", at):
        return None
    depth = 0
    for found in _BRACKET.finditer(text, bracket, bracket + _LISTED):
        depth += 1 if found[0] in b"[{(" else -1
        if depth == 0:
            inner = text[bracket + 1 : found.start()].strip()
            plain = at < bracket and not re.search(rb"[\"']", inner)  # a call without a text
            if not inner or plain or is_placeholder(text[at : found.end()]):
                return None
            return Value(start=at, end=found.end(), quote=quote)
    line = _LINE.match(text, at)
    return Value(start=at, end=line.end() if line else len(text))
