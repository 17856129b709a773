"""Users and passwords that no name tells of: in URLs, and on the command lines of some programs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .false_positives import looks_random
from .spans import Span

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
_LONGEST = 200
"""Bytes of a password in quotes."""
_STEP = 64
"""Bytes after one such command in which no other one of its kind is looked for."""


def spans(text: bytes) -> Iterator[Span]:
    """All users and passwords in URLs and commands."""
    yield from _urls(text)
    for line in _PGPASS.finditer(text):
        yield Span.at(line.start(1), line.end(1), "password", line.start())
    for piped in _PIPED.finditer(text) if b"echo" in text or b"<<<" in text else ():
        number = piped.lastindex or 0
        yield Span.at(piped.start(number), piped.end(number), "password", piped.start())
    for needle, pattern in _PROGRAM.items():
        at = text.find(needle)
        while at >= 0:
            given = pattern.match(text, at)
            if given is not None:
                end = _end_of_quotes(text, at, given.start(1), given.end(1))
                yield Span.at(given.start(1), end, "password", at)
            at = text.find(needle, given.end() if given else at + _STEP)


def _end_of_quotes(text: bytes, command: int, start: int, end: int) -> int:
    """Where a password ends: where the quotes end that it, or the user before it, began in."""
    before = text[command:start]
    for mark in (b'"', b"'"):
        if before.count(mark) % 2:
            close = text.find(mark, end, end + _LONGEST)
            line = text.find(b"\n", end, end + _LONGEST)
            if close >= 0 and (line < 0 or close < line):
                return close
    return end


def _urls(text: bytes) -> Iterator[Span]:
    """Users and passwords in URLs."""
    at = text.find(b"://")
    while at >= 0:
        start = at + 3
        authority = _AUTHORITY.match(text, start)
        told = authority[0] if authority else b""
        user, sign, _ = told.rpartition(b"@")
        if not sign and b":" in told and not _PLAIN_URL.fullmatch(told):
            whole = _URL.match(text, start, start + 2048)  # a password with a slash in it
            user, sign, _ = (whole[0] if whole else b"").rpartition(b"@")
        if sign and (b":" in user or looks_random(user)) and not user.startswith(b"[redacted"):
            yield Span(
                start=start,
                end=start + len(user),
                kind="url-credential",
                anchor=at,
                learned=user.partition(b":")[2],
            )
        at = text.find(b"://", start)
    if b"@" in text:
        for found in _NO_SCHEME.finditer(text):
            end = found.start() + found[0].rindex(b"@")
            yield Span.at(found.start(), end, "url-credential")
