"""The moment after which uploaded files do not count, as ``--exclude-newer`` takes it."""

from __future__ import annotations

import datetime
import re

NONE = "none"
"""Lifts the cutoff that a lock has kept."""
ALLOWED = "a date (2026-01-31), a time (2026-01-31T12:00:00Z), or none"

_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def checked(text: str) -> str:
    """Return a cutoff as it is kept in a lock: a date, a time with its zone, or ``none``.

    Raises:
        ValueError: it is none of these.
    """
    if text != NONE:
        timestamp(text)
    return text


def timestamp(text: str) -> str:
    """Return a cutoff as a time in UTC, which means the same on every machine.

    A date stands for its whole day, as with uv.

    Raises:
        ValueError: it is neither a date nor an RFC 3339 timestamp.
    """
    try:
        if _DATE.fullmatch(text):
            day = datetime.date.fromisoformat(text) + datetime.timedelta(days=1)
            return f"{day.isoformat()}T00:00:00Z"
        moment = datetime.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
        if moment.tzinfo is None:
            raise ValueError("it has no time zone")
        moment = moment.astimezone(datetime.timezone.utc)
    except OverflowError as exc:  # the day after 9999-12-31, or its like in another time zone
        raise ValueError("its year is not one of 1 to 9999 in UTC") from exc
    # Not strftime, which writes the year 999 with three digits.
    return f"{moment.replace(tzinfo=None).isoformat(timespec='seconds')}Z"
