"""Find secrets in a text, by a name, a command or a URL; mask them in arguments."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..regex import compile_lazily
from .secret_names import HINT, SPLIT, Meaning, is_secret, judge_secret_name

HIDDEN = "***"  # the replacement of a secret in arguments, events and messages


class Span(NamedTuple):
    """A place in a text that is to be replaced."""

    start: int  # its first byte
    end: int  # the byte after its last one
    kind: str  # the kind of secret or name, for the reader and for the count
    anchor: int  # the start of what gave it away: the name before a value, or the span itself
    quote: bytes = b""  # quotes to put around the replacement: of a number or a list in JSON
    pseudonym: bytes = b""  # the replacement; empty for a secret


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order of place; of those that overlap one, a secret before a name."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        last = merged[-1] if merged else None
        if last is None or span.start >= last.end:
            merged.append(span)
            continue
        base = span if last.pseudonym and not span.pseudonym else last
        merged[-1] = base._replace(
            start=last.start,
            end=max(last.end, span.end),
            anchor=min(last.anchor, span.anchor),
            quote=last.quote if last.end >= span.end else b"",
        )
    return merged


def find_match_end(
    pattern: re.Pattern[bytes], text: bytes, start: int = 0, stop: int = sys.maxsize
) -> int:
    """Return where the match of a pattern at a place ends; the place itself for no match."""
    match = pattern.match(text, start, stop)
    return match.end() if match else start


def find_all(text: bytes, part: bytes) -> Iterator[int]:
    """Yield the places of a part, which do not overlap."""
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + len(part))


# --- The names in a text that mean a secret ------------------------------------------------------

_NEEDLES = (
    b"token", b"pass", b"secret", b"cred", b"key", b"auth", b"cookie", b"jwt", b"pwd", b"session",
    b"bearer", b"webhook", b"_pat", b"otp", b"sig", b"code", b"_pw", b"-pw", b"pw=", b"pw:",
    b"pw\"", b"pw'", b"pw\\", b"wort",
)  # fmt: skip
"""Every name that means a secret has one of these in it, in small letters."""
_REACH = 64  # bytes of a name on either side of a needle; anything longer is no name
_PART = compile_lazily(rb"[A-Za-z0-9_.-]*")
_WORD_BEFORE = compile_lazily(rb"\b([A-Za-z0-9]{2,16}) \Z")
_BEFORE_OPTION = b"- \t\n\r\"'`\0=,[("  # the bytes that may stand before the last dash of an option


class _Name(NamedTuple):
    """A name in a text, without dashes before it."""

    start: int
    end: int
    meaning: Meaning
    is_option: bool = False  # true for an option of a command: ``--token``
    in_query: bool = False  # true for a name in the query of a URL: ``?token=``
    in_argument: bool = False  # true if the text is one argument, whose blanks are a part of it


def _find_names(text: bytes, in_argument: bool) -> Iterator[_Name]:
    end = 0
    lower = text.lower()
    places = [find_all(lower, part) for part in _NEEDLES if part in lower]
    for needle in sorted(itertools.chain.from_iterable(places)):
        if needle < end:
            continue
        start = needle - find_match_end(_PART, text[max(end, needle - _REACH) : needle][::-1])
        end = find_match_end(_PART, text, needle, needle + _REACH)
        if needle - start < _REACH and end - needle < _REACH:
            name = _judge_name(text, start, end, in_argument)
            if name is not None:
                yield name


def _judge_name(text: bytes, start: int, end: int, in_argument: bool) -> _Name | None:
    if text.endswith(b"[redacted: ", 0, start):
        return None
    start += len(text[start:end]) - len(text[start:end].lstrip(b"-."))
    word = text[start:end].rstrip(b"-.")
    end = start + len(word)
    pair = _judge_two_words(text, start, word)
    if pair is not None:
        return pair
    before, behind = text[max(0, start - 1) : start], text[end : end + 1]
    in_query = before in (b"?", b"&", b";") and behind == b"="
    secret = judge_secret_name(word, query=in_query)
    if in_argument and is_secret(word.decode()):
        # ``nvcr.io/key:24.01`` is no secret in an argument, either.
        unknown = None if behind == b":" else Meaning("secret")
        secret = secret._replace(sure=True) if secret else unknown
    if secret is None:
        return None
    is_option = before == b"-" and text[max(0, start - 2) : start - 1] in _BEFORE_OPTION
    return _Name(start, end, secret, is_option, in_query, in_argument)


def _judge_two_words(text: bytes, start: int, word: bytes) -> _Name | None:
    """Return a name of two words, ``API key`` or ``access token``."""
    is_second = word.lower().decode() in SPLIT
    first = _WORD_BEFORE.search(text[max(0, start - 20) : start]) if is_second else None
    meaning = judge_secret_name(first[1] + b"_" + word) if first else None
    if first is None or meaning is None or not meaning.sure:
        return None
    return _Name(start - len(first[0]), start + len(word), meaning)


# --- Where a value ends: quoted text, a list, a word, the rest of a line; and which is no secret

# Each pattern is matched at one place, and repeats only what cannot be read in two ways, so that a
# line of any length takes time in proportion to it.

_QUOTES = rb"(?:\"\"\"|'''|\\{0,127}[\"'`])"  # with what escapes them: JSON within JSON in a shell
_OPEN = compile_lazily(rb"(?:(?:[bBrRuUfF]{1,2}|\$)(?=\\*[\"']))?(?P<quote>" + _QUOTES + rb")")
"""What opens a quoted text, also in Python (``b"``) and in bash, which prints ``$'`` itself."""
_QUOTE_BEFORE = compile_lazily(rb"\\{0,63}[\"']\Z")
_CLOSING = {mark: compile_lazily(rb"(?<!\\)\\*" + mark.encode()) for mark in ('"', "'", "`")}
_LINE = compile_lazily(rb"[^\n]*")
_ASSIGNMENT = rb"[\w.%\[\]-]{1,40}[=:]"
_WORD = compile_lazily(
    rb"[^\s\"'<>,;&\\`\0]*(?:(?:\\(?![\"'nrt\n])|[,;&](?!\s|\Z|" + _ASSIGNMENT + rb"))"
    rb"[^\s\"'<>,;&\\`\0]*)*"
)
_ARGUMENT = compile_lazily(rb"(?:[,;&](?![A-Za-z_][\w.-]*=)|[^,;&])*")
"""The rest of an argument, up to the next assignment in it."""
_NUMBER_OR_WORD = compile_lazily(rb"[^\s,\]}\"'\\]+")
_IN_QUERY = compile_lazily(rb"[^\s\"'<>&#\\]+")
_TO_END = compile_lazily(
    rb"[^\r\n\"'\\]*(?:(?:[\"'](?!\s{0,80}(?:[,\]})]|\Z|[\r\n]))|\\(?![\"'nr]))[^\r\n\"'\\]*)*"
)
_GLUED = compile_lazily(rb"(?P<quote>[\"'])(?=[\w'\"])|(?=\w)")
"""What a shell adds to a quoted text: ``"abc"'def'``; a quote itself is ``'"'"'``."""
_CALL = compile_lazily(rb"(?:[A-Za-z_][\w.]{0,60}(?=\())?[\[{(]")
_TAG = compile_lazily(
    rb"(?:[!&][A-Za-z][\w/:-]{0,40}[ \t]{1,9}){1,3}"
)  # tags of YAML before a value
_BRACKET = compile_lazily(rb"(?P<open>\\*[\"'])[^\n]*?(?<!\\)(?P=open)|[\[\]{}()]")
"""A bracket of a list or a table, or a quoted text, whose brackets do not count."""
_LIST_BYTES = 4096  # bytes of a list that are looked through for its end
_QUOTED_BYTES = 1 << 16  # bytes of a quoted text in which escapes are understood
_FURTHER_LINES = {
    quote: compile_lazily(rb"(?:\n[^\n%s]{0,400}){1,16}(?=%s[ \t]*(?:[\r\n]|\Z))" % (quote, quote))
    for quote in (b'"', b"'")
}
"""The rest of a value that a shell prints on several lines, as ``export -p`` does."""
_MAX_GLUED = 16
_MAX_NESTED = 4
_OPENING = {b")": b"(", b"]": b"[", b"}": b"{"}

_SHELL_LINE = compile_lazily(
    rb"(?:\A|[\r\n])(?:\[\w{1,20}\]: ?)?[ \t>+$#]*(?:(?:export|set|declare -\w+|typeset -\w+) )?\Z"
)
_BEFORE = 120
_SEVERAL_WORDS = ("authorization", "cookie")  # their value: a scheme and a token, or pairs
_PASSPHRASES = ("password", "secret", "credential")  # their value may fill the line

LONG = 256  # a value of more bytes is no placeholder and no number, and is not compared with any
_PLACEHOLDER = compile_lazily(
    rb"none|null|nil|true|false|yes|no|on|off|undefined|unset|missing|empty|default|required"
    rb"|\*+|\.{2,}|x{3,}|<[a-z _.-]*>|\[redacted[^\]]*\]?[\"']?|\$\{?[A-Z_][A-Z0-9_]*\}?|%\w+%"
    rb"|\{\{?[\w. ]*\}?\}|%\(?\w*\)?s|str|int|bytes|os\.(?:environ|getenv)\b.*|self\.[\w.]+"
    rb"|(?:args|kwargs|config|cfg|opts|options|settings)\b[\w.\[\]\"'()]*|getpass\b.*"
    rb"|oauth2?|basic|bearer|digest|munge|auth/\w+|kerberos|function|object|class|optional\[.*",
    re.I,
)
_NUMBER = compile_lazily(rb"[+-]?[0-9][0-9_,.]*(?:e[+-]?[0-9]+)?[ %a-z/]{0,12}", re.I)
_PIECE_OF_TEXT = compile_lazily(rb"\[[A-Z_]+\]|<[^<>]{0,20}>|[^\w]{1,4}|.{0,2}|[/~.].*", re.S)
"""A token that is a piece of a text, or a path."""
_TURNS = compile_lazily(rb"[0-9](?=[A-Za-z])|[A-Za-z](?=[0-9])|[a-z](?=[A-Z])")
_HEX = compile_lazily(rb"[0-9a-f]{32,}|[0-9A-F]{32,}")
_DIGIT = compile_lazily(rb"[0-9]")
_LETTER = compile_lazily(rb"[A-Za-z]")


def _read_value(
    text: bytes, name: _Name, at: int, sign: bytes = b"=", close: bytes = b""
) -> Span | None:
    """Return the secret at ``at``, or None; ``sign`` precedes it, ``close`` closed the name."""
    at = find_match_end(_TAG, text, at)
    opened = _OPEN.match(text, at)
    if opened is not None:
        return _read_quoted(text, name, opened, sign)
    is_colon = sign.startswith(b":")
    quote = close if is_colon else b""
    called = _CALL.match(text, at)
    if called is not None:
        end = _end_of_bracketed(text, name, at, called.end() - 1)
        if end > at:
            return Span(at, end, name.meaning.kind, name.start, quote)
        if not name.meaning.sure:
            return None
    around = _QUOTE_BEFORE.search(text[max(0, name.start - _REACH) : name.start])
    if around and not close and (name.meaning.kind in _SEVERAL_WORDS or is_colon):
        return _check(text, name, at, _end_of_quoted_words(text, at, around[0]))
    pattern = _choose_pattern(text, name, at, sign, close)
    return _check(text, name, at, find_match_end(pattern, text, at), quote)


def _read_quoted(text: bytes, name: _Name, opened: re.Match[bytes], sign: bytes) -> Span | None:
    quote = opened.group("quote")
    end = _end_of_quoted_words(text, opened.end(), quote)
    if sign == b"=" and text.startswith(b"\n", end) and _is_of_shell(text, name):
        more = _FURTHER_LINES.get(quote)
        end = find_match_end(more, text, end) if more else end
    return _check(text, name, opened.end(), end)


def _choose_pattern(
    text: bytes, name: _Name, at: int, sign: bytes, close: bytes
) -> re.Pattern[bytes]:
    if name.in_query:
        return _IN_QUERY
    if close:
        return _NUMBER_OR_WORD
    if name.in_argument and sign != b" " and not re.search(rb"\s", text[: name.start]):
        return _ARGUMENT
    return _TO_END if _takes_line(text, name, at, sign) else _WORD


def _takes_line(text: bytes, name: _Name, at: int, sign: bytes) -> bool:
    """Return whether an unquoted value goes on to the end of its line: a header, a passphrase."""
    kind = name.meaning.kind
    if kind in _SEVERAL_WORDS or (name.in_argument and sign == b":"):
        return True
    if kind not in _PASSPHRASES or name.is_option:
        return False
    if is_placeholder(text[at : find_match_end(_WORD, text, at)]):
        return False
    return sign == b":" or (not name.in_argument and _is_of_shell(text, name))


def _is_of_shell(text: bytes, name: _Name) -> bool:
    """Return whether a shell may assign to a name: at the start of a line, or after ``export``."""
    return bool(_SHELL_LINE.search(text[max(0, name.start - _BEFORE) : name.start]))


def _check(text: bytes, name: _Name, start: int, end: int, quote: bytes = b"") -> Span | None:
    whole = text[start:end]
    raw = whole.strip()
    if text[start - 1 : start] not in (b'"', b"'", b"`"):
        raw = _strip_outer_brackets(raw)
    if not raw or raw == text[name.start : name.end] or is_placeholder(raw):
        return None
    if not name.meaning.sure and _is_of_text(text, name, start, raw):
        return None
    start += len(whole) - len(whole.lstrip())
    return Span(start, start + len(raw), name.meaning.kind, name.start, quote)


def _strip_outer_brackets(raw: bytes) -> bytes:
    """Return a value without closing brackets that were opened before its name."""
    for _ in range(_MAX_NESTED):
        raw = raw.removesuffix(b":") if raw.endswith(b"):") else raw
        raw = raw.rstrip(b"\\")
        last = raw[-1:]
        if last in _OPENING and raw.count(last) > raw.count(_OPENING[last]):
            raw = raw[:-1]
    return raw


def _end_of_quoted_words(text: bytes, start: int, quote: bytes) -> int:
    end = _end_of_quoted(text, start, quote)
    for _ in range(_MAX_GLUED):
        if len(quote) != 1 or text[end : end + 1] != quote:
            return end
        glued = _GLUED.match(text, end + 1)
        if glued is None:
            return end
        opened = glued["quote"]
        if not opened:
            return find_match_end(_WORD, text, glued.end())
        quote = opened
        end = _end_of_quoted(text, glued.end(), quote)
    return end


def _end_of_quoted(text: bytes, start: int, quote: bytes) -> int:
    """Return where a quoted text ends: at its quote; with its line where the quote is missing."""
    limit = min(len(text), start + _QUOTED_BYTES)
    if len(quote) == 3 and b"\\" not in quote:  # around any number of lines
        closing = text.find(quote, start, limit)
        return closing if closing >= 0 else find_match_end(_LINE, text, start, limit)
    stop = find_match_end(_LINE, text, start, limit)
    escapes = len(quote) - 1
    for match in _CLOSING[quote[-1:].decode()].finditer(text, start, stop):
        # Each level of escaping doubles the backslashes and adds one for the quote.
        if (len(match[0]) - 1) % (2 * escapes + 2) == escapes:
            return match.end() - len(quote)
    if stop < limit or limit == len(text):
        return stop
    end = text.find(quote, stop)
    return end if end >= 0 else len(text)


def _end_of_bracketed(text: bytes, name: _Name, at: int, bracket: int) -> int:
    """Return where a list, a table or a call ends; its start where it is no secret as a whole."""
    if not name.meaning.sure or text.startswith(b"[redacted", at):
        return at
    depth = end = 0
    for match in _BRACKET.finditer(text, bracket, bracket + _LIST_BYTES):
        if not match["open"]:
            depth += 1 if match[0] in b"[{(" else -1
        if depth == 0:
            end = match.end()
            break
    else:  # it is far away or missing
        return find_match_end(_LINE, text, at)
    inner = text[bracket + 1 : end - 1].strip()
    has_value = inner if at == bracket else re.search(rb"[\"']", inner)  # a call has a text
    return end if has_value and not is_placeholder(text[at:end]) else at


def looks_random(text: bytes) -> bool:
    """Return whether a word looks generated by a program; a bare digest does not count."""
    if len(text) < 16 or text.startswith(b"/"):
        return False
    return len(_TURNS.findall(text[:LONG])) >= 4 and not is_digest(text)


def is_placeholder(raw: bytes) -> bool:
    """Return whether a value is empty, a variable, an expression, or a word of a manual."""
    return len(raw) <= LONG and _PLACEHOLDER.fullmatch(raw) is not None


def is_digest(raw: bytes) -> bool:
    """Return whether a value is nothing but many hexadecimal digits."""
    return _HEX.fullmatch(raw) is not None


def _is_of_text(text: bytes, name: _Name, start: int, raw: bytes) -> bool:
    """Return whether a value is a token of a text, as in ``unexpected token: else``."""
    if len(raw) > LONG:
        return False
    if _NUMBER.fullmatch(raw) or _PIECE_OF_TEXT.fullmatch(raw):
        return True
    if b"=" in text[name.end : start] or not raw.isalpha():
        return False
    if text[name.start - 1 : name.start] != b" ":
        return False
    words = text[max(0, name.start - 24) : name.start].split()
    return bool(words) and words[-1].isalpha() and judge_secret_name(words[-1] + b"_token") is None


# --- The value of a name: in shell, JSON, TOML, Python, headers, URLs, tables, commands ----------

_TYPES = rb"(?:str|bytes|Any|Secret\w*|(?:Optional|Union)\[[\w, |]{1,40}\]|str \| None)"
_SIGN = compile_lazily(
    rb"(?P<close>" + _QUOTES + rb")?[\])]{0,2}[ \t]{0,40}(?::[ \t]?" + _TYPES + rb"[ \t]?(?==))?"
    rb"(?P<sign>=>|->|[:+?]?=(?!=)|:(?!//)|\xef\xbc\x9a|\xe2\x94\x82|\xe2\x94\x83|\||\t)[ \t]{0,80}"
)
_BREAK = rb"(?:[ \t\0]|\\?\r?\n)"
_GAP = compile_lazily(
    rb"(?P<close>" + _QUOTES + rb")?(?:(?P<comma>[ \t]{0,8},)" + _BREAK + rb"{0,120}"
    rb"|" + _BREAK + rb"{1,120})"
)
"""Between an option and its value, in a command or in a list of arguments."""
_ONE_A_LINE = compile_lazily(rb"[^,\\]*\n[^,\\]*")
_PAIR = compile_lazily(
    rb"[ \t]{0,8},\s{0,80}[bBuU]?(?=\\*[\"'])"
)  # between both, in a tuple or a list
_OTHER = rb"\s{0,80},\s{0,80}\"(?!value)\w{1,30}\"[ ]?:[ ]?\"[^\"\n]{0,80}\""
_BESIDE = compile_lazily(
    rb"(?:" + _OTHER + rb"){0,2}\s{0,80},?\s{0,80}(?:" + _QUOTES + rb")?(?:value|val|content)"
    rb"(?:" + _QUOTES + rb")?[ \t]{0,8}[:=][ \t]{0,8}",
    re.I,
)
"""``"name": "HF_TOKEN", "value": ...``, as in descriptions of containers."""
_AHEAD = compile_lazily(
    rb"[\"']value[\"'] ?: ?(?P<quote>[\"'])(?P<value>[^\"'\n]{1,4096})[\"']\s{0,80},\s{0,80}"
    rb"[\"'](?:name|key)[\"'] ?: ?[\"']\Z"
)
"""The same the other way round."""
_NAME_KEY = compile_lazily(rb"[\"'](?:name|key)[\"'] ?: ?[\"']\Z")
_ELEMENT = compile_lazily(rb"[^<>\n]{0,200}>\s{0,80}(?P<data><!\[CDATA\[)?")
_ELEMENT_BYTES = 4096
_SMALL_WORDS = compile_lazily(
    rb"(?:[ \t\"'`(\[,:=>]|(?:is|was|are|of|value|set|to|as|with|using|used|for|named)\b){1,24}"
)
"""Between a name and a value in a sentence."""
_OTHER_WORDS = compile_lazily(rb"(?: [\w.@'-]{1,20}){1,3} ?[:=]{1,2} ?[\"'`]?")
"""The same with words that say more: ``API key provided: ...``."""
_STRESS = compile_lazily(rb"\b(?:is|was)\b|[\"'`\t:=]|  ")  # a word after it is a value
_RANDOM = compile_lazily(rb"[^\s\"'`,;()<>\[\]{}]{6,}")
_BAR = rb"(?:(?:\xe2\x94[\x82\x83]|\|)[ \t]{0,200})?"
_NEXT = compile_lazily(
    rb"[ \t]{0,80}(?:[|>][+-]?)?[ \t]{0,200}" + _BAR + rb"\r?\n"
    rb"(?:\[\w{1,20}\]: ?)?[ \t]{0,200}" + _BAR + rb"(?P<item>- )?"
    rb"|(?P<listed>[\"']),\s{0,80}[\"'][ \t]{0,200}"
)
"""From a name at the end of a line to its value on the next one, also in a list of lines."""
_ITEMS = compile_lazily(
    rb"(?:\r?\n[ \t]{0,80}- [^\n]{1,200}){0,100}"
)  # of a list, one on each line
_NEXT_WORD = compile_lazily(rb"(?![\"']?-[-a-zA-Z])")
_NEXT_ITEM = compile_lazily(_NEXT_WORD.pattern + _OPEN.pattern)
_METAVAR = compile_lazily(rb"[A-Z]+(?:_[A-Z]+)*")
_SETTER = compile_lazily(
    rb"(?:\b(?:setenv|set -g?x|set -Ux|ENV|ARG)|\blogin\s{1,9}\S{1,80})\s{1,9}\Z"
)
_BLANK = compile_lazily(rb"\s{1,9}")
_PROSE = frozenset(
    b"to or and for with is in if option flag argument when instead of was not can may the".split()
)
"""Words after an option in a sentence about it."""
_PLAIN_NAME = compile_lazily(rb"[A-Z][A-Z0-9_]*|-.*|[a-z_]{1,24}")
_LINE_ENDS = (b"", b"\r", b"\n", b"\0", b"'", b'"')
_LINE_OR_ITEM_ENDS = (b"", b"\n", b",", b"]", b"\xe2", b"|")


def find_named_values(text: bytes, *, in_argument: bool = False) -> Iterator[Span]:
    """Yield the value of each name of a secret; ``in_argument``: the text is one argument."""
    end = 0
    for name in _find_names(text, in_argument):
        if name.start < end:  # a part of another one's value
            continue
        value = _find_value(text, name)
        if value is not None and value.end > value.start:
            end = value.end
            yield value


def _find_value(text: bytes, name: _Name) -> Span | None:
    if text[name.start - 1 : name.start] == b"<" and not name.in_query:
        return _read_element(text, name, name.end)
    sign = _SIGN.match(text, name.end)
    if sign is not None and not (name.is_option and sign["sign"] in (b"|", b"\t", b":")):
        return _read_assigned(text, name, sign)
    if name.is_option:
        return _read_option(text, name)
    for find in (_read_after_setter, _read_ahead, _read_second, _read_sentence):
        value = find(text, name)
        if value is not None:
            return value
    return None


def _read_assigned(text: bytes, name: _Name, match: re.Match[bytes]) -> Span | None:
    sign, close = match.group("sign", "close")
    if _is_weak(text, name, sign):
        return _read_sentence(text, name)
    gap = _NEXT.match(text, match.end())
    if gap is None or (gap["listed"] and close):
        return _read_value(text, name, match.end(), sign, close or b"")
    listed, item = gap.group("listed", "item")
    value = _read_next_line(text, name, gap.end(), can_be_quoted=not listed)
    if value is not None and item:
        value = value._replace(end=find_match_end(_ITEMS, text, value.end))
    return value


def _is_weak(text: bytes, name: _Name, sign: bytes) -> bool:
    """Return whether a sign may stand between any two words, and need not assign anything."""
    if sign == b"->":
        return not name.meaning.sure
    before = text[max(0, name.start - _BEFORE) : name.start]
    return sign == b"\t" or (sign == b"|" and not before.rstrip(b" \t").endswith(b"|"))


def _read_next_line(text: bytes, name: _Name, at: int, *, can_be_quoted: bool) -> Span | None:
    value = _read_value(text, name, at)
    if value is None:
        return None
    if can_be_quoted and text[value.start - 1 : value.start] in (b'"', b"'"):
        return value
    raw, behind = text[value.start : value.end], text[value.end : value.end + 2]
    has_end = behind.strip(b"\"' \t\r")[:1] in _LINE_OR_ITEM_ENDS
    if not has_end or raw.endswith((b":", b",", b".")) or b" " in raw:
        return None
    return value if _is_likely(raw, name.meaning) else None


def _is_likely(raw: bytes, secret: Meaning) -> bool:
    is_long = secret.kind == "password" and len(raw) >= 6
    has_digit = secret.sure and len(raw) >= 8 and _DIGIT.search(raw)
    return bool(is_long or has_digit) or looks_random(raw) or is_digest(raw)


def _read_option(text: bytes, name: _Name) -> Span | None:
    gap = _GAP.match(text, name.end)
    if gap is None:
        return None
    following = _NEXT_ITEM if any(gap.group("close", "comma")) else _NEXT_WORD
    value = following.match(text, gap.end()) and _read_value(text, name, gap.end(), b" ")
    if value is None or _is_of_manual(text[value.start : value.end]):
        return None
    # Without a comma or a continued line, arguments may stand below one another, or a text ends.
    has_end = text[value.end : value.end + 1] in _LINE_ENDS
    fills_line = has_end and b" " not in text[value.start : value.end]
    return value if fills_line or not _ONE_A_LINE.fullmatch(gap[0]) else None


def _is_of_manual(raw: bytes) -> bool:
    if not _METAVAR.fullmatch(raw):
        return raw in _PROSE
    return len(raw) <= 8 or judge_secret_name(raw) is not None


def _read_element(text: bytes, name: _Name, at: int) -> Span | None:
    """Return the content of ``<password>...``, at the end of the name or of an attribute."""
    tag = _ELEMENT.match(text, at)
    if tag is None:
        return None
    end = text.find(b"]]>" if tag["data"] else b"<", tag.end(), tag.end() + _ELEMENT_BYTES)
    return _check(text, name, tag.end(), end) if end >= 0 else None


def _read_after_setter(text: bytes, name: _Name) -> Span | None:
    """Return the value after a name that a command sets: ``setenv HF_TOKEN ...``."""
    before = text[max(0, name.start - _BEFORE) : name.start]
    blank = _BLANK.match(text, name.end)
    return _read_value(text, name, blank.end()) if blank and _SETTER.search(before) else None


def _read_ahead(text: bytes, name: _Name) -> Span | None:
    """Return the value before a name, both with a key: ``"value": "...", "name": "HF_TOKEN"``."""
    if not _NAME_KEY.search(text[max(0, name.start - 12) : name.start]):
        return None
    at = text.rfind(b"value", max(0, name.start - _ELEMENT_BYTES), name.start)
    match = _AHEAD.match(text, at - 1, name.start) if at > 0 else None
    return _check(text, name, *match.span("value")) if match else None


def _read_second(text: bytes, name: _Name) -> Span | None:
    """Return the value beside a name, under ``"value"``, or after a quoted name."""
    closed = _OPEN.match(text, name.end)  # the quote that closes the name
    end = closed.end() if closed else name.end
    beside = _BESIDE.match(text, end)
    if beside is not None and (closed or b"\n" in beside[0]):
        return _read_value(text, name, beside.end())
    if closed is None:
        return None
    is_attribute = text.startswith(b">", end)
    return _read_element(text, name, end) if is_attribute else _read_pair(text, name, end)


def _read_pair(text: bytes, name: _Name, end: int) -> Span | None:
    """Return the second of two quoted texts: ``("HF_TOKEN", "...")``, not of a list of names."""
    comma = _PAIR.match(text, end)
    value = _read_value(text, name, comma.end()) if comma else None
    raw = text[value.start : value.end] if value else b""
    if not raw or _PLAIN_NAME.fullmatch(raw) or judge_secret_name(raw) is not None:
        return None
    return value if name.meaning.sure or looks_random(raw) else None


def _read_sentence(text: bytes, name: _Name) -> Span | None:
    """Return a word that looks random, a few small words after the name: ``the token is ...``."""
    for between in (_OTHER_WORDS, _SMALL_WORDS):
        gap = between.match(text, name.end)
        match = _RANDOM.match(text, gap.end()) if gap else None
        if gap is None or match is None:
            continue
        word = match[0].rstrip(b".,:;")
        is_stressed = text[name.start : name.end].isupper() or _STRESS.search(gap[0])
        if looks_random(word) or (name.meaning.sure and is_stressed and _is_password(word)):
            return Span(match.start(), match.start() + len(word), name.meaning.kind, name.start)
    return None


def _is_password(word: bytes) -> bool:
    is_mixed = len(word) >= 6 and _DIGIT.search(word) and _LETTER.search(word)
    return bool(is_mixed) and not (word.startswith(b"/") or is_placeholder(word) or is_digest(word))


# --- Passwords without a name: arguments of commands, and before a host --------------------------

_QUOTE = rb"(?P<quote>[\"']?)"
_LOGIN = rb"[ \t][^\n]{0,80}?\blogin\b[^\n]{0,160}?[ \t]-p[ \t=]{0,9}" + _QUOTE
_USER = rb"\b[^\n]{0,160}?[ \t](?:-u|-U|--user|--proxy-user)[ =\t]{0,9}" + _QUOTE
_READER = rb"(?:-stdin|--with-token|sudo[ ]-S|kinit|passwd)"
_HERE = rb"[^\n|]{0,80}?<<<[ ]?" + _QUOTE
_ECHO = rb"[ \t]{1,9}(?:-n[ \t]{1,9})?" + _QUOTE
_PIPE = rb"(?=[^\s\"'|]{2,200}[\"']?[ \t]{0,9}\|[^\n]{0,160}?" + _READER + rb")"
_REGISTRY_PROGRAMS = "docker podman nerdctl buildah skopeo apptainer singularity oras helm"
_COMMANDS = {
    **dict.fromkeys(_REGISTRY_PROGRAMS.encode().split(), _LOGIN),
    **dict.fromkeys((b"-stdin", b"--with-token", b"sudo -S", b"kinit", b"passwd"), _HERE),
    **dict.fromkeys((b"curl", b"wget"), _USER + rb"[^\s:\"']{1,80}:"),
    b"sshpass": rb"[ \t]{1,9}-p[ \t]{0,9}" + _QUOTE,
    b"mysql": rb"(?:dump|admin)?\b[^\n]{0,160}?[ \t]-p(?=\S)" + _QUOTE,
    b"pass:": _QUOTE,
    b"ldap": rb"(?:search|whoami|add|modify|passwd)\b[^\n]{0,160}?[ \t]-w[ \t]{0,9}" + _QUOTE,
    b"smbclient": rb"\b[^\n]{0,160}?[ \t]-U[ \t]{0,9}" + _QUOTE + rb"[^\s%]{1,80}%",
    b"login(": rb"\s{0,40}(?:\w{1,20}[ ]?=[ ]?)?[bf]?(?=[\"'])" + _QUOTE,
    b"echo": _ECHO + _PIPE,
}
"""Commands that take a password without a name: what stands between."""
_BEFORE_PASSWORD = {
    program: compile_lazily(re.escape(program) + before + rb"(?!\[redacted|\*\*\*)(?=[^\s\"']{2})")
    for program, before in _COMMANDS.items()
}
_BARE = compile_lazily(rb"[^\s\"'|]+")
_STEP = 64  # bytes after a command in which no other one of its kind is looked for
_URL = compile_lazily(rb"([a-z][a-z0-9+.-]*://)([^\s\"'<>`]*)", re.I)
_AUTHORITY = compile_lazily(rb"[^\s/?#\"'<>\\]*")
_URL_REST = compile_lazily(rb"[^\s\"'<>]*")
_URL_BYTES = 2048
_HOST = compile_lazily(rb"(?:[\w.-]*|\[[0-9a-f:.]*\])(?::[0-9]{0,5})?", re.I)
_LOGIN_AT_HOST = compile_lazily(
    rb"(?<![\w./:@+-])([\w.+-]{1,64}:(?![0-9]{1,5}@sha)[^\s:@/\"'<>]{3,80})@(?!sha[0-9])"
    rb"(?=tcp\(|(?:[\w-]{1,63}\.){1,6}[\w-]|localhost\b|[\w.-]{1,80}[:#/])"
)
"""``user:password@host`` without a scheme: of databases, and registries of containers."""


def find_passwords(text: bytes) -> Iterator[Span]:
    """Yield the passwords that stand as an argument of a command, or before a host."""
    for program, pattern in _BEFORE_PASSWORD.items():
        at = text.find(program)
        while at >= 0:
            match = pattern.match(text, at)
            following = match.end() if match else at + _STEP
            if match is not None:
                end = find_match_end(_BARE, text, following)
                if match["quote"]:
                    end = _end_of_quoted(text, following, match["quote"])
                yield Span(following, end, "password", at)
            at = text.find(program, following)
    if b"@" in text:
        for match in _LOGIN_AT_HOST.finditer(text):
            yield Span(*match.span(1), "url-credential", match.start())


def find_url_logins(text: bytes) -> Iterator[Span]:
    """Yield users with a password before the hosts of URLs, and those that look random."""
    for at in find_all(text, b"://"):
        start = at + 3
        rest = text[start : find_match_end(_URL_REST, text, start, start + _URL_BYTES)]
        login = rest[: _length_of_login(rest)]
        is_secret_login = b":" in login or looks_random(login) or is_digest(login)
        if is_secret_login and not login.startswith(b"[redacted"):
            yield Span(start, start + len(login), "url-credential", at)


def _length_of_login(url: bytes) -> int:
    authority = url[: find_match_end(_AUTHORITY, url)]
    if b"@" not in authority and not _HOST.fullmatch(authority):  # a password with a slash in it
        authority = url
    return max(0, authority.rfind(b"@"))


# --- Arguments and messages without secrets ------------------------------------------------------

_PAIRS = compile_lazily(rb"([^=&;]*=)[^&;]*")
_USER_OPTION = compile_lazily(r"(-u|-U|--user|--proxy-user)(?:(=?)(.+))?", re.S)
_LOGIN_VALUE = compile_lazily(
    r"(?!\d*:\d*\Z).*:.*", re.S
)  # no numeric user and group of a container
_ASSIGNED = compile_lazily(r"([-+~]*([A-Za-z_][\w.-]*)=).*", re.S)
_ANY_OPTION = compile_lazily(r"--?([A-Za-z][\w.-]*)")
_LOGIN_SIGN = compile_lazily("[:@ ]")  # an argument with none of these, and no HINT, is no secret
_LONG_OPTION = compile_lazily(r"--[a-z][\w-]*(=.*)?", re.S)
_TOKENS_OPTION = compile_lazily(r"(--?tokens)(?:(=)(.*))?", re.S | re.I)
"""An option that may mean tokens of a text or secret ones: its value decides."""
_TOKEN_VALUE = compile_lazily(
    r"(?!\d[\d_.]*(?:e\d+)?[a-z]?\Z)(?=[^\d]*\d)(?=[^a-z]*[a-z])[\w+=-]{6,}", re.I
)
"""Letters and digits mixed as in a secret token, not a number, a path or a file name."""
_VALUES_OF_OPTIONS = ((_TOKENS_OPTION, _TOKEN_VALUE), (_USER_OPTION, _LOGIN_VALUE))
_REGISTRY = frozenset(_REGISTRY_PROGRAMS.split())
_LONG_WORD = compile_lazily(r"[^\s'(){}\[\],]{16,}")
_GENERATED = compile_lazily(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=\D*\d)[A-Za-z0-9+=\"\\]+")
"""Small and capital letters with digits, and nothing that is in a path or a file's name."""


def mask_arguments(argv: Sequence[str]) -> list[str]:
    """Return arguments as they may be shown, with the values of secret names hidden."""
    shown = [_mask_argument(word) for word in argv]
    login = _find_login(argv)
    for index, word in enumerate(argv):
        takes_password = index > login and word.startswith("-p")
        if takes_password and word != "-p":
            shown[index] = f"-p{HIDDEN}"
        elif index + 1 < len(argv) and (takes_password or _hides_next(word, argv[index + 1])):
            shown[index + 1] = HIDDEN
    return shown


def mask_value(name: str, value: str) -> str:
    """Return a variable's value as it may be shown: without words that look generated, either."""
    if is_secret(name):
        return ""
    return _LONG_WORD.sub(_hide_generated, mask_arguments([value])[0])


def _hide_generated(match: re.Match[str]) -> str:
    is_generated = looks_random(match[0].encode(errors="replace")) or _GENERATED.fullmatch(match[0])
    return HIDDEN if is_generated else match[0]


def strip_url_secrets(text: str) -> str:
    """Return a text with the users, passwords and query values of all its URLs removed."""
    if "://" not in text:
        return text
    return change_bytes(text, functools.partial(_URL.sub, _show_url))


def change_bytes(text: str, change: Callable[[bytes], bytes]) -> str:
    """Return what a change to its bytes makes of a text."""
    how = "surrogateescape"  # a name's bytes
    try:
        data = text.encode(errors=how)
    except UnicodeEncodeError:  # half of a character, as JSON may have it
        how = "surrogatepass"
        data = text.encode(errors=how)
    return change(data).decode(errors=how)


def hide_spans(text: bytes, spans: Iterable[Span]) -> bytes:
    """Return a text with stars in place of spans."""
    parts, copied = [], 0
    for span in merge_spans(spans):
        parts += [text[copied : span.start], HIDDEN.encode()]
        copied = span.end
    return b"".join([*parts, text[copied:]])


def _find_login(argv: Sequence[str]) -> int:
    """Return the index after which ``-p`` is a password; one pass, for thousands of arguments."""
    missing = {"login", "registry"}
    for index, word in enumerate(argv):
        program = word.rpartition("/")[2]
        missing.discard("registry" if program in _REGISTRY else word)
        if program == "sshpass" or not missing:
            return index
    return len(argv)


def _hides_next(word: str, following: str) -> bool:
    option = _ANY_OPTION.fullmatch(word)
    if option is None or _LONG_OPTION.fullmatch(following):
        return False
    for name, value in _VALUES_OF_OPTIONS:
        if name.fullmatch(word):
            return value.fullmatch(following) is not None
    return is_secret(option[1])


def _mask_argument(word: str) -> str:
    if not (HINT.search(word) or _LOGIN_SIGN.search(word)):
        return word
    assigned = _ASSIGNED.fullmatch(word)
    if assigned and is_secret(assigned[2]):
        return f"{assigned[1]}{HIDDEN}"
    for option, value in _VALUES_OF_OPTIONS:
        given = option.fullmatch(word)  # a value has no other end
        if given and value.fullmatch(given[3] or ""):
            return f"{given[1]}{given[2]}{HIDDEN}"
    return change_bytes(strip_url_secrets(word), _mask_text)


def _mask_text(text: bytes) -> bytes:
    passwords = find_passwords(text) if b" " in text or b"@" in text else ()
    return hide_spans(text, [*find_named_values(text, in_argument=True), *passwords])


def _show_url(match: re.Match[bytes]) -> bytes:
    scheme, rest = match.groups()
    login = _length_of_login(rest)
    rest, hash_sign, fragment = rest[login + 1 if login else 0 :].partition(b"#")
    location, mark, query = rest.partition(b"?")
    hidden = HIDDEN.encode()
    query = _PAIRS.sub(rb"\1" + hidden, query) if b"=" in query else query and hidden
    fragment = hide_spans(fragment, find_named_values(fragment, in_argument=True))
    return scheme + location + mark + query + hash_sign + fragment
