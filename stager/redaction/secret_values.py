"""Values that are secret: their names, their ends in a text, the known ones."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bundle.redaction.known_values import worth_hiding
from bundle.redaction.secrets import SPLIT, Meaning, meaning

# --- The places in a text that must not stay as they are -----------------------------------------


@dataclass(frozen=True, kw_only=True)
class Span:
    """A place in a text that is to be replaced."""

    start: int
    """Its first byte."""
    end: int
    """The byte after its last one."""
    kind: str
    """The kind of secret or name, for the reader and for the count."""
    anchor: int
    """The start of what gave it away: the name before a value, or the span itself."""
    quote: bytes = b""
    """Quotes to put around the replacement."""
    pseudonym: bytes = b""
    """The replacement; empty for a secret, which becomes a word that tells its kind."""
    learned: bytes = b""
    """The value, where it is worth looking for elsewhere, too."""

    @classmethod
    def at(cls, start: int, end: int, kind: str, anchor: int | None = None) -> Span:
        """Return a secret at a place; without an anchor it gave itself away."""
        return cls(start=start, end=end, kind=kind, anchor=start if anchor is None else anchor)

    def replacement(self, newlines: int) -> bytes:
        """Return the text instead; ``newlines`` within the span stay: lines keep their numbers."""
        text = self.pseudonym or b"[redacted: " + self.kind.encode() + b"]"
        return self.quote + text + self.quote + b"\n" * newlines


def end_of(pattern: re.Pattern[bytes], text: bytes, start: int = 0, stop: int = sys.maxsize) -> int:
    """Return where the match of a pattern at a place ends; the place itself for no match."""
    match = pattern.match(text, start, stop)
    return match.end() if match else start


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order of place, with those that overlap made one."""
    done: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if done and span.start < done[-1].end:
            done[-1] = _union(done[-1], span)
        else:
            done.append(span)
    return done


def _union(first: Span, second: Span) -> Span:
    """Return one span that covers both; a secret goes before a pseudonym."""
    anchor = min(first.anchor, second.anchor)
    covers = first.end >= second.end
    prefers_second = bool(first.pseudonym) and not second.pseudonym
    if covers and not prefers_second:
        return replace(first, anchor=anchor)
    return replace(
        second if prefers_second else first,
        start=first.start,
        end=max(first.end, second.end),
        anchor=anchor,
        quote=first.quote if covers else b"",
    )


# --- The names in a text that mean a secret, as :mod:`bundle.redaction.secrets` defines them -----

NEEDLES = (
    b"token", b"pass", b"secret", b"cred", b"key", b"auth", b"cookie", b"jwt", b"pwd", b"session",
    b"bearer", b"webhook", b"_pat", b"otp", b"sig", b"code", b"_pw", b"-pw", b"pw=", b"pw:",
    b"pw\"", b"pw'",
)  # fmt: skip
"""Every name that means a secret has one of these in it, in small letters."""
_REACH = 64
"""Bytes of a name on either side of a needle; anything longer is no name."""
_PART = re.compile(rb"[A-Za-z0-9_.-]*")
_REDACTED = b"[redacted: "
_WORD_BEFORE = re.compile(rb"\b([A-Za-z0-9]{2,16}) \Z")
_BEFORE_OPTION = b"- \t\n\r\"'`\0=,[("
"""The bytes that may stand before the last dash of an option."""


@dataclass(frozen=True, kw_only=True)
class Name:
    """A name in a text."""

    start: int
    """Its first byte, without dashes before it."""
    end: int
    """The byte after its last one."""
    meaning: Meaning
    """The kind of secret it means."""
    option: bool = False
    """True for an option of a command: ``--token``."""
    query: bool = False
    """True for a name in the query of a URL: ``?token=``."""


def names(text: bytes) -> Iterator[Name]:
    """Find the names in a text that mean a secret, in order."""
    end = 0
    for needle in _needles(text):
        if needle < end:
            continue
        start = needle - end_of(_PART, text[max(end, needle - _REACH) : needle][::-1])
        end = end_of(_PART, text, needle, needle + _REACH)
        if needle - start >= _REACH or end - needle >= _REACH:
            continue
        name = _name(text, start, end)
        if name is not None:
            yield name


