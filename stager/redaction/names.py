"""The names in a text that mean a secret, as :mod:`bundle.redaction.secrets` defines them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bundle.redaction.secrets import SPLIT, Meaning, meaning

from .spans import end_of

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
