"""What of a project, and of the assets it names, goes into the bundle.

Nothing is written here, and all that stands in the way is reported at once.
"""

from __future__ import annotations

import difflib
import errno
import glob
import os
import posixpath
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.errors import ConfigError
from .ignore import Ignore, anchored, excluded
from .tree import Collector, Tree, TreeFile, kind_of, shown, tree_digest

__all__ = ["Tree", "TreeFile", "asset_excludes", "asset_files", "project_files", "tree_digest"]

NEVER_SHIPPED = (
    *(".git", ".hg", ".svn", ".DS_Store", "__pycache__/", "*.pyc", ".venv", "node_modules/"),
    "stager-support-*.tar.gz",  # our own, of an earlier job
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/"),
    # The project comes first on sys.path: what an editable install left behind would hide the
    # bundle's own metadata from importlib.metadata and from plug-in discovery.
    "*.egg-info/",
)
"""Patterns for what tools leave behind, of use only where it was made; no setting takes it back."""
ENVIRONMENT_MARKS = {"pyvenv.cfg": "a virtual environment", "conda-meta": "a conda environment"}
"""A directory that holds one of these is a Python environment; the bundle brings its own."""
NEARBY = 5
"""How many names a message lists of a directory that does not hold the one asked for."""


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """The patterns that hold in one directory of the project."""

    never: Ignore
    """``NEVER_SHIPPED``."""
    forced: Ignore
    """``project.exclude``, which decides before any ``.gitignore``."""
    prefix: str
    """Where the project lies in the git repository around it, with a slash at the end, or empty."""
    gitignores: tuple[Ignore, ...]
    """The ``.gitignore`` files from the outermost directory to this one."""

    def leave_out(self, path: str, *, is_dir: bool) -> bool:
        if self.never.decide(path, is_dir=is_dir):
            return True
        forced = self.forced.decide(path, is_dir=is_dir)
        if forced is not None:
            return forced
        return excluded(self.gitignores, self.prefix + path, is_dir=is_dir)


@dataclass(frozen=True, kw_only=True)
class _Asset:
    """A file or directory that ``assets.paths`` names."""

    path: str
    """Where it goes in the tree."""
    source: str
    """Where it lies, as the user wrote it."""
    real: str
    """Where it lies when every link is followed."""
    inside: bool
    """Whether it lies in the project; its path in the tree is then its path there."""


def project_files(root: Path, exclude: Sequence[str]) -> Tree:
    """List what of a project is shipped.

    Left out is what ``exclude`` names, what the ``.gitignore`` files of the project and of the git
    repository around it name, what ``NEVER_SHIPPED`` names, and Python environments. Git itself is
    not asked, so a file that it tracks although a pattern names it is left out; ``"!/that/file"``
    in ``exclude`` takes it back, within the limits that git sets to taking back.

    Args:
        root: the project's directory.
        exclude: patterns as in a ``.gitignore`` in ``root``; what they say of a path wins.

    Raises:
        ConfigError: ``root`` is not a directory.
        StagerError: files that cannot be read, or whose names cannot be shipped; all of them.
    """
    if not os.path.isdir(root):  # noqa: PTH112 - Path's raises where it may not look
        base = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links
        raise ConfigError(f"project.path: {str(root)!r} is not a directory", hint=_nearby(base))
    found = Collector()
    prefix, above = _rules_above(found, root.resolve())
    rules = _Rules(
        never=Ignore(NEVER_SHIPPED), forced=Ignore(exclude), prefix=prefix, gitignores=above
    )
    _walk_project(found, str(root), "", rules)
    return found.tree(
        what=f"the project {root}",
        hint="make them readable, rename them, or leave them out with project.exclude",
    )


