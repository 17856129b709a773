"""The place of a file that a command makes about a job: never one of the job's own files."""

from __future__ import annotations

import os
from pathlib import Path

from ..core.errors import StagerError
from .files import JobFiles

_HINT = "name another one with --output"


def output_place(path: Path, files: JobFiles, what: str) -> Path:
    """Return the path that a file is written to; a link stays one, and its target is renewed.

    Raises:
        StagerError: a device or a pipe lies there, or one of the job's own files.
    """
    place = Path(os.path.realpath(path))  # unlike resolve(), it takes a loop of links as it is
    if place.exists() and not place.is_file():
        raise StagerError(
            f"{path} is not a regular file, so {what} cannot be written there", hint=_HINT
        )
    own = [*(log.path for log in files.logs), files.events, files.job, files.order]
    if str(place) in map(os.path.realpath, own):
        raise StagerError(
            f"{path} is one of the files that {what} is made from, and would be lost", hint=_HINT
        )
    return place
