"""Where the value of a name is: in shell, JSON, TOML, Python, headers, URLs, tables, commands."""

from __future__ import annotations

import re
from dataclasses import replace

from bundle.redaction.secret_names import meaning

from .false_positives import is_digest, is_placeholder, looks_random
from .literal import OPEN, QUOTES, Value, checked, value_at
from .names import Name

_TYPES = rb"(?:str|bytes|Any|Secret\w*|(?:Optional|Union)\[[\w, |]{1,40}\]|str \| None)"
_OP = re.compile(
    rb"(?P<close>" + QUOTES + rb")?[\])]{0,2}[ \t]{0,40}(?::[ \t]?" + _TYPES + rb"[ \t]?(?==))?"
    rb"(?P<op>=>|->|:=|={1,3}|:(?!//)|\xef\xbc\x9a|\xe2\x94\x82|\xe2\x94\x83|\||\t)"
    rb"[ \t]{0,80}(?:\\\r?\n[ \t]{0,80})?"
)
_GAP = re.compile(
    rb"(?P<close>" + QUOTES + rb")?"
    rb"(?:(?P<comma>[ \t]{0,8},)(?:[ \t\0]|\\?\r?\n){0,120}|(?:[ \t\0]|\\?\r?\n){1,120})"
)
"""Between an option and its value, in a command or in a list of arguments."""
_PAIR = re.compile(rb"[ \t]{0,8},\s{0,80}[bBuU]?(?=\\{0,7}[\"'])")
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
_NAMED = re.compile(rb"[\"'](?:name|key)[\"'] ?: ?[\"']\Z")
_ELEMENT = re.compile(rb"[^<>\n]{0,200}>\s{0,80}(?P<data><!\[CDATA\[)?")
_ELEMENT_BYTES = 4096
_LOOSE = re.compile(
    rb"(?:[ \t\"'`(\[,:=>]|(?:is|was|are|of|value|set|to|as|with|using|used|for|named)\b){1,24}"
)
"""Between a name and a value in a sentence."""
_FEW = re.compile(rb"(?: [\w.@'-]{1,20}){1,3} ?[:=]{1,2} ?[\"'`]?")
"""The same with words that say more: ``API key provided: ...``."""
_STRESSED = re.compile(rb"\b(?:is|was)\b|[\"'`\t:=]|  ")
"""What makes a word of letters and digits a value, and not the next word."""
_BAR = rb"(?:(?:\xe2\x94[\x82\x83]|\|)[ \t]{0,200})?"
_NEXT = re.compile(
    rb"[ \t]{0,80}(?:[|>][+-]?)?[ \t]{0,200}" + _BAR + rb"\r?\n"
    rb"(?:\[\w{1,20}\]: ?)?[ \t]{0,200}" + _BAR + rb"(?P<item>- )?"
)
"""From a name at the end of a line to its value on the next one."""
_ITEMS = re.compile(rb"(?:\r?\n[ \t]{0,80}- [^\n]{1,200}){0,100}")
"""Further values of a list that has one on each line."""
_NEXT_LISTED = re.compile(rb"\\{0,7}[\"'],\s{0,80}\\{0,7}[\"'][ \t]{0,200}")
"""The same in a list of lines."""

_OPTION = re.compile(rb"\\{0,7}[\"']?-[-a-zA-Z]")
_METAVAR = re.compile(rb"[A-Z]+(?:_[A-Z]+)*")
_RANDOM = re.compile(rb"[^\s\"'`,;()<>\[\]{}]{6,}")
_SETTER = re.compile(rb"(?:\b(?:setenv|set -g?x|set -Ux|ENV|ARG)|\blogin\s{1,9}\S{1,80})\s{1,9}\Z")
_BLANK = re.compile(rb"\s{1,9}")
_PROSE = frozenset(
    b"to or and for with is in if option flag argument when instead of was not can may the".split()
)
"""What comes after an option in a sentence about it."""
_BEFORE = 120


def value_of(text: bytes, name: Name) -> Value | None:
    """The value of a name; None where it has none, or one that is no secret."""
    if text[name.start - 1 : name.start] == b"<" and not name.query:
        return _element(text, name)
    found = _OP.match(text, name.end)
    if found is not None and not (name.option and found["op"] in (b"|", b"\t", b":")):
        return _assigned(text, name, found)
    return _argument(text, name) if name.option else _beside(text, name)


def _beside(text: bytes, name: Name) -> Value | None:
    """What stands behind a name without any sign between."""
    before = text[max(0, name.start - _BEFORE) : name.start]
    blank = _BLANK.match(text, name.end)
    if blank and _SETTER.search(before) and (value := value_at(text, name, blank.end(), b"=")):
        return value
    if value := _ahead(text, name):
        return value
    opened = OPEN.match(text, name.end)  # which closes it here
    if opened and (value := _paired(text, name, opened.end())):
        return value
    listed = _BESIDE.match(text, name.end)
    if listed and b"\n" in listed[0] and (value := value_at(text, name, listed.end(), b"=")):
        return value
    return _in_sentence(text, name)


