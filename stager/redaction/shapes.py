"""Secrets that give themselves away by their form, or by the command or the URL they stand in."""

from __future__ import annotations

import base64
import binascii
import bisect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .spans import Span, end_of
from .values import looks_random

Check = Callable[[re.Match[bytes]], bool]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The form of a kind of secret."""

    kind: str
    """The kind of secret."""
    needles: tuple[bytes, ...]
    """One of these is in it; a text with none of them is not looked at further."""
    pattern: re.Pattern[bytes]
    """All of it; where the pattern has groups, the one that matches is the secret."""
    check: Check | None = None
    """A further condition that a regular expression cannot express."""


def _secret(match: re.Match[bytes]) -> bytes:
    return match[match.lastindex or 0]


def _mixed(match: re.Match[bytes]) -> bool:
    """Return whether a secret has letters and digits: a word of a language has no digits."""
    text = _secret(match)
    return bool(re.search(rb"[0-9]", text)) and bool(re.search(rb"[A-Za-z]", text))


def _is_jwt(match: re.Match[bytes]) -> bool:
    return match[0].count(b".") > 1


def _is_bearer(match: re.Match[bytes]) -> bool:
    return looks_random(match[0]) or _mixed(match)


def _is_no_commit(match: re.Match[bytes]) -> bool:
    return b"commit" not in match[0]


def _is_login(match: re.Match[bytes]) -> bool:
    """Return whether base64 holds ``user:password``."""
    digits = _secret(match).rstrip(b"=")
    try:
        decoded = base64.b64decode(digits + b"=" * (-len(digits) % 4))
    except (binascii.Error, ValueError):
        return False
    return b":" in decoded and decoded.isascii() and decoded.decode().isprintable()


def _shape(kind: str, needles: str, pattern: bytes, check: Check | None = None) -> Shape:
    return Shape(
        kind=kind,
        needles=tuple(needles.encode().split()),
        pattern=re.compile(pattern, re.M),
        check=check,
    )


_EDGE = rb"(?<![A-Za-z0-9])"
_KEY_IN_BASE64 = rb"(?:b3BlbnNzaC1rZXk|LS0tLS1CRUdJTi)[A-Za-z0-9+/=_-]{16,}"
_JWT = rb"(?<![\w-])eyJ[\w-]{8,}(?:\.[\w-]*){1,4}"
_GITLAB = rb"gl(?:pat|ptt|dt|rt|cbt|oas|ft|agent|soat)-[A-Za-z0-9_.-]{16,}"
_PREFIXED = (
    rb"(?:dapi|dckr_pat_|r8_|nvapi-|gsk_|SG\.|hv[sb]\.|tskey-|shpat_|wandb_v1_|ntn_|xai-|lin_api_)"
    rb"[\w.-]{20,}"
)
_WANDB = (
    rb"(?:wandb|[Aa][Pp][Ii][ _-]?[Kk]ey|API_KEY|login|authorize)[^\n]{0,120}?"
    rb"(?<![0-9A-Za-z])([0-9a-f]{40})(?![0-9A-Za-z])"
)
_NO_SCHEME = (
    rb"(?<![\w./:@-])([\w.+-]{1,64}:(?![0-9]{1,5}@sha)[^\s:@/\"'<>]{3,80})"
    rb"@(?:tcp\(|[\w-]{1,63}(?:\.[\w-]{1,63}){1,6})"
)
"""``user:password@tcp(host)`` and the like."""
_PGPASS = rb"^[\w.*-]{1,80}:(?:[0-9]{1,5}|\*):[^:\s]{1,80}:[^:\s]{1,80}:([^:\s]{1,200})\r?$"
"""A line of PostgreSQL's file of passwords: host, port, database, user, password."""
_GIVEN = rb"(?!\[redacted)([^\s\"'|]{2,200})"
_READER = rb"(?:-stdin|--with-token|\bsudo[ ]-S|\bkinit|\bpasswd)"
_ECHO = rb"\becho[ \t]{1,9}(?:-n[ \t]{1,9})?[\"']?" + _GIVEN + rb"[\"']?[ \t]{0,9}\|[^\n]{0,160}?"
"""A password that a command reads from another one."""
SHAPES = (
    _shape("hf-token", "hf_ api_org_", rb"(?:hf|api_org)_[A-Za-z0-9]{30,}", _mixed),
    _shape("hf-token", "hf_", _EDGE + rb"hf_[A-Za-z0-9]{10,}", _mixed),
    _shape("github-token", "gh", rb"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"),
    _shape("gitlab-token", "gl", _GITLAB),
    _shape("slack-token", "xox xapp-", rb"(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}", _mixed),
    _shape("webhook", "/services/ /webhooks/", rb"/(?:services|webhooks)/[\w/-]{20,}", _mixed),
    _shape("api-key", "sk- sk_ rk_ rk-", _EDGE + rb"[sr]k[-_][A-Za-z0-9_-]{20,}", _mixed),
    _shape("aws-key", "AKIA ASIA", rb"A(?:KIA|SIA)[A-Z0-9]{16}"),
    _shape("google-key", "AIza ya29.", rb"AIza[\w-]{35}|ya29\.[\w-]{20,}"),
    _shape("jwt", "eyJ", _JWT, _is_jwt),
    _shape("private-key", "b3BlbnNzaC1rZXk LS0tLS1CRUdJTi", _KEY_IN_BASE64),
    _shape("private-key", "AGE-SECRET-KEY-", rb"AGE-SECRET-KEY-[A-Z0-9]{20,}"),
    _shape("pypi-token", "pypi-", rb"pypi-[A-Za-z0-9_-]{32,}", _mixed),
    _shape("npm-token", "npm_", rb"npm_[A-Za-z0-9]{20,}", _mixed),
    _shape("password-hash", "$", rb"\$(?:1|2[abxy]|5|6|y|argon2\w{1,3})\$[./A-Za-z0-9$=,]{20,}"),
    _shape("munge-credential", "MUNGE:", rb"MUNGE:[A-Za-z0-9+/=]+:?"),
    _shape(
        "token",
        "dapi dckr_pat_ r8_ nvapi- gsk_ SG. hvs. hvb. tskey- shpat_ wandb_v1_ ntn_ xai- lin_api_",
        _EDGE + _PREFIXED,
        _mixed,
    ),
    _shape(
        "authorization",
        "earer EARER",
        rb"(?i:(?<=bearer )|(?<=bearer\t))[A-Za-z0-9._~+/=-]{8,}",
        _is_bearer,
    ),
    _shape(
        "authorization", "asic ASIC", rb"(?i:basic)[ \t]{1,8}([A-Za-z0-9+/_-]{6,}={0,2})", _is_login
    ),
    _shape("wandb-key", "wandb API api Api", _WANDB, _is_no_commit),
    _shape("url-credential", "@", _NO_SCHEME),
    _shape("password", ":", _PGPASS),
    _shape("password", "echo", _ECHO + rb"(?:-stdin|--with-token|sudo[ ]-S|kinit|passwd)"),
    _shape("password", "<<<", _READER + rb"[^\n|]{0,80}?<<<[ ]?[\"']?" + _GIVEN),
)  # fmt: skip
_CURL = rb"\b[^\n]{0,160}?[ \t](?:-u|-U|--user|--proxy-user)[ =\t]{0,9}[\"']?[^\s:\"']{1,80}:"
_LOGIN = rb"[ \t]login\b[^\n]{0,160}?[ \t]-p[ \t]{1,9}"
_PROGRAMS = {
    b"sshpass": rb"[ \t]{1,9}-p[ \t]{0,9}",
    b"docker": rb"[ \t]{0,8}" + _LOGIN,
    b"podman": rb"[ \t]{0,8}" + _LOGIN,
    b"apptainer": rb"[^\n]{0,80}?" + _LOGIN,
    b"singularity": rb"[^\n]{0,80}?" + _LOGIN,
    b"mysql": rb"(?:dump|admin)?\b[^\n]{0,160}?[ \t]-p(?=\S)",
    b"pass:": b"",
    b"ldap": rb"(?:search|whoami|add|modify|passwd)\b[^\n]{0,160}?[ \t]-w[ \t]{0,9}",
    b"smbclient": rb"\b[^\n]{0,160}?[ \t]-U[ \t]{0,9}[^\s%]{1,80}%",
    b"login(": rb"\s{0,40}(?:\w{1,20}[ ]?=[ ]?)?[bf]?(?=[\"'])",
    b"curl": _CURL,
    b"wget": _CURL,
}
"""Commands that take a password as an argument without a name: what stands before it."""
_PROGRAM = {
    program: re.compile(re.escape(program) + before + rb"[\"']?(?!\[redacted)([^\s\"']{2,})")
    for program, before in _PROGRAMS.items()
}
_QUOTED_BYTES = 200
"""Bytes of a password in quotes."""
_STEP = 64
"""Bytes after a command in which no other one of its kind is looked for."""
_AUTHORITY = re.compile(rb"[^\s/?#\"'<>\\]*")
_URL = re.compile(rb"[^\s\"'<>]*")
_PLAIN_URL = re.compile(rb"[A-Za-z0-9._-]*(?::[0-9]{1,5})?")
_URL_BYTES = 2048
_BEGIN = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key"
)
_END = re.compile(rb"-----END (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----|Private-MAC: \w+")
_BODY = re.compile(
    rb"(?:[A-Za-z0-9+/=]{16,}|\\+[nr]|[\s,\"']|\[\w{1,20}\]: |(?:Proc-Type|DEK-Info): [^\n]{1,80})*"
)
_KEY_LINE = re.compile(rb"(?:\[\w{1,20}\]: )?[A-Za-z0-9+/=]{4,}")
_KEY_BYTES = 1 << 16
"""No private key is longer."""


