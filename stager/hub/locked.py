"""A repository in the lock: its commit, and the size and digest of each file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from bundle.protocol.digest import Digest

from .names import HubRequest, request_from

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file of a repository at one commit."""

    path: str
    """Its path in the repository, with forward slashes."""
    size: int
    """Length in bytes."""
    sha256: Digest
    """Digest of its bytes."""


@dataclass(frozen=True, kw_only=True)
class LockedRepository:
    """A model or data set at one commit."""

    request: HubRequest
    """What the user asked for when it was resolved."""
    commit: str
    """The commit's full name: 40 hexadecimal digits."""
    licence: str
    """The licence that its card names; empty if it names none."""
    files: tuple[HubFile, ...]
    """The files that are taken, sorted by path."""
    left_out: tuple[str, ...]
    """The other files in the repository, sorted by path."""

    @property
    def size(self) -> int:
        """Sum of the files' lengths in bytes."""
        return sum(file.size for file in self.files)

    def to_dict(self) -> dict[str, object]:
        """Return the lock's entry."""
        return {
            **self.request.to_dict(),
            "commit": self.commit,
            "licence": self.licence,
            "left-out": list(self.left_out),
            "content": [
                {"path": file.path, "size": file.size, "sha256": str(file.sha256)}
                for file in self.files
            ],
        }


def locked_from(data: object) -> LockedRepository:
    """Read an entry of the lock, which somebody may have edited.

    Raises:
        ValueError: it is not such an entry; the message names the key.
    """
    if not isinstance(data, Mapping):
        raise ValueError("not a table")
    fields = dict(data)
    commit, licence = fields.pop("commit", None), fields.pop("licence", "")
    left_out, content = fields.pop("left-out", []), fields.pop("content", None)
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError("commit: not 40 hexadecimal digits")
    if not isinstance(licence, str) or not licence.isprintable():
        raise ValueError("licence: not a text")
    if not isinstance(content, list) or not content or not isinstance(left_out, list):
        raise ValueError("content or left-out: not what a lock has there")
    if not all(isinstance(path, str) and is_safe(path) for path in left_out):
        raise ValueError("left-out: not a list of paths in a repository")
    return LockedRepository(
        request=request_from(fields),
        commit=commit,
        licence=licence,
        files=tuple(map(_file, content)),
        left_out=tuple(left_out),
    )


def _file(data: object) -> HubFile:
    if not isinstance(data, Mapping):
        raise ValueError("content: not a list of files")
    path, size = data.get("path"), data.get("size")
    if not isinstance(path, str) or not is_safe(path):
        raise ValueError(f"content: {path!r} is not a path in a repository")
    if type(size) is not int or size < 0:
        raise ValueError(f"content: {path} has the size {size!r}")
    return HubFile(path=path, size=size, sha256=Digest(str(data.get("sha256"))))


def is_safe(path: str) -> bool:
    """Return True for a path that stays in its repository, whatever it is joined to."""
    parts = PurePosixPath(path).parts
    plain = bool(parts) and path.isprintable() and "\\" not in path
    return plain and "/".join(parts) == path and not {"..", "/"}.intersection(parts)