def _needles(text: bytes) -> list[int]:
    lower = text.lower()
    places: list[int] = []
    for needle in NEEDLES:
        at = lower.find(needle)
        while at >= 0:
            places.append(at)
            at = lower.find(needle, at + len(needle))
    return sorted(places)


def _name(text: bytes, start: int, end: int) -> Name | None:
    if text.endswith(_REDACTED, 0, start):
        return None
    word = text[start:end].strip(b"-.")
    start = text.find(word, start, end) if word else start
    end = start + len(word)
    pair = _two_words(text, start, word)
    if pair is not None:
        return pair
    before = text[max(0, start - 1) : start]
    query = before in (b"?", b"&", b";") and text[end : end + 1] == b"="
    secret = meaning(word, query=query)
    if secret is None:
        return None
    option = before == b"-" and (start < 2 or text[start - 2] in _BEFORE_OPTION)
    return Name(start=start, end=end, meaning=secret, option=option, query=query)


def _two_words(text: bytes, start: int, word: bytes) -> Name | None:
    """Return a name of two words, ``API key`` or ``access token``."""
    if word.lower().decode() not in SPLIT:
        return None
    before = _WORD_BEFORE.search(text[max(0, start - 20) : start])
    if before is None:
        return None
    secret = meaning(before[1] + b"_" + word)
    if secret is None or not secret.sure:
        return None
    return Name(start=start - len(before[0]), end=start + len(word), meaning=secret)


# --- Values: where one ends (quoted text, a list, a word, the rest of a line), and which is no
# secret

# Each pattern is matched at one place, and repeats only what cannot be read in two ways, so that a
# line of any length takes time in proportion to it.


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
"""Quotes; for escaped ones :mod:`stager.redaction.redactor` has the text without the escapes."""
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


# --- Values that are known to be secret, wherever they appear: in pieces, and in other spellings

# A text and a value are compared by their letters and digits alone. So a value is found that has
# been wrapped, coloured, spaced out, printed a letter a line, or escaped; and a part of it that is
# long enough to matter is found, too.

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SIGNS = bytes(set(range(256)) - set(_LETTERS))
_IS_LETTER = re.compile(rb"[A-Za-z0-9]")
_ENCODED = re.compile(rb"[A-Za-z0-9+/_-]*=*")
_ENCODED_BYTES = 4096
"""Bytes around a find that may belong to the same base64 text."""
_GRAM = 8
"""Letters that are looked for; any part of a value of twice as many, less one, has such ones."""
_MIN_PART = 12
"""Letters of a part that is too long to be there by chance."""
_PIECE = 512
"""Letters that are looked for together; a longer value is taken to pieces."""
_MAX_LETTERS = 1 << 14
"""Letters of a value that are looked for at all."""


def worth_looking_for(value: bytes) -> bool:
    """Return whether a value can be looked for without finding half of the text."""
    return worth_hiding(value.decode("latin-1"))


@dataclass(frozen=True, kw_only=True)
class Form:
    """A spelling of a value, by its letters."""

    letters: bytes
    """All of them."""
    grams: tuple[int, ...]
    """The starts of the parts that are looked for."""
    encoded: bool = False
    """True for a part of a base64 text, which is a secret as a whole."""
    least: int = _MIN_PART
    """Letters in a row that count as a find."""
    lead: bytes = b""
    """Signs before the letters."""
    trail: bytes = b""
    """Signs behind the letters."""