def asset_files(root: Path, patterns: Sequence[str]) -> Tree:
    """List the files that ``assets.paths`` names.

    What lies in the project keeps its path; anything else goes by its last component. No
    ``.gitignore`` counts: data is often ignored by git, and the user has named it. A link to
    somewhere in the same asset stays a link, any other is replaced by what it leads to, such as
    the blobs that the snapshots of a Hugging Face cache link to.

    Args:
        root: the project's directory, from which relative paths start.
        patterns: files, directories and glob patterns; ``~`` is the home directory.

    Raises:
        ConfigError: entries that name nothing, or that go by the name of another; all of them.
        StagerError: broken links, unreadable files, names that cannot be shipped; all of them.
    """
    assets, problems = _named(root, patterns)
    if problems:
        several = f"assets.paths: {len(problems)} problems"
        raise ConfigError(
            problems[0] if len(problems) == 1 else several,
            hint=f"correct assets.paths; relative paths start from {root}",
            context=problems if len(problems) > 1 else (),
        )
    found = Collector()
    sources = {asset.source for asset in assets}
    for asset in assets:
        parents = map(str, Path(asset.source).parents)
        if asset.inside and not sources.isdisjoint(parents):
            continue  # it comes with the directory that another entry names
        if os.path.isdir(asset.real):  # noqa: PTH112
            _walk_asset(found, asset.real, asset.path, asset, ())
        else:
            found.add(asset.path, asset.real)
    return found.tree(
        what="assets.paths", hint="repair, rename or remove them, or name narrower paths"
    )


def asset_excludes(paths: Sequence[str], root: Path) -> tuple[str, ...]:
    """Return patterns with which :func:`project_files` leaves out the assets in the project.

    Args:
        paths: the entries of ``assets.paths``; those that name nothing are passed over.
        root: the project's directory.
    """
    assets, _ = _named(root, paths)
    return tuple(sorted({anchored(asset.path) for asset in assets if asset.inside}))


def _walk_project(found: Collector, folder: str, path: str, rules: _Rules) -> None:
    entries = found.entries(folder, path)
    names = {entry.name for entry in entries}
    for mark, kind in ENVIRONMENT_MARKS.items():
        if path and mark in names:
            found.notes.append(f"{shown(path)}: {kind}, left out")
            return
    # A repository in the repository has rules of its own only, as for git.
    outer = () if path and ".git" in names else rules.gitignores
    if ".gitignore" in names:
        outer += _gitignore(found, folder, (rules.prefix + path).rstrip("/"))
    rules = replace(rules, gitignores=outer)
    for entry in entries:
        here = f"{path}/{entry.name}" if path else entry.name
        is_link = entry.is_symlink()
        is_dir = not is_link and entry.is_dir(follow_symlinks=False)
        if rules.leave_out(here, is_dir=is_dir):
            continue
        if is_dir:
            _walk_project(found, entry.path, here, rules)
        elif is_link:
            found.link(here, os.readlink(entry.path))  # noqa: PTH115 - Path would tidy it up
        else:
            found.add(here, entry.path)


def _rules_above(found: Collector, root: Path) -> tuple[str, tuple[Ignore, ...]]:
    """The project's path in the repository around it, and the patterns of the directories above.

    A project that the repository ignores as a whole (a home directory under git, a scratch folder)
    is not governed by it.
    """
    top = next((top for top in (root, *root.parents) if os.path.lexists(top / ".git")), root)
    rules: tuple[Ignore, ...] = ()
    at = ""
    for part in root.relative_to(top).parts:
        rules += _gitignore(found, str(top / at), at)
        at = f"{at}/{part}" if at else part
        if excluded(rules, at, is_dir=True):
            return "", ()
    return f"{at}/" if at else "", rules


def _gitignore(found: Collector, folder: str, base: str) -> tuple[Ignore, ...]:
    """The patterns of one directory: one element, or none where it has no ``.gitignore``."""
    file = Path(folder, ".gitignore")
    try:
        # Git reads no .gitignore through a link either (since 2.32).
        if not stat.S_ISREG(file.lstat().st_mode):
            return ()
        return (Ignore.from_bytes(file.read_bytes(), base=base),)
    except FileNotFoundError:
        return ()
    except OSError as exc:
        found.refuse(str(file), exc.strerror or str(exc))
        return ()


def _walk_asset(
    found: Collector, folder: str, path: str, asset: _Asset, above: tuple[str, ...]
) -> None:
    """Collect a directory of an asset; ``above`` are the real directories being walked."""
    for entry in found.entries(folder, path):
        here = f"{path}/{entry.name}"
        if entry.is_symlink():
            _follow(found, entry.path, here, asset, (*above, folder))
        elif entry.is_dir(follow_symlinks=False):
            _walk_asset(found, entry.path, here, asset, above)
        else:
            found.add(here, entry.path)