def spans(text: bytes) -> Iterator[Span]:
    """Find all that looks like a secret."""
    for shape in SHAPES:
        if any(needle in text for needle in shape.needles):
            yield from _of_shape(text, shape)
    for program, pattern in _PROGRAM.items():
        yield from _in_commands(text, program, pattern)
    yield from _in_urls(text)
    if b"PRIVATE KEY" in text or b"PuTTY-User-Key" in text:
        yield from _private_keys(text)


def _of_shape(text: bytes, shape: Shape) -> Iterator[Span]:
    for match in shape.pattern.finditer(text):
        if shape.check is None or shape.check(match):
            start, end = match.span(match.lastindex or 0)
            yield Span.at(start, end, shape.kind, match.start())


def _in_commands(text: bytes, program: bytes, pattern: re.Pattern[bytes]) -> Iterator[Span]:
    at = text.find(program)
    while at >= 0:
        match = pattern.match(text, at)
        following = at + _STEP
        if match is not None:
            end = _end_of_quotes(text, at, match.start(1), match.end(1))
            yield Span.at(match.start(1), end, "password", at)
            following = match.end()
        at = text.find(program, following)


def _end_of_quotes(text: bytes, command: int, start: int, end: int) -> int:
    """Return where a password ends: with the quotes that it, or the user before it, began in."""
    before = text[command:start]
    for mark in (b'"', b"'"):
        if before.count(mark) % 2:
            close = text.find(mark, end, end + _QUOTED_BYTES)
            line = text.find(b"\n", end, end + _QUOTED_BYTES)
            if close >= 0 and (line < 0 or close < line):
                return close
    return end


