"""The stream in which the outputs of a job are sent from a node to the login side.

The stream, version 3, is made for a pipe (``srun``): one line of JSON, an uncompressed GNU tar, one
line of JSON. ``tail -n +2 | tar -t`` lists it by hand. The first line is a :class:`StreamHead`::

    {"results": 3, "roots": [path], "entries": n, "files": n, "bytes": n,
     "missing": [output], "left_out": {path: reason}}

The tar holds directories, files and symbolic links, and the GNU long names, nothing else. The last
line, a :class:`StreamEnd`, says that the stream is complete::

    {"end": 1, "sha256": hex digest of the tar, "changed": {path: what happened}, "gaps": n,
     "deleted": [path]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ..protocol.codec import AnyText, DecodeError, decode

VERSION = 3
LINE_LIMIT = 16 << 20
"""Bytes that a line of JSON may have."""
CHUNK = 1 << 20
"""Bytes of a file that are held in memory at a time."""
MOST_NAMES = 1000
"""Paths that are named with a reason; the others are only counted."""

_SHOWN_BYTES = 80
"""Bytes of a line that a message shows."""
_SHOWN_FAULT = 200
"""Characters of a fault that a message shows: a name in it may be as long as its line."""


class InvalidStream(Exception):
    """The stream holds something that no honest sender sends; the text is the reason."""


@dataclass(frozen=True)
class StreamHead:
    """The first line of the stream; its counts are upper limits of what follows."""

    results: int
    """The version."""
    roots: tuple[AnyText, ...]
    """The paths that the outputs stand for, none of them inside another.

    Each member of the tar is one of them or lies below one, directories before their content.
    """
    entries: int
    """Members of the tar; directories and links too."""
    files: int
    """Regular files among them."""
    bytes: int
    """Bytes of their content."""
    missing: tuple[AnyText, ...]
    """Outputs that match nothing."""
    left_out: dict[str, AnyText]
    """Paths that are not sent, each with the reason."""

    def __post_init__(self) -> None:
        _refuse_negative(entries=self.entries, files=self.files, bytes=self.bytes)


@dataclass(frozen=True)
class StreamEnd:
    """The last line of the stream."""

    end: int
    """Always 1."""
    sha256: AnyText
    """The digest of the tar."""
    changed: dict[str, AnyText]
    """Files that changed while they were sent, with what happened."""
    gaps: int
    """Files and directories that could not be read, or not to their end; unnamed ones too."""
    deleted: tuple[AnyText, ...] = ()
    """Earlier results that were sent to the node, and that the job has deleted there."""

    def __post_init__(self) -> None:
        _refuse_negative(gaps=self.gaps)


def read_head(line: bytes) -> StreamHead:
    """Read the first line.

    Raises:
        InvalidStream: it is no such line.
    """
    raw = _json_object(line)
    if raw is None or "results" not in raw:
        raise InvalidStream(f"it begins with {line[:_SHOWN_BYTES]!r}")
    if raw["results"] != VERSION:
        raise InvalidStream(f"it has version {raw['results']!r}, this program reads {VERSION}")
    try:
        return decode(StreamHead, raw)
    except DecodeError as exc:
        raise InvalidStream(f"its first line is damaged: {_shown(exc)}") from exc


def read_end(line: bytes) -> StreamEnd:
    """Read the last line.

    Raises:
        InvalidStream: it is no such line.
    """
    raw = _json_object(line)
    if raw is None or raw.get("end") != 1:
        raise InvalidStream(f"instead of its end mark, {line[:_SHOWN_BYTES]!r} follows")
    try:
        return decode(StreamEnd, raw)
    except DecodeError as exc:
        raise InvalidStream(f"its end mark is damaged: {_shown(exc)}") from exc


def some_of(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the first ``MOST_NAMES`` paths with their reasons, and how many more there are."""
    first = dict(list(reasons.items())[:MOST_NAMES])
    if len(reasons) > len(first):
        first["..."] = f"and {len(reasons) - len(first)} more"
    return first


def _json_object(line: bytes) -> dict[str, object] | None:
    try:
        raw = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) else None


def _shown(error: DecodeError) -> str:
    return str(error)[:_SHOWN_FAULT]


def _refuse_negative(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} is {count}")
