"""The source files of a local project, their digest, and a copy of them.

Files that version control ignores do not count, nor do those that builds and tools leave behind:
otherwise a build would change its own input, and every second lock would differ.

Git is asked, and ``stager.layers.ignore`` is not, though that knows the patterns too. A file that
git tracks although a pattern names it is part of the source, or its wheel could not be built; what
a user's global excludes name is not, or an editor's files would change the digest. The project's
layer (``stager.layers.project``) must be the same for every user: only its own files decide there.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..core.errors import StagerError
from ..core.processes import Runner, run
from ..core.store import sha256_of
from ..core.values import Digest

_LEFT_BEHIND = (
    *(".git", ".hg", ".svn", ".tox", ".nox", ".venv", ".mypy_cache", ".ruff_cache"),
    *(".pytest_cache", "__pycache__", "node_modules", "build", "dist", "*.egg-info", "*.pyc"),
    *("pylock.toml", "pylock.*.toml"),
)
_FROM_GIT = re.compile(
    rb"setuptools[-_](scm|git)|use_scm_version|hatch[-_]vcs|versioneer|versioningit|dunamai|"
    rb"dynamic-versioning|\bpbr\b|git.{0,4}describe|source *= *[\"']scm[\"']"
)
"""Words of a build that takes its version from git."""
_NAMES_AT_ONCE = 1000
"""Names in one command of git."""


def files(root: Path, *, skip: Iterable[Path] = (), run: Runner = run) -> list[Path]:
    """Return the files of a project, relative to its folder, sorted."""
    skipped = tuple(skip)
    counted = []
    for relative in _from_git(root, run) or _walk(root):
        path = root / relative
        if any(_is_left_behind(part) for part in relative.parts):
            continue
        if any(path.is_relative_to(folder) for folder in skipped):
            continue
        if path.is_file() or path.is_symlink():
            counted.append(relative)
    return sorted(counted)


def digest(root: Path, names: Sequence[Path]) -> Digest:
    """Return the digest of files' names, contents and executable bits, without place or time."""
    state = hashlib.sha256()
    for name in names:
        line = f"{name.as_posix()}\0{_description(root / name)}\n"
        state.update(line.encode(errors="surrogateescape"))
    return Digest(state.hexdigest())


def _description(path: Path) -> str:
    if path.is_symlink():
        return f"link {path.readlink()}"
    executable = "x" if os.access(path, os.X_OK) else "-"
    return f"{executable} {sha256_of(path)}"


def digest_content(path: Path, *, skip: Iterable[Path] = (), run: Runner = run) -> Digest:
    """Return the digest of a file, or of the files of a project that count."""
    if path.is_file():
        return sha256_of(path)
    return digest(path, files(path, skip=skip, run=run))


def copy(root: Path, names: Sequence[Path], to: Path) -> None:
    """Copy files to a new folder, links as links."""
    for name in names:
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target, follow_symlinks=False)


def copy_to_build(root: Path, to: Path, run: Runner = run) -> Path:
    """Copy a project into a folder, and return the copy; a build writes into its source.

    Where its version is taken from git, the copy gets the repository's history as well.
    """
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    if top is None or not _is_versioned_by_git(root):
        copy(root, files(root, run=run), to / root.name)
        return to / root.name
    copied = to / (top.name or "repository")
    copy(root, files(root, run=run), copied / root.relative_to(top))
    _add_history(top, copied, to / "history", run)
    return copied / root.relative_to(top)


def _is_versioned_by_git(root: Path) -> bool:
    for name in ("pyproject.toml", "setup.py", "setup.cfg"):
        try:
            if _FROM_GIT.search((root / name).read_bytes()):
                return True
        except OSError:
            continue
    return False


def _add_history(top: Path, copied: Path, scratch: Path, run: Runner) -> None:
    """Make a copy of a repository's files a work tree that is at the same commit.

    What was not copied does not count as removed, or each version would be that of a change.
    """
    git = ["git", "-C", str(copied)]

    def ask(*argv: str) -> str:
        return run(argv, timeout=600, check=False).stdout

    ask("git", "clone", "-q", "--shared", "--no-checkout", str(top), str(scratch))
    if not (scratch / ".git").is_dir():  # not ours, or no repository: the build says what it needs
        return
    (scratch / ".git").rename(copied / ".git")
    ask(*git, "reset", "-q")
    missing = [name for name in ask(*git, "ls-files", "-d", "-z").split("\0") if name]
    for start in range(0, len(missing), _NAMES_AT_ONCE):
        names = missing[start : start + _NAMES_AT_ONCE]
        ask(*git, "update-index", "--skip-worktree", "--", *names)


def _is_left_behind(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_BEHIND)


def _from_git(root: Path, run: Runner) -> list[Path]:
    """Return the files git tracks or would track; none outside of a work tree or without git."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return []
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = run(argv, timeout=60, check=False)
    except StagerError:
        return []
    if listing.returncode != 0:
        return []
    names = dict.fromkeys(listing.stdout.split("\0"))
    return [Path(name) for name in names if name]


def _walk(root: Path) -> Iterator[Path]:
    """Yield files and links below a folder; an environment is never part of a source."""
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [
            name
            for name in folders
            if not _is_left_behind(name) and not (here / name / "pyvenv.cfg").exists()
        ]
        linked = [name for name in folders if (here / name).is_symlink()]
        for name in (*names, *linked):
            yield here.relative_to(root) / name
