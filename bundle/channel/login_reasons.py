"""The reasons for which a login over ``ssh`` fails, found in its own words. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..protocol.problem import ProblemCode

REASONS = (
    (ProblemCode.SSH_KEY_CHANGED, re.compile(r"REMOTE HOST IDENTIFICATION HAS CHANGED")),
    (
        ProblemCode.SSH_KEY_UNKNOWN,
        re.compile(r"Host key verification failed|No \S+ host key is known"),
    ),
    (ProblemCode.SSH_NAME_UNKNOWN, re.compile(r"Could not resolve hostname")),
    (
        ProblemCode.SSH_NO_LOGIN,
        re.compile(r"Permission denied|Too many authentication failures|Authentication failed"),
    ),
    (
        ProblemCode.SSH_UNREACHED,
        re.compile(
            r"connect to (?:host|address) .*|Connection timed out|Connection refused|open failed"
        ),
    ),
    # What it says of a jump host comes before what it says of the host behind that one.
    (ProblemCode.SSH_TURNED_AWAY, re.compile(r"^Connection (?:closed|reset) by (?!UNKNOWN)")),
    (ProblemCode.SSH_TURNED_AWAY, re.compile(r"(?:kex|ssh)_exchange_identification: ")),
)
"""The most telling ones first: behind a jump host that cannot go on, ``ssh`` also says that the
connection was closed."""


def reason(said: Sequence[str]) -> ProblemCode | None:
    """Return why a login has failed; None where the lines of ``ssh`` do not tell."""
    codes = (code for code, pattern in REASONS if any(map(pattern.search, said)))
    return next(codes, None)


def telling_line(said: Sequence[str]) -> str:
    """Return the line that says why a login has failed; empty if there is none.

    Of a key that has changed the last line says less than the problem itself does.
    """
    for code, pattern in REASONS:
        lines = [line for line in said if pattern.search(line)]
        if lines and code is not ProblemCode.SSH_KEY_CHANGED:
            return lines[-1].removeprefix("ssh: ").rstrip(".")
    return ""
