"""The value of a name: in shell, JSON, TOML, Python, headers, URLs, tables, commands."""

from __future__ import annotations

import re
from dataclasses import replace

from bundle.redaction.secrets import meaning

from .names import Name
from .spans import end_of
from .values import OPEN, QUOTES, Value, checked, is_digest, is_placeholder, looks_random, value_at

_TYPES = rb"(?:str|bytes|Any|Secret\w*|(?:Optional|Union)\[[\w, |]{1,40}\]|str \| None)"
_OP = re.compile(
    rb"(?P<close>" + QUOTES + rb")?[\])]{0,2}[ \t]{0,40}(?::[ \t]?" + _TYPES + rb"[ \t]?(?==))?"
    rb"(?P<op>=>|->|:=|={1,3}|:(?!//)|\xef\xbc\x9a|\xe2\x94\x82|\xe2\x94\x83|\||\t)"
    rb"[ \t]{0,80}"
)
_GAP = re.compile(
    rb"(?P<close>" + QUOTES + rb")?"
    rb"(?:(?P<comma>[ \t]{0,8},)(?:[ \t\0]|\\?\r?\n){0,120}|(?:[ \t\0]|\\?\r?\n){1,120})"
)
"""Between an option and its value, in a command or in a list of arguments."""
_PAIR = re.compile(rb"[ \t]{0,8},\s{0,80}[bBuU]?(?=[\"'])")
"""Between a quoted name and its value in a tuple or a list."""
_OTHER = rb"\s{0,80},\s{0,80}\"(?!value)\w{1,30}\"[ ]?:[ ]?\"[^\"\n]{0,80}\""
_BESIDE = re.compile(
    rb"(?:" + _OTHER + rb"){0,2}\s{0,80},?\s{0,80}(?:" + QUOTES + rb")?(?:value|val|content)"
    rb"(?:" + QUOTES + rb")?[ \t]{0,8}[:=][ \t]{0,8}",
    re.I,
)
"""``"name": "HF_TOKEN", "value": ...``, as in descriptions of containers."""
_AHEAD = re.compile(
    rb"[\"']value[\"'] ?: ?(?P<quote>[\"'])(?P<value>[^\"'\n]{1,4096})[\"']\s{0,80},\s{0,80}"
    rb"[\"'](?:name|key)[\"'] ?: ?[\"']\Z"
)
"""The same the other way round."""
_AHEAD_BYTES = 4200
_NAME_KEY = re.compile(rb"[\"'](?:name|key)[\"'] ?: ?[\"']\Z")
_ELEMENT = re.compile(rb"[^<>\n]{0,200}>\s{0,80}(?P<data><!\[CDATA\[)?")
_ELEMENT_BYTES = 4096
_SMALL_WORDS = re.compile(
    rb"(?:[ \t\"'`(\[,:=>]|(?:is|was|are|of|value|set|to|as|with|using|used|for|named)\b){1,24}"
)
"""Between a name and a value in a sentence."""
_OTHER_WORDS = re.compile(rb"(?: [\w.@'-]{1,20}){1,3} ?[:=]{1,2} ?[\"'`]?")
"""The same with words that say more: ``API key provided: ...``."""
_STRESS = re.compile(rb"\b(?:is|was)\b|[\"'`\t:=]|  ")
"""A sign that a word of letters and digits is a value, and not the next word."""
_BAR = rb"(?:(?:\xe2\x94[\x82\x83]|\|)[ \t]{0,200})?"
_NEXT = re.compile(
    rb"[ \t]{0,80}(?:[|>][+-]?)?[ \t]{0,200}" + _BAR + rb"\r?\n"
    rb"(?:\[\w{1,20}\]: ?)?[ \t]{0,200}" + _BAR + rb"(?P<item>- )?"
)
"""From a name at the end of a line to its value on the next one."""
_ITEMS = re.compile(rb"(?:\r?\n[ \t]{0,80}- [^\n]{1,200}){0,100}")
"""Further values of a list that has one on each line."""
_NEXT_LISTED = re.compile(rb"[\"'],\s{0,80}[\"'][ \t]{0,200}")
"""The same in a list of lines."""

