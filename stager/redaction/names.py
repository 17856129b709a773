"""The names in a text that mean a secret, as :mod:`bundle.redaction.secret_names` defines them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bundle.redaction.secret_names import SPLIT, Meaning, meaning

NEEDLES = (
    b"token", b"pass", b"secret", b"cred", b"key", b"auth", b"cookie", b"jwt", b"pwd", b"session",
    b"bearer", b"webhook", b"_pat", b"otp", b"sig", b"code", b"_pw", b"-pw", b"pw=", b"pw:",
    b"pw\"", b"pw'",
)  # fmt: skip
"""What every name that means a secret has in it, in small letters."""
_REACH = 64
"""Bytes of a name on either side of a needle; what is longer is no name."""
_PART = re.compile(rb"[A-Za-z0-9_.-]*")
_DONE = b"[redacted: "
_SAID = re.compile(rb"\b([A-Za-z0-9]{2,16}) \Z")


@dataclass(frozen=True, kw_only=True)
class Name:
    """A name in a text."""

    start: int
    """Where it begins, without dashes before it."""
    end: int
    """Where it ends."""
    meaning: Meaning
    """What it means."""
    option: bool = False
    """Whether it is an option of a command: ``--token``."""
    query: bool = False
    """Whether it stands in the query of a URL: ``?token=``."""


def names(text: bytes) -> Iterator[Name]:
    """The names in a text that mean a secret, in order."""
    lower = text.lower()
    found: list[int] = []
    for needle in NEEDLES:
        at = lower.find(needle)
        while at >= 0:
            found.append(at)
            at = lower.find(needle, at + len(needle))
    end = 0
    for at in sorted(found):
        if at < end:
            continue
        left = _PART.match(text[max(end, at - _REACH) : at][::-1])
        start = at - (left.end() if left else 0)
        right = _PART.match(text, at, at + _REACH)
        end = right.end() if right else at + 1
        if at - start >= _REACH or end - at >= _REACH:
            continue
        if name := _name(text, start, end):
            yield name


def _name(text: bytes, start: int, end: int) -> Name | None:
    raw = text[start:end]
    bare = raw.strip(b"-.")
    first = start + raw.find(bare) if bare else start
    before = text[first - 1 : first] if first else b""
    if text[max(0, start - len(_DONE)) : start] == _DONE:
        return None
    if bare.lower().decode() in SPLIT and (said := _SAID.search(text[max(0, first - 20) : first])):
        two = said[1] + b"_" + bare  # "API key", "access token"
        sure = meaning(two)
        if sure is not None and sure.sure:
            return Name(start=first - len(said[0]), end=first + len(bare), meaning=sure)
    query = before in (b"?", b"&", b";") and text[first + len(bare) : first + len(bare) + 1] == b"="
    found = meaning(bare, query=query)
    if found is None:
        return None
    option = before == b"-" and (first < 2 or text[first - 2 : first - 1] in b"- \t\n\r\"'`\0=,[(")
    return Name(start=first, end=first + len(bare), meaning=found, option=option, query=query)
