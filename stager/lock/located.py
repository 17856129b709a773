"""Requirements that name their place: a folder, an archive, a URL; and what they become."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..core.values import Digest
from .requirements import expanded, extras_of

SDIST_ENDINGS = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz")
ARCHIVES = (".whl", *SDIST_ENDINGS)

_DIRECT = re.compile(
    r"(?P<where>[^;\[\]\s]+|[^;]+?)\s*(\[(?P<extras>[^\]]*)\])?\s*(;(?P<marker>.*))?"
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Something that is built into a wheel before anything is resolved."""

    requirement: str
    """What pip is asked to build: a path, or a URL; may hold credentials."""
    label: str
    """The same as the user wrote it, without credentials; relative paths start at the root."""
    suffix: str
    """Extras and marker of the requirement, as they follow the name: ``[train]``."""
    marker: str
    """The environment marker, or nothing."""
    digest: Digest
    """Digest of its content, or of its URL where the content is elsewhere."""
    moving: bool
    """Whether the same digest may stand for another content later (a branch, say)."""


def looks_direct(text: str) -> bool:
    """Return whether a line that is no requirement by the standard (PEP 508) names a place."""
    where = text.partition(";")[0].strip()
    return where.startswith((".", "/", "~")) or "/" in where or where.endswith(ARCHIVES)


def split(text: str) -> tuple[str, str, str] | None:
    """Return place, extras and marker of a line that names a place; None if it is no such line."""
    match = _DIRECT.fullmatch(text)
    if match is None:
        return None
    extras = extras_of(part.strip() for part in (match["extras"] or "").split(","))
    return match["where"].strip(), extras, (match["marker"] or "").strip()


def is_project(folder: Path) -> bool:
    """Return whether a folder can be built into a wheel."""
    return (folder / "pyproject.toml").is_file() or (folder / "setup.py").is_file()


def local_path(where: str, folders: Iterable[Path]) -> Path:
    """Return the path that a line means: the first that exists, else that in the first folder.

    pip starts at the current folder; here a path starts at the file's, then at the project's.
    """
    text = unquote(urlsplit(where).path) if where.startswith("file://") else where
    paths = [Path(os.path.normpath(folder / expanded(text))) for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])


def relative(path: Path, root: Path) -> str:
    """Return a path as seen from the project's folder; one outside of it stays as it is."""
    return os.path.relpath(path, root) if path.is_relative_to(root) else str(path)