_OPTION = re.compile(rb"[\"']?-[-a-zA-Z]")
_METAVAR = re.compile(rb"[A-Z]+(?:_[A-Z]+)*")
_RANDOM = re.compile(rb"[^\s\"'`,;()<>\[\]{}]{6,}")
_SETTER = re.compile(rb"(?:\b(?:setenv|set -g?x|set -Ux|ENV|ARG)|\blogin\s{1,9}\S{1,80})\s{1,9}\Z")
_BLANK = re.compile(rb"\s{1,9}")
_PROSE = frozenset(
    b"to or and for with is in if option flag argument when instead of was not can may the".split()
)
"""Words after an option in a sentence about it."""
_BEFORE = 120
_PLAIN_NAME = re.compile(rb"[A-Z][A-Z0-9_]*|-.*|[a-z_]{1,24}")
_LINE_ENDS = (b"", b"\r", b"\n", b"\0", b"'", b'"')
_LINE_OR_ITEM_ENDS = (b"", b"\n", b",", b"]", b"\xe2", b"|")
_DIGIT = re.compile(rb"[0-9]")
_LETTER = re.compile(rb"[A-Za-z]")
_MIN_MIXED = 6
"""Letters and digits of a word that may be a password."""
_MIN_PASSWORD, _MIN_WITH_DIGIT = 6, 8
"""Bytes of a value on a line of its own."""
_MAX_METAVAR = 8
"""Letters of a word in capitals that stands for the value of an option."""


def value_of(text: bytes, name: Name) -> Value | None:
    """Return the value of a name; None where it has none, or one that is no secret."""
    if text[name.start - 1 : name.start] == b"<" and not name.query:
        return _element(text, name)
    assignment = _OP.match(text, name.end)
    if assignment is not None and not (name.option and assignment["op"] in (b"|", b"\t", b":")):
        return _assigned(text, name, assignment)
    return _argument(text, name) if name.option else _unassigned(text, name)


def _unassigned(text: bytes, name: Name) -> Value | None:
    for find in (_after_setter, _ahead, _paired, _on_line_of_value, _in_sentence):
        value = find(text, name)
        if value is not None:
            return value
    return None


def _after_setter(text: bytes, name: Name) -> Value | None:
    """Return the value after a name that a command sets: ``setenv HF_TOKEN ...``."""
    before = text[max(0, name.start - _BEFORE) : name.start]
    blank = _BLANK.match(text, name.end)
    if blank is None or not _SETTER.search(before):
        return None
    return value_at(text, name, blank.end(), b"=")


def _ahead(text: bytes, name: Name) -> Value | None:
    """Return the value before a name, both with a key: ``"value": "...", "name": "HF_TOKEN"``."""
    if not _NAME_KEY.search(text[max(0, name.start - 12) : name.start]):
        return None
    at = text.rfind(b"value", max(0, name.start - _AHEAD_BYTES), name.start)
    match = _AHEAD.match(text, at - 1, name.start) if at > 0 else None
    if match is None:
        return None
    return checked(text, name, Value(start=match.start("value"), end=match.end("value")))


def _paired(text: bytes, name: Name) -> Value | None:
    """Return the value beside a quoted name: ``("HF_TOKEN", "...")``, or under ``"value"``."""
    closed = OPEN.match(text, name.end)  # the quote that closes the name
    if closed is None:
        return None
    beside = _BESIDE.match(text, closed.end())
    if beside is not None:
        return value_at(text, name, beside.end(), b"=")
    if text.startswith(b">", closed.end()):
        return _element(text, name)
    comma = _PAIR.match(text, closed.end())
    value = value_at(text, name, comma.end(), b"=") if comma else None
    if value is None:
        return None
    raw = text[value.start : value.end]
    if not (name.meaning.sure or looks_random(raw)):
        return None
    # A list of names is no secret.
    return None if _PLAIN_NAME.fullmatch(raw) or meaning(raw) is not None else value


def _on_line_of_value(text: bytes, name: Name) -> Value | None:
    """Return the value under ``value:`` on a line below the name."""
    beside = _BESIDE.match(text, name.end)
    if beside is None or b"\n" not in beside[0]:
        return None
    return value_at(text, name, beside.end(), b"=")


def _assigned(text: bytes, name: Name, assignment: re.Match[bytes]) -> Value | None:
    op, at = assignment["op"], assignment.end()
    if _is_weak(text, name, op):
        return _in_sentence(text, name)
    close = assignment["close"] or b""
    gap = _NEXT.match(text, at)
    if gap is not None:
        value = _on_next_line(text, name, gap.end(), quoted=True)
        return _with_items(text, value) if gap["item"] else value
    listed = None if close else _NEXT_LISTED.match(text, at)
    if listed is not None:
        return _on_next_line(text, name, listed.end(), quoted=False)
    return value_at(text, name, at, op, close)