def _in_urls(text: bytes) -> Iterator[Span]:
    at = text.find(b"://")
    while at >= 0:
        start = at + 3
        login = _login(text, start)
        is_secret = b":" in login or looks_random(login)
        if is_secret and not login.startswith(b"[redacted"):
            yield Span(
                start=start,
                end=start + len(login),
                kind="url-credential",
                anchor=at,
                learned=login.partition(b":")[2],
            )
        at = text.find(b"://", start)


def _login(text: bytes, start: int) -> bytes:
    authority = text[start : end_of(_AUTHORITY, text, start)]
    login, sign, _ = authority.rpartition(b"@")
    if not sign and b":" in authority and not _PLAIN_URL.fullmatch(authority):
        # a password with a slash in it
        url = text[start : end_of(_URL, text, start, start + _URL_BYTES)]
        login, _, _ = url.rpartition(b"@")
    return login


def _private_keys(text: bytes) -> Iterator[Span]:
    """Find the keys in PEM; of one that has lost its beginning or its end, what is left of it."""
    ends = list(_END.finditer(text))
    places = [match.end() for match in ends]
    begins = list(_BEGIN.finditer(text))
    next_begins = [match.start() for match in begins[1:]] + [len(text)]
    for begin, next_begin in zip(begins, next_begins, strict=False):
        stop = min(begin.end() + _KEY_BYTES, len(text), next_begin)
        nearest = bisect.bisect_right(places, begin.end())
        if nearest < len(places) and places[nearest] <= stop:
            end = places[nearest]
        else:
            body = text[begin.end() : end_of(_BODY, text, begin.end(), stop)]
            end = begin.end() + len(body.rstrip(b" \t\r\n,\"'\\"))
        yield Span.at(begin.start(), end, "private-key")
    for last in ends:
        first = _first_key_line(text, last.start())
        if first < last.start():
            yield Span.at(first, last.end(), "private-key")


def _first_key_line(text: bytes, end_line: int) -> int:
    first = line = end_line
    while first > 0 and end_line - line < _KEY_BYTES // 4:
        line = text.rfind(b"\n", max(0, first - 160), max(0, first - 1)) + 1
        if not _KEY_LINE.fullmatch(text[line:first].strip()):
            break
        first = line
    return first