def _assigned(text: bytes, name: Name, found: re.Match[bytes]) -> Value | None:
    """What stands behind ``=``, ``:`` and the like."""
    op, at = found["op"], found.end()
    table = _in_table(text, name.start)
    if op == b"\t" or (op == b"|" and not table) or (op == b"->" and not name.meaning.sure):
        return _in_sentence(text, name)
    close = found["close"] or b""
    listed = None if close else _NEXT_LISTED.match(text, at)
    gap = _NEXT.match(text, at) or listed
    if gap is not None:
        value = _on_next_line(text, name, gap.end(), quoted=listed is None)
        more = _ITEMS.match(text, value.end) if value and gap.groupdict().get("item") else None
        return replace(value, end=more.end()) if value and more else value
    return value_at(text, name, at, op, close)


def _argument(text: bytes, name: Name) -> Value | None:
    """The argument after an option, or the next element of a list of arguments."""
    gap = _GAP.match(text, name.end)
    if gap is None or _OPTION.match(text, gap.end()):
        return None
    listed = bool(gap["close"] or gap["comma"])
    if listed and not OPEN.match(text, gap.end()):
        return None
    value = value_at(text, name, gap.end(), b" ")
    if value is None:
        return None
    raw = text[value.start : value.end]
    if raw in _PROSE or (_METAVAR.fullmatch(raw) and (len(raw) <= 8 or meaning(raw) is not None)):
        return None
    one_a_line = b"\n" in gap[0] and not gap["comma"] and b"\\" not in gap[0]
    ended = text[value.end : value.end + 1] in (b"", b"\r", b"\n", b"\0", b"'", b'"')
    return None if one_a_line and (b" " in raw or not ended) else value


def _paired(text: bytes, name: Name, at: int) -> Value | None:
    """The value beside a quoted name: ``("HF_TOKEN", "...")``, or under ``"value"``."""
    beside = _BESIDE.match(text, at)
    if beside is not None:
        return value_at(text, name, beside.end(), b"=")
    if text[at : at + 1] == b">":
        return _element(text, name)
    pair = _PAIR.match(text, at)
    value = value_at(text, name, pair.end(), b"=") if pair else None
    if value is None or not (name.meaning.sure or looks_random(text[value.start : value.end])):
        return None
    raw = text[value.start : value.end]
    # A list of names is no secret.
    is_name = re.fullmatch(rb"[A-Z][A-Z0-9_]*|-.*|[a-z_]{1,24}", raw)
    return None if is_name or meaning(raw) is not None else value


def _ahead(text: bytes, name: Name) -> Value | None:
    """The value before a name, both named: ``"value": "...", "name": "HF_TOKEN"``."""
    if not _NAMED.search(text[max(0, name.start - 12) : name.start]):
        return None
    at = text.rfind(b"value", max(0, name.start - _AHEAD_BYTES), name.start)
    found = _AHEAD.match(text, at - 1, name.start) if at > 0 else None
    if found is None:
        return None
    return checked(text, name, Value(start=found.start("value"), end=found.end("value")))


def _element(text: bytes, name: Name) -> Value | None:
    """The content of an element of XML."""
    found = _ELEMENT.match(text, name.end)
    if found is None:
        return None
    inner = found.end()
    ending = b"]]>" if found["data"] else b"<"
    end = text.find(ending, inner, inner + _ELEMENT_BYTES)
    return checked(text, name, Value(start=inner, end=end)) if end >= 0 else None


def _in_table(text: bytes, start: int) -> bool:
    return text[max(0, start - _BEFORE) : start].rstrip(b" \t").endswith(b"|")


def _on_next_line(text: bytes, name: Name, at: int, *, quoted: bool) -> Value | None:
    """A value on the line after its name, if it is the only word there."""
    value = value_at(text, name, at, b"=")
    if value is None or (quoted and text[value.start - 1 : value.start] in (b'"', b"'")):
        return value
    raw, behind = text[value.start : value.end], text[value.end : value.end + 2]
    ended = behind.strip(b"\\\"' \t\r")[:1] in (b"", b"\n", b",", b"]", b"\xe2", b"|")
    if not ended or raw.endswith((b":", b",", b".")) or b" " in raw:
        return None
    known = name.meaning.kind == "password" and len(raw) >= 6
    digit = name.meaning.sure and len(raw) >= 8 and re.search(rb"[0-9]", raw)
    return value if known or digit or looks_random(raw) or is_digest(raw) else None


def _in_sentence(text: bytes, name: Name) -> Value | None:
    """A word that looks random, a few small words after the name: ``the token is ...``."""
    for between in (_FEW, _LOOSE):
        gap = between.match(text, name.end)
        found = _RANDOM.match(text, gap.end()) if gap else None
        word = found[0].rstrip(b".,:;") if found else b""
        loud = text[name.start : name.end].isupper()
        stressed = name.meaning.sure and gap is not None and (loud or _STRESSED.search(gap[0]))
        mixed = len(word) >= 6 and re.search(rb"[0-9]", word) and re.search(rb"[A-Za-z]", word)
        plain = word.startswith(b"/") or is_placeholder(word) or is_digest(word)
        if found and (looks_random(word) or (stressed and mixed and not plain)):
            return Value(start=found.start(), end=found.start() + len(word))
    return None
