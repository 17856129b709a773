"""The last command that failed before its job began: such a job leaves no files of its own.

Without a note about it, `stager diagnose` would report an older job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from bundle.protocol.codec import decode, encode
from bundle.protocol.json_values import AnyText
from bundle.protocol.words import LogMode
from bundle.system import permissions

from ..core.atomic_write import replacing
from ..core.errors import StagerError
from ..core.regular_files import opened
from . import files

NAME = ".refused.json"


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A command that failed before its job began."""

    command: str
    """``verify`` or ``run``."""
    time: float
    """When it failed, in seconds since the epoch."""
    message: AnyText
    """The message that was shown then."""
    hint: AnyText
    """The hint; may be empty."""
    context: tuple[AnyText, ...]
    """The supporting lines."""


@contextmanager
def remembered(log_dir: Path, command: str) -> Iterator[None]:
    """Leave a note if the block fails and no job has written anything meanwhile.

    Args:
        log_dir: the directory for the job's logs; without one, no older job can be mistaken.
        command: the command that the user has called.
    """
    started = time()
    try:
        yield
    except StagerError as exc:
        if log_dir.is_dir() and files.newest_change(log_dir) < started:
            _leave(log_dir / NAME, command, exc)
        raise


def _leave(path: Path, command: str, error: StagerError) -> None:
    note = Refused(
        command=command,
        time=time(),
        message=error.message,
        hint=error.hint,
        context=tuple(error.context),
    )
    text = json.dumps(encode(note)) + "\n"
    opener = permissions.opener(LogMode.PRIVATE)
    with suppress(OSError), replacing(path, opener) as file:  # the failure itself must be shown
        file.write(text.encode())


def newest(log_dir: Path) -> Refused | None:
    """Return the last such command; None where a job has begun since, or there was none."""
    path = log_dir / NAME
    try:
        with opened(path) as handle:
            raw = json.load(handle)
        if path.stat().st_mtime < files.newest_change(log_dir):
            return None
        return decode(Refused, raw)
    except (OSError, ValueError, RecursionError):
        return None
