"""Tokens that are recognised by their form alone: a prefix, and what follows it."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .false_positives import looks_random
from .spans import Span

Check = Callable[[bytes], bool]


def _any(_: bytes) -> bool:
    return True


def _mixed(text: bytes) -> bool:
    """Return whether a text has letters and digits: a word of a language has no digits."""
    return bool(re.search(rb"[0-9]", text)) and bool(re.search(rb"[A-Za-z]", text))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The form of a kind of secret."""

    kind: str
    """The kind of secret."""
    needles: tuple[bytes, ...]
    """One of these is in it; a text with none of them is not looked at further."""
    pattern: re.Pattern[bytes]
    """All of it."""
    check: Check = _any
    """A further condition that a regular expression cannot express."""


def _shape(kind: str, needles: str, pattern: bytes, check: Check = _any) -> Shape:
    return Shape(
        kind=kind,
        needles=tuple(needles.encode().split()),
        pattern=re.compile(pattern),
        check=check,
    )


_EDGE = rb"(?<![A-Za-z0-9])"
_KEY_IN_BASE64 = rb"(?:b3BlbnNzaC1rZXk|LS0tLS1CRUdJTi)[A-Za-z0-9+/=_-]{16,}"
_JWT = rb"(?<![\w-])eyJ[\w-]{8,}(?:\.[\w-]*){1,4}"
SHAPES = (
    _shape("hf-token", "hf_ api_org_", rb"(?:hf|api_org)_[A-Za-z0-9]{30,}", _mixed),
    _shape("hf-token", "hf_", _EDGE + rb"hf_[A-Za-z0-9]{10,}", _mixed),
    _shape("github-token", "gh", rb"gh[pousr]_[A-Za-z0-9]{16,}"),
    _shape("github-token", "github_pat_", rb"github_pat_[A-Za-z0-9_]{16,}"),
    _shape(
        "gitlab-token",
        "glpat- glptt- gldt- glrt- glcbt- gloas- glft- glagent- glsoat-",
        rb"gl(?:pat|ptt|dt|rt|cbt|oas|ft|agent|soat)-[A-Za-z0-9_.-]{16,}",
    ),
    _shape("slack-token", "xox xapp-", rb"(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}", _mixed),
    _shape("webhook", "/services/ /webhooks/", rb"/(?:services|webhooks)/[\w/-]{20,}", _mixed),
    _shape("api-key", "sk- sk_ rk_", _EDGE + rb"[sr]k[-_][A-Za-z0-9_-]{20,}", _mixed),
    _shape("aws-key", "AKIA ASIA", rb"A(?:KIA|SIA)[A-Z0-9]{16}"),
    _shape("google-key", "AIza ya29.", rb"AIza[\w-]{35}|ya29\.[\w-]{20,}"),
    _shape("jwt", "eyJ", _JWT, lambda text: text.count(b".") > 1),
    _shape("private-key", "b3BlbnNzaC1rZXk LS0tLS1CRUdJTi", _KEY_IN_BASE64),
    _shape("private-key", "AGE-SECRET-KEY-", rb"AGE-SECRET-KEY-[A-Z0-9]{20,}"),
    _shape("pypi-token", "pypi-", rb"pypi-[A-Za-z0-9_-]{32,}", _mixed),
    _shape("npm-token", "npm_", rb"npm_[A-Za-z0-9]{20,}", _mixed),
    _shape("password-hash", "$", rb"\$(?:1|2[abxy]|5|6|y|argon2\w{1,3})\$[./A-Za-z0-9$=,]{20,}"),
    _shape("munge-credential", "MUNGE:", rb"MUNGE:[A-Za-z0-9+/=]+:?"),
    _shape(
        "token",
        "dapi dckr_pat_ r8_ nvapi- gsk_ SG. hvs. hvb. tskey- shpat_ wandb_v1_ ntn_ xai- lin_api_",
        _EDGE + rb"(?:dapi|dckr_pat_|r8_|nvapi-|gsk_|SG\.|hv[sb]\.|tskey-|shpat_|wandb_v1_|ntn_"
        rb"|xai-|lin_api_)[\w.-]{20,}",
        _mixed,
    ),
    _shape(
        "authorization",
        "earer EARER",
        rb"(?i:(?<=bearer )|(?<=bearer\t))[A-Za-z0-9._~+/=-]{8,}",
        lambda text: looks_random(text) or _mixed(text),
    ),
)  # fmt: skip
_BASIC = re.compile(rb"(?i:basic)[ \t]{1,8}([A-Za-z0-9+/_-]{6,}={0,2})")
_WANDB = re.compile(
    rb"(?:wandb|[Aa][Pp][Ii][ _-]?[Kk]ey|API_KEY|login|authorize)[^\n]{0,120}?"
    rb"(?<![0-9A-Za-z])([0-9a-f]{40})(?![0-9A-Za-z])"
)


def spans(text: bytes) -> Iterator[Span]:
    """Find all that looks like a token."""
    for shape in SHAPES:
        if _has_any(text, shape.needles):
            yield from _of_shape(text, shape)
    if _has_any(text, (b"asic", b"ASIC")):
        for match in _BASIC.finditer(text):
            if _is_login(match[1]):
                yield Span.at(match.start(1), match.end(1), "authorization")
    if _has_any(text, (b"wandb", b"API", b"api", b"Api")):
        for match in _WANDB.finditer(text):
            if b"commit" not in match[0]:
                yield Span.at(match.start(1), match.end(1), "wandb-key", match.start())


def _has_any(text: bytes, needles: tuple[bytes, ...]) -> bool:
    return any(needle in text for needle in needles)


def _of_shape(text: bytes, shape: Shape) -> Iterator[Span]:
    """Find the tokens of one form."""
    for match in shape.pattern.finditer(text):
        if shape.check(match[0]):
            yield Span.at(match.start(), match.end(), shape.kind)


def _is_login(text: bytes) -> bool:
    """Return whether base64 holds ``user:password``."""
    digits = text.rstrip(b"=")
    try:
        decoded = base64.b64decode(digits + b"=" * (-len(digits) % 4))
    except (binascii.Error, ValueError):
        return False
    return b":" in decoded and decoded.isascii() and decoded.decode().isprintable()