def _follow(
    found: Collector, source: str, path: str, asset: _Asset, above: tuple[str, ...]
) -> None:
    """Keep a link that stays in the asset, else collect what it leads to."""
    try:
        real = os.path.realpath(source, strict=True)
    except OSError as exc:
        target = str(Path(source).readlink())
        reasons = {
            errno.ELOOP: "a loop of links",
            errno.ENOENT: f"a broken link to {shown(target)}",
        }
        found.refuse(path, reasons.get(exc.errno or 0, exc.strerror or str(exc)))
        return
    if _is_within(real, asset.real):
        goal = asset.path + real[len(asset.real) :]
        found.link(path, posixpath.relpath("/" + goal, "/" + posixpath.dirname(path)))
    elif any(_is_within(folder, real) for folder in above):
        found.refuse(path, f"a link to {shown(real)}, which holds it: it would never end")
    elif os.path.isdir(real):  # noqa: PTH112
        _walk_asset(found, real, path, asset, above)
    else:
        found.add(path, real)


def _named(root: Path, patterns: Sequence[str]) -> tuple[list[_Asset], list[str]]:
    """What the entries of ``assets.paths`` name, and what is wrong with them."""
    base = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links
    assets: dict[str, tuple[str, _Asset]] = {}
    problems: list[str] = []
    for number, pattern in enumerate(patterns):
        key = f"assets.paths[{number}]"
        matches = _matches(base, pattern)
        if not matches:
            problems.append(f"{key}: {pattern!r} does not exist; {_missing(base, pattern)}")
        for match in matches:
            asset = _asset(base, match)
            if isinstance(asset, str):
                problems.append(f"{key}: {match!r} {asset}")
                continue
            other, known = assets.setdefault(asset.path, (key, asset))
            if known.real != asset.real:
                problems.append(
                    f"{key}: {match!r} would go by the same name as {known.source!r} ({other})"
                )
    return [asset for _, asset in assets.values()], problems


def _matches(base: Path, pattern: str) -> list[str]:
    """The paths that one entry names; a file of that very name goes before a glob pattern."""
    expanded = os.path.expanduser(pattern)  # noqa: PTH111 - Path's raises for an unknown user
    literal = os.path.normpath(os.path.join(base, expanded))  # noqa: PTH118
    if expanded and os.path.lexists(literal):
        return [literal]
    found = glob.glob(expanded, root_dir=base, recursive=True)  # noqa: PTH207
    return sorted({os.path.normpath(os.path.join(base, name)) for name in found})  # noqa: PTH118


def _asset(base: Path, match: str) -> _Asset | str:
    """The asset at an existing path, or what is wrong with it."""
    try:
        mode = Path(match).stat().st_mode
        real = os.path.realpath(match, strict=True)
    except OSError as exc:
        return f"is a link that leads nowhere ({exc.strerror})"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return f"is {kind_of(mode)}, not a file or a directory"
    tops = (str(base), os.path.realpath(base))
    if any(_is_within(top, match) or _is_within(top, real) for top in tops):
        return "holds the project itself"
    top = next((top for top in tops if _is_within(match, top)), None)
    path = os.path.relpath(match, top or os.path.dirname(match))  # noqa: PTH120
    return _Asset(path=path, source=match, real=real, inside=top is not None)


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _missing(base: Path, pattern: str) -> str:
    """What there is where an entry of ``assets.paths`` was looked for."""
    return _nearby(Path(os.path.normpath(base / os.path.expanduser(pattern))))  # noqa: PTH111


def _nearby(path: Path) -> str:
    """What the nearest directory that exists holds instead of ``path``."""
    while not os.path.isdir(path.parent):  # noqa: PTH112
        path = path.parent
    folder = path.parent
    try:
        names = sorted(shown(entry.name) for entry in folder.iterdir())
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(repr(str(folder / name)) for name in close)}?"
    if not names:
        return f"{folder} is empty"
    more = f" and {len(names) - NEARBY} more" if len(names) > NEARBY else ""
    return f"{folder} holds {', '.join(names[:NEARBY])}{more}"
