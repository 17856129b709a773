"""One line of a requirement file, and the standard spelling of a requirement."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

_HASH = re.compile(r"--hash[=\s]\s*(\w+):(\S+)")
_HASH_OF_URL = re.compile(r"(?:^|&)(sha\d+|md5)=([^&;\s]+)")


@dataclass(frozen=True, kw_only=True)
class RequirementLine:
    """One requirement or constraint, as written."""

    text: str
    """The requirement, without comment and without options."""
    origin: str
    """Its place, for messages: ``requirements.txt:3`` or a key path."""
    base: Path
    """The folder that relative paths in it start from."""
    constraint: bool = False
    """True if it limits versions only."""
    metadata: bool = False
    """True in a ``pyproject.toml``, where no files are named."""
    by_uv: bool = False
    """True if uv reads it from its file, with the settings there."""
    options: str = ""
    """The options that stand behind it, of which only ``--hash`` is known."""
    hashes: tuple[str, ...] = ()
    """The sha256 of each file that may be installed for it; empty allows any file."""


def read_hashes(line: RequirementLine) -> tuple[str, ...]:
    """Return the sha256 digests in the options of a requirement and in the fragment of its URL.

    Raises:
        ValueError: there are hashes, but none is a sha256.
    """
    fragment = line.text.partition("#")[2]
    hashes = [*_HASH.findall(line.options), *_HASH_OF_URL.findall(fragment)]
    digests = tuple(value.lower() for name, value in hashes if name == "sha256")
    if hashes and not digests:
        raise ValueError(
            f"a {hashes[0][0]} cannot be checked; give the file's sha256, which `pip hash FILE` "
            "prints"
        )
    return digests


def normalize_requirement(requirement: Requirement) -> str:
    """Return the one spelling of a requirement, the same with every version of packaging."""
    name = canonicalize_name(requirement.name)
    extras = format_extras(requirement.extras)
    versions = ",".join(sorted(str(specifier) for specifier in requirement.specifier))
    url = f" @ {requirement.url}" if requirement.url else ""
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    return f"{name}{extras}{versions}{url}{marker}"


def list_names(texts: Iterable[str]) -> set[NormalizedName]:
    """Return the packages that requirements name; a text that is no requirement names none."""
    packages: set[NormalizedName] = set()
    for text in texts:
        with contextlib.suppress(InvalidRequirement):  # reported when the requirements are sorted
            packages.add(canonicalize_name(Requirement(text).name))
    return packages


def format_extras(names: Iterable[str]) -> str:
    """Return extras as they follow a name, ``[a,b]``; an empty string for no extras."""
    normalized = sorted(canonicalize_name(name) for name in names if name)
    if not normalized:
        return ""
    return f"[{','.join(normalized)}]"


def find_path(text: str, folders: Iterable[Path]) -> Path:
    """Return the path that a text means: the first that exists, else that in the first folder."""
    paths = [Path(os.path.normpath(folder / expand_user(text))) for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])


def write_lines(path: Path, lines: Iterable[str]) -> str:
    """Write a requirement file; return its path."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def expand_user(text: str) -> Path:
    """Return a path with a leading ``~`` expanded, if there is such a user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's own raises for an unknown one


def relative(path: Path, root: Path) -> str:
    """Return a path as seen from the project's folder; a path outside of it stays as it is."""
    return os.path.relpath(path, root) if path.is_relative_to(root) else str(path)
