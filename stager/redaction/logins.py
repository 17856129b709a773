"""Users and passwords without a name: in URLs, and on the command lines of some programs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .false_positives import looks_random
from .spans import Span, end_of

_AUTHORITY = re.compile(rb"[^\s/?#\"'<>\\]*")
_URL = re.compile(rb"[^\s\"'<>]*")
_PLAIN_URL = re.compile(rb"[A-Za-z0-9._-]*(?::[0-9]{1,5})?")
_NO_SCHEME = re.compile(
    rb"(?<![\w./:@-])[\w.+-]{1,64}:(?![0-9]{1,5}@sha)[^\s:@/\"'<>]{3,80}"
    rb"@(?:tcp\(|[\w-]{1,63}(?:\.[\w-]{1,63}){1,6})"
)
_GIVEN = rb"(?!\[redacted)([^\s\"'|]{2,200})"
_CURL = rb"[^\n]{0,160}?[ \t](?:-u|-U|--user|--proxy-user)[ =\t]{0,9}[\"']?[^\s:\"']{1,80}:"
_PROGRAMS = {
    b"sshpass": rb"sshpass[ \t]{1,9}-p[ \t]{0,9}",
    b"docker": rb"docker[ \t]{1,9}login\b[^\n]{0,160}?[ \t]-p[ \t]{1,9}",
    b"podman": rb"podman[ \t]{1,9}login\b[^\n]{0,160}?[ \t]-p[ \t]{1,9}",
    b"apptainer": rb"apptainer[^\n]{0,80}?[ \t]login\b[^\n]{0,160}?[ \t]-p[ \t]{1,9}",
    b"singularity": rb"singularity[^\n]{0,80}?[ \t]login\b[^\n]{0,160}?[ \t]-p[ \t]{1,9}",
    b"mysql": rb"mysql(?:dump|admin)?\b[^\n]{0,160}?[ \t]-p(?=\S)",
    b"pass:": rb"pass:",
    b"ldap": rb"ldap(?:search|whoami|add|modify|passwd)\b[^\n]{0,160}?[ \t]-w[ \t]{0,9}",
    b"smbclient": rb"smbclient\b[^\n]{0,160}?[ \t]-U[ \t]{0,9}[^\s%]{1,80}%",
    b"login(": rb"login\(\s{0,40}(?:\w{1,20}[ ]?=[ ]?)?[bf]?(?=[\"'])",
    b"curl": rb"curl\b" + _CURL,
    b"wget": rb"wget\b" + _CURL,
}
_PROGRAM = {
    needle: re.compile(before + rb"[\"']?(?!\[redacted)([^\s\"']{2,})")
    for needle, before in _PROGRAMS.items()
}
"""Commands that take a password as an argument without a name."""
_PIPED = re.compile(
    rb"\becho[ \t]{1,9}(?:-n[ \t]{1,9})?[\"']?" + _GIVEN + rb"[\"']?[ \t]{0,9}\|[^\n]{0,160}?"
    rb"(?:-stdin|--with-token|sudo[ ]-S|kinit|passwd)"
    rb"|(?:-stdin|--with-token|\bsudo[ ]-S|\bkinit|\bpasswd)[^\n|]{0,80}?"
    rb"<<<[ ]?[\"']?" + _GIVEN
)
"""A password that a command reads from another one."""
_PGPASS = re.compile(
    rb"^[\w.*-]{1,80}:(?:[0-9]{1,5}|\*):[^:\s]{1,80}:[^:\s]{1,80}:([^:\s]{1,200})\r?$", re.M
)
"""A line of PostgreSQL's file of passwords: host, port, database, user, password."""
_QUOTED_BYTES = 200
"""Bytes of a password in quotes."""
_URL_BYTES = 2048
_STEP = 64
"""Bytes after a command in which no other one of its kind is looked for."""


def spans(text: bytes) -> Iterator[Span]:
    """Find all users and passwords in URLs and commands."""
    yield from _in_urls(text)
    yield from _without_scheme(text)
    for line in _PGPASS.finditer(text):
        yield Span.at(line.start(1), line.end(1), "password", line.start())
    if b"echo" in text or b"<<<" in text:
        for match in _PIPED.finditer(text):
            group = match.lastindex or 0
            yield Span.at(match.start(group), match.end(group), "password", match.start())
    for needle, pattern in _PROGRAM.items():
        yield from _in_commands(text, needle, pattern)


def _in_commands(text: bytes, needle: bytes, pattern: re.Pattern[bytes]) -> Iterator[Span]:
    """Find the passwords that one program is given."""
    at = text.find(needle)
    while at >= 0:
        match = pattern.match(text, at)
        following = at + _STEP
        if match is not None:
            end = _end_of_quotes(text, at, match.start(1), match.end(1))
            yield Span.at(match.start(1), end, "password", at)
            following = match.end()
        at = text.find(needle, following)


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
    """Find the users and passwords in URLs."""
    at = text.find(b"://")
    while at >= 0:
        start = at + 3
        login = _login(text, start)
        if _is_secret(login):
            yield Span(
                start=start,
                end=start + len(login),
                kind="url-credential",
                anchor=at,
                learned=login.partition(b":")[2],
            )
        at = text.find(b"://", start)


def _login(text: bytes, start: int) -> bytes:
    """Return what a URL has before its ``@``: a user, a password, a token; empty for none."""
    authority = text[start : end_of(_AUTHORITY, text, start)]
    login, sign, _ = authority.rpartition(b"@")
    if not sign and b":" in authority and not _PLAIN_URL.fullmatch(authority):
        # a password with a slash in it
        url = text[start : end_of(_URL, text, start, start + _URL_BYTES)]
        login, _, _ = url.rpartition(b"@")
    return login


def _is_secret(login: bytes) -> bool:
    """Return whether a login has a password, or is a token itself."""
    if login.startswith(b"[redacted"):
        return False
    return b":" in login or looks_random(login)


def _without_scheme(text: bytes) -> Iterator[Span]:
    """Find the users and passwords in addresses such as ``user:password@tcp(host)``."""
    if b"@" in text:
        for match in _NO_SCHEME.finditer(text):
            end = match.start() + match[0].rindex(b"@")
            yield Span.at(match.start(), end, "url-credential")