def _is_weak(text: bytes, name: Name, op: bytes) -> bool:
    """Return whether a sign may stand between any two words, and need not assign anything."""
    if op == b"->":
        return not name.meaning.sure
    return op == b"\t" or (op == b"|" and not _in_table(text, name.start))


def _in_table(text: bytes, start: int) -> bool:
    return text[max(0, start - _BEFORE) : start].rstrip(b" \t").endswith(b"|")


def _with_items(text: bytes, value: Value | None) -> Value | None:
    """Return the first item of a list with the further ones, each on a line of its own."""
    return replace(value, end=end_of(_ITEMS, text, value.end)) if value else None


def _argument(text: bytes, name: Name) -> Value | None:
    """Return the argument after an option, or the next element of a list of arguments."""
    gap = _GAP.match(text, name.end)
    if gap is None or _OPTION.match(text, gap.end()):
        return None
    listed = bool(gap["close"] or gap["comma"])
    if listed and not OPEN.match(text, gap.end()):
        return None
    value = value_at(text, name, gap.end(), b" ")
    if value is None or _is_prose(text[value.start : value.end]):
        return None
    if _is_one_a_line(gap) and not _fills_line(text, value):
        return None
    return value


def _is_one_a_line(gap: re.Match[bytes]) -> bool:
    """Return whether arguments stand below one another, without a comma or a continued line."""
    return b"\n" in gap[0] and not gap["comma"] and b"\\" not in gap[0]


def _is_prose(raw: bytes) -> bool:
    """Return whether a word goes on with a sentence about an option, or stands for its value."""
    if raw in _PROSE:
        return True
    if not _METAVAR.fullmatch(raw):
        return False
    return len(raw) <= _MAX_METAVAR or meaning(raw) is not None


def _fills_line(text: bytes, value: Value) -> bool:
    has_end = text[value.end : value.end + 1] in _LINE_ENDS
    return has_end and b" " not in text[value.start : value.end]


def _element(text: bytes, name: Name) -> Value | None:
    tag = _ELEMENT.match(text, name.end)
    if tag is None:
        return None
    start = tag.end()
    ending = b"]]>" if tag["data"] else b"<"
    end = text.find(ending, start, start + _ELEMENT_BYTES)
    return checked(text, name, Value(start=start, end=end)) if end >= 0 else None


def _on_next_line(text: bytes, name: Name, at: int, *, quoted: bool) -> Value | None:
    """Return a value on the line after its name, if it is the only word there."""
    value = value_at(text, name, at, b"=")
    if value is None or (quoted and text[value.start - 1 : value.start] in (b'"', b"'")):
        return value
    raw, behind = text[value.start : value.end], text[value.end : value.end + 2]
    has_end = behind.strip(b"\"' \t\r")[:1] in _LINE_OR_ITEM_ENDS
    if not has_end or raw.endswith((b":", b",", b".")) or b" " in raw:
        return None
    return value if _is_likely(raw, name) else None


def _is_likely(raw: bytes, name: Name) -> bool:
    if name.meaning.kind == "password" and len(raw) >= _MIN_PASSWORD:
        return True
    if name.meaning.sure and len(raw) >= _MIN_WITH_DIGIT and _DIGIT.search(raw):
        return True
    return looks_random(raw) or is_digest(raw)


def _in_sentence(text: bytes, name: Name) -> Value | None:
    """Return a word that looks random, a few small words after the name: ``the token is ...``."""
    for between in (_OTHER_WORDS, _SMALL_WORDS):
        gap = between.match(text, name.end)
        match = _RANDOM.match(text, gap.end()) if gap else None
        if gap is None or match is None:
            continue
        word = match[0].rstrip(b".,:;")
        if looks_random(word) or (_is_stressed(text, name, gap) and _is_password(word)):
            return Value(start=match.start(), end=match.start() + len(word))
    return None


def _is_stressed(text: bytes, name: Name, gap: re.Match[bytes]) -> bool:
    """Return whether a sentence announces a value: by capitals, ``is``, a quote or a colon."""
    if not name.meaning.sure:
        return False
    return text[name.start : name.end].isupper() or bool(_STRESS.search(gap[0]))


def _is_password(word: bytes) -> bool:
    if len(word) < _MIN_MIXED or not _DIGIT.search(word) or not _LETTER.search(word):
        return False
    return not (word.startswith(b"/") or is_placeholder(word) or is_digest(word))
