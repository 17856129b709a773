"""Values: where one ends (quoted text, a list, a word, the rest of a line), and which is no secret.

Each pattern is matched at one place, and repeats only what cannot be read in two ways, so that a
line of any length takes time in proportion to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bundle.redaction.secrets import meaning

from .names import Name
from .spans import end_of


@dataclass(frozen=True, kw_only=True)
class Value:
    """The place of the value of a name."""

    start: int
    """Its first byte, without quotes."""
    end: int
    """The byte after its last one."""
    quote: bytes = b""
    """Quotes that a replacement needs where the value is a number or a list in JSON."""


QUOTES = rb"(?:\"\"\"|'''|[\"'`])"
"""Quotes; for escaped ones :mod:`stager.redaction.views` has the text without the escapes."""
OPEN = re.compile(rb"(?:[bBrRuUfF]{1,2}(?=[\"']))?(?P<quote>" + QUOTES + rb")")
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
"""The tags that YAML may have before a value."""
_BRACKET = re.compile(rb"[\[\]{}()]")
_LIST_BYTES = 4096
"""Bytes of a list that are looked through for its end."""
_QUOTED_BYTES = 1 << 16
"""Bytes of a quoted text in which escapes are understood."""

_SHELL_LINE = re.compile(
    rb"(?:\A|[\r\n])(?:\[\w{1,20}\]: ?)?[ \t>+$#]*(?:(?:export|set|declare -\w+|typeset -\w+) )?\Z"
)
_BEFORE = 120
_SEVERAL_WORDS = ("authorization", "cookie")
"""Kinds whose value may be several words: a scheme and a token, or pairs."""
_PASSPHRASES = ("password", "secret", "credential")
"""Kinds whose value may be several words where nothing else follows on the line."""
_MARKS = (b'"', b"'", b"`")
_MAX_NESTED = 4
_OPENING = {b")": b"(", b"]": b"[", b"}": b"{"}

LONG = 256
"""A value of more bytes is no placeholder and no number, and is not compared with any."""
_RANDOM_BYTES = 16
_RANDOM_TURNS = 4
_PLACEHOLDER = re.compile(
    rb"none|null|nil|true|false|yes|no|on|off|undefined|unset|missing|empty|default|required"
    rb"|\*+|\.{2,}|x{3,}|<[a-z _.-]*>|\[redacted[^\]]*\]?[\"']?|\$\{?[A-Z_][A-Z0-9_]*\}?|%\w+%"
    rb"|\{\{?[\w. ]*\}?\}|%\(?\w*\)?s|str|int|bytes|os\.(?:environ|getenv)\b.*|self\.[\w.]+"
    rb"|(?:args|kwargs|config|cfg|opts|options|settings)\b[\w.\[\]\"'()]*|getpass\b.*"
    rb"|oauth2?|basic|bearer|digest|munge|auth/\w+|kerberos|function|object|class|optional\[.*",
    re.I,
)
_NUMBER = re.compile(rb"[+-]?[0-9][0-9_,.]*(?:e[+-]?[0-9]+)?[ %a-z/]{0,12}", re.I)
_PIECE_OF_TEXT = re.compile(rb"\[[A-Z_]+\]|<[^<>]{0,20}>|[^\w]{1,4}|.{0,2}|[/~.].*", re.S)
"""A token that is a piece of a text, or a path."""
_TURNS = re.compile(rb"[0-9](?=[A-Za-z])|[A-Za-z](?=[0-9])|[a-z](?=[A-Z])")
_HEX = re.compile(rb"[0-9a-f]{32,}|[0-9A-F]{32,}")


def value_at(text: bytes, name: Name, at: int, op: bytes, close: bytes = b"") -> Value | None:
    """Return the secret at ``at``, or None; ``op`` precedes it, ``close`` closed the name."""
    at = end_of(_TAG, text, at)
    opened = OPEN.match(text, at)
    if opened is not None:
        end = _end_of_quoted_words(text, opened.end(), opened["quote"])
        return checked(text, name, Value(start=opened.end(), end=end))
    quote = close if op.startswith(b":") else b""
    called = _CALL.match(text, at)
    if called is not None:
        value = _bracketed(text, name, at, called.end() - 1, quote)
        if value is not None or not name.meaning.sure:
            return value
    around = b"" if close else _quote_before(text, name)
    if around and (name.meaning.kind in _SEVERAL_WORDS or op.startswith(b":")):
        return checked(text, name, Value(start=at, end=_end_of_quoted(text, at, around)))
    end = end_of(_word_pattern(text, name, at, op, close), text, at)
    return checked(text, name, Value(start=at, end=end, quote=quote))


def _quote_before(text: bytes, name: Name) -> bytes:
    before = text[max(0, name.start - 1) : name.start]
    return before if before in (b'"', b"'") else b""


def _word_pattern(text: bytes, name: Name, at: int, op: bytes, close: bytes) -> re.Pattern[bytes]:
    if name.query:
        return _IN_QUERY
    if close:
        return _NUMBER_OR_WORD
    return _TO_END if _takes_line(text, name, at, op) else _WORD


def _takes_line(text: bytes, name: Name, at: int, op: bytes) -> bool:
    """Return whether an unquoted value goes on to the end of its line: a header, a passphrase."""
    if name.meaning.kind in _SEVERAL_WORDS:
        return True
    if name.meaning.kind not in _PASSPHRASES or name.option:
        return False
    if is_placeholder(text[at : end_of(_WORD, text, at)]):
        return False
    if op == b":":
        return True
    return bool(_SHELL_LINE.search(text[max(0, name.start - _BEFORE) : name.start]))


def checked(text: bytes, name: Name, value: Value) -> Value | None:
    """Return the value, but None for a placeholder, an expression, or a piece of a text."""
    whole = text[value.start : value.end]
    start = value.start + len(whole) - len(whole.lstrip())
    raw = whole.strip()
    if text[value.start - 1 : value.start] not in _MARKS:
        raw = _without_outer_brackets(raw)
    if not raw or raw == text[name.start : name.end] or is_placeholder(raw):
        return None
    if not name.meaning.sure and is_of_text(text, name, value.start, raw):
        return None
    return Value(start=start, end=start + len(raw), quote=value.quote)


def _without_outer_brackets(raw: bytes) -> bytes:
    """Return a value without closing brackets that were opened before its name."""
    for _ in range(_MAX_NESTED):
        if raw.endswith(b"):"):
            raw = raw.removesuffix(b":")
        raw = raw.rstrip(b"\\")
        last = raw[-1:]
        if last in _OPENING and raw.count(last) > raw.count(_OPENING[last]):
            raw = raw[:-1]
    return raw


def _end_of_quoted_words(text: bytes, start: int, quote: bytes) -> int:
    """Return where a quoted value ends, with what a shell adds to it: ``"abc"'def'``."""
    end = _end_of_quoted(text, start, quote)
    for _ in range(_MAX_NESTED):
        if len(quote) != 1 or text[end : end + 1] != quote:
            return end
        glued = _GLUED.match(text, end + 1)
        if glued is None:
            return end
        quote = glued["quote"] or quote
        if not glued["quote"]:
            return end_of(_WORD, text, glued.end())
        end = _end_of_quoted(text, glued.end(), quote)
    return end


def _end_of_quoted(text: bytes, start: int, quote: bytes) -> int:
    """Return where a quoted text ends: at its quote; with its line where the quote is missing."""
    limit = min(len(text), start + _QUOTED_BYTES)
    plain = _PLAIN.get(quote)
    if plain is None:  # three quotes, around any number of lines
        closing = text.find(quote, start, limit)
        return closing if closing >= 0 else end_of(_LINE, text, start, limit)
    end = end_of(plain, text, start, limit)
    if end < limit or limit == len(text):
        return end
    end = text.find(quote, end)
    return end if end >= 0 else len(text)


def _bracketed(text: bytes, name: Name, at: int, bracket: int, quote: bytes) -> Value | None:
    """Return a list, a table or a call as a whole, where the name is sure to mean secrets."""
    if not name.meaning.sure or text.startswith(b"[redacted", at):
        return None
    end = _closing_bracket(text, bracket)
    if end is None:
        return Value(start=at, end=end_of(_LINE, text, at))
    inner = text[bracket + 1 : end - 1].strip()
    call_without_text = at < bracket and not re.search(rb"[\"']", inner)
    if not inner or call_without_text or is_placeholder(text[at:end]):
        return None
    return Value(start=at, end=end, quote=quote)


def _closing_bracket(text: bytes, bracket: int) -> int | None:
    depth = 0
    for match in _BRACKET.finditer(text, bracket, bracket + _LIST_BYTES):
        depth += 1 if match[0] in b"[{(" else -1
        if depth == 0:
            return match.end()
    return None


def looks_random(text: bytes) -> bool:
    """Return whether a word looks generated by a program; a bare digest does not count."""
    if len(text) < _RANDOM_BYTES or text.startswith(b"/"):
        return False
    return len(_TURNS.findall(text[:LONG])) >= _RANDOM_TURNS and not is_digest(text)


def is_placeholder(raw: bytes) -> bool:
    """Return whether a value is empty, a variable, an expression, or a word of a manual."""
    return len(raw) <= LONG and _PLACEHOLDER.fullmatch(raw) is not None


def is_digest(raw: bytes) -> bool:
    """Return whether a value is nothing but many hexadecimal digits."""
    return _HEX.fullmatch(raw) is not None


def is_of_text(text: bytes, name: Name, start: int, raw: bytes) -> bool:
    """Return whether a value is a token of a text, as in ``unexpected token: else``."""
    if len(raw) > LONG:
        return False
    if _NUMBER.fullmatch(raw) or _PIECE_OF_TEXT.fullmatch(raw):
        return True
    if b"=" in text[name.end : start] or not raw.isalpha():
        return False
    before = _word_before(text, name)
    return before.isalpha() and meaning(before + b"_token") is None


def _word_before(text: bytes, name: Name) -> bytes:
    if text[name.start - 1 : name.start] != b" ":
        return b""
    words = text[max(0, name.start - 24) : name.start].split()
    return words[-1] if words else b""
