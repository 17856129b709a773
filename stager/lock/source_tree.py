"""The files of a local project: which ones count, their digest, and a copy of them.

What version control ignores does not count, nor what builds and tools leave behind: otherwise a
build would change its own input, and every second lock would be a new one.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..core.errors import StagerError
from ..core.processes import Runner, run
from ..core.store import sha256_of
from ..core.values import Digest

_LEFT_BEHIND = (
    ".git",
    ".hg",
    ".svn",
    ".tox",
    ".nox",
    ".venv",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "__pycache__",
    "node_modules",
    "build",
    "dist",
    "*.egg-info",
    "*.pyc",
    "pylock.toml",
    "pylock.*.toml",
)


def files(root: Path, *, skip: Iterable[Path] = (), run: Runner = run) -> list[Path]:
    """The files of a project, relative to its folder, sorted.

    Args:
        root: the project's folder.
        skip: files and folders, absolute, that do not count.
        run: starts ``git``, which knows what is ignored; without it the folder is walked.
    """
    skipped = tuple(skip)
    found = []
    for relative in _from_git(root, run) or _walk(root):
        path = root / relative
        if any(fnmatch.fnmatch(part, pat) for part in relative.parts for pat in _LEFT_BEHIND):
            continue
        if any(path.is_relative_to(place) for place in skipped):
            continue
        if path.is_file() or path.is_symlink():
            found.append(relative)
    return sorted(found)


def digest(root: Path, names: Sequence[Path]) -> Digest:
    """The digest of files' names, contents and executable bits; not of their place or time."""
    state = hashlib.sha256()
    for name in names:
        path = root / name
        if path.is_symlink():
            what = f"link {path.readlink()}"
        else:
            runs = "x" if os.access(path, os.X_OK) else "-"
            what = f"{runs} {sha256_of(path)}"
        state.update(f"{name.as_posix()}\0{what}\n".encode(errors="surrogateescape"))
    return Digest(state.hexdigest())


def copy(root: Path, names: Sequence[Path], to: Path) -> None:
    """Copy files to a new folder, links as links."""
    for name in names:
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target, follow_symlinks=False)


def _from_git(root: Path, run: Runner) -> list[Path]:
    """What git tracks or would track; nothing where this is no work tree, or git is missing."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return []
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = run(argv, timeout=60, check=False)
    except StagerError:
        return []
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    return [Path(name) for name in dict.fromkeys(names) if name]


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        # A virtual environment is nobody's source, whatever it is called.
        folders[:] = [
            name
            for name in folders
            if not any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_BEHIND)
            and not (Path(folder) / name / "pyvenv.cfg").exists()
        ]
        here = Path(folder).relative_to(root)
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (here / name for name in [*names, *linked])
