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

from bundle.protocol.codec import AnyText, decode, encode
from bundle.protocol.enumerations import LogMode
from bundle.system import permissions

from ..core.errors import StagerError
from ..core.files import opened, replacing
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
    project: AnyText = ""
    """The project's settings file, or the folder where there is none; empty if unknown."""


@contextmanager
def remembered(log_dir: Path, command: str, project: Path) -> Iterator[None]:
    """Leave a note if the block fails and no job has written anything meanwhile."""
    started = time()
    try:
        yield
    except StagerError as exc:
        if log_dir.is_dir() and files.newest_change(log_dir) < started:
            _leave(log_dir / NAME, command, project, exc)
        raise


def _leave(path: Path, command: str, project: Path, error: StagerError) -> None:
    note = Refused(
        command=command,
        time=time(),
        message=error.message,
        hint=error.hint,
        context=tuple(error.context),
        project=str(project),
    )
    text = json.dumps(encode(note)) + "\n"
    opener = permissions.opener(LogMode.PRIVATE)
    with suppress(OSError), replacing(path, opener) as file:  # the failure itself must be shown
        file.write(text.encode())


def newest(log_dir: Path, project: Path) -> Refused | None:
    """Return the last such command of a project; None where a job has begun since it."""
    path = log_dir / NAME
    try:
        with opened(path) as handle:
            raw = json.load(handle)
        if path.stat().st_mtime < files.newest_change(log_dir):
            return None
        refusal = decode(Refused, raw)
    except (OSError, ValueError, RecursionError):
        return None
    return refusal if refusal.project in ("", str(project)) else None