class KnownValues:
    """Values to look for."""

    def __init__(self, values: Iterable[bytes] = ()) -> None:
        self.values: dict[bytes, None] = {}
        self._exact: list[bytes] = []
        self._forms: list[Form] = []
        for value in values:
            self.add(value)

    def add(self, value: bytes) -> bool:
        """Look for one more value, and return whether it is a new one."""
        bare = value.strip()
        if not worth_looking_for(bare) or bare in self.values:
            return False
        self.values[bare] = None
        if len(_letters(bare)) >= _MIN_PART:
            self._forms += _plain_forms(bare)
        else:
            self._exact.append(bare)
        self._forms += _base64_forms(bare)
        self._forms += _hexadecimal_forms(bare)
        return True

    def find(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Find the places of the values, and of telling parts of them."""
        for value in self._exact:
            at = text.find(value)
            while at >= 0:
                yield at, at + len(value)
                at = text.find(value, at + len(value))
        letters = _letters(text)
        places: Sequence[int] | None = None
        for form in self._forms:
            for start, end in _parts(letters, form):
                if places is None:
                    places = [match.start() for match in _IS_LETTER.finditer(text)]
                yield _widened(text, places[start], places[end - 1] + 1, form)


def _letters(text: bytes) -> bytes:
    return text.translate(None, _SIGNS)


def _plain_forms(value: bytes) -> list[Form]:
    letters = _letters(value)
    is_random = looks_random(value)
    starts = range(0, max(1, min(len(letters), _MAX_LETTERS) - _MIN_PART + 1), _PIECE)
    forms = [_plain_form(letters[start : start + _PIECE], is_random) for start in starts]
    forms[0] = replace(forms[0], lead=value[: len(value) - len(value.lstrip(_SIGNS))])
    forms[-1] = replace(forms[-1], trail=value[len(value.rstrip(_SIGNS)) :])
    return forms


def _plain_form(letters: bytes, is_random: bool) -> Form:
    """Return a form of some letters; of words that may be in any text all letters must be found."""
    starts = range(0, len(letters) - _GRAM + 1, _GRAM)
    first_places = {letters[start : start + _GRAM]: start for start in reversed(starts)}
    return Form(
        letters=letters,
        grams=tuple(first_places.values()),
        least=_MIN_PART if is_random else len(letters),
    )


def _base64_forms(value: bytes) -> Iterator[Form]:
    """Yield a value in base64, at each of the three places it may have in a longer text."""
    for shift in range(3):
        packed = base64.b64encode(bytes(shift) + value)[: 2 * _PIECE]
        # The first and the last letters also depend on what is around. The signs that the two
        # alphabets write in different ways are no letters.
        certain = packed[-(-shift * 8 // 6) : (shift + len(value)) * 8 // 6]
        yield from _encoded_form(_letters(certain), encoded=True)


def _hexadecimal_forms(value: bytes) -> Iterator[Form]:
    for digits in (value.hex(), value.hex().upper()):
        yield from _encoded_form(digits.encode(), encoded=False)


def _encoded_form(letters: bytes, *, encoded: bool) -> Iterator[Form]:
    """Yield the form of an encoded value, looked for by its middle; nothing for a short one."""
    if len(letters) >= _GRAM - 2:
        middle = max(0, (len(letters) - _GRAM) // 2)
        least = min(len(letters), 2 * _MIN_PART)
        yield Form(letters=letters, grams=(middle,), encoded=encoded, least=least)


def _parts(letters: bytes, form: Form) -> Iterator[tuple[int, int]]:
    """Find enough of a form: one of its grams, and what is the same around it."""
    for begin in form.grams:
        gram = form.letters[begin : begin + _GRAM]
        before = form.letters[:begin][::-1]
        behind = form.letters[begin + len(gram) :]
        at = letters.find(gram)
        while at >= 0:
            start, end = at, at + len(gram)
            if before[:1] == letters[at - 1 : at]:
                start -= _common_length(before, letters[max(0, at - len(before)) : at][::-1])
            if behind[:1] == letters[end : end + 1]:
                end += _common_length(behind, letters[end : end + len(behind)])
            if end - start >= form.least:
                yield start, end
                at = letters.find(gram, end)
            else:
                at = letters.find(gram, at + 1)


def _common_length(first: bytes, second: bytes) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _widened(text: bytes, start: int, end: int, form: Form) -> tuple[int, int]:
    """Return a find with what belongs to it: the signs of the value, or the rest of a base64."""
    if form.encoded:
        return _whole_encoded(text, start, end)
    if form.lead and text.endswith(form.lead, 0, start):
        start -= len(form.lead)
    if form.trail and text.startswith(form.trail, end):
        end += len(form.trail)
    return start, end


def _whole_encoded(text: bytes, start: int, end: int) -> tuple[int, int]:
    before = end_of(_ENCODED, text[max(0, start - _ENCODED_BYTES) : start][::-1])
    return start - before, end_of(_ENCODED, text, end, end + _ENCODED_BYTES)


def spellings(value: bytes) -> Iterator[bytes]:
    """Yield a value as it may be written: itself, and its long lines where it has several."""
    yield value
    lines = [line.strip() for line in value.splitlines()]
    if len(lines) > 1:
        for line in lines:
            if len(line) >= 2 * _MIN_PART:
                yield line
