"""The files of a project and of its assets that go into the bundle; nothing is written here."""

from __future__ import annotations

import difflib
import glob
import os
import posixpath
import stat
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bundle.protocol.dataclass import dataclass

from ..core.errors import ConfigError
from ..core.files import BUNDLE_SUFFIX, CARRIED_SUFFIX, IMAGE_SUFFIX, SBOM_SUFFIX
from ..core.store import to_stamp
from .ignore import Ignore, anchor, is_excluded
from .tree import Collector, Tree, quote_path

_SIGNED = (BUNDLE_SUFFIX, CARRIED_SUFFIX, IMAGE_SUFFIX)
NEVER_SHIPPED = (  # left behind by tools; no setting takes them back
    *(".git", ".hg", ".svn", ".DS_Store", "__pycache__/", "*.pyc", ".venv", "node_modules/"),
    # Our own, of an earlier job or build.
    *("stager-support-*.tar.gz", f"*{SBOM_SUFFIX}"),
    *(f"*{one}" for suffix in _SIGNED for one in (suffix, f"{suffix}.sig")),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/"),
    # First on sys.path, these of an editable install would hide the bundle's own metadata.
    *("*.egg-info", "*.egg-link"),
)
ENVIRONMENT_MARKS = {"pyvenv.cfg": "a virtual environment", "conda-meta": "a conda environment"}
NEARBY = 5  # names that a message lists of a directory without the requested one


@dataclass(frozen=True, kw_only=True)
class _Rules:
    never: Ignore
    forced: Ignore  # ``project.exclude``, which decides before any ``.gitignore``
    prefix: str  # the project's path in the repository around it, with a slash, or empty
    gitignores: tuple[Ignore, ...]  # from the outermost directory to this one

    def leave_out(self, path: str, *, is_dir: bool) -> bool:
        if self.never.decide(path, is_dir=is_dir):
            return True
        forced = self.forced.decide(path, is_dir=is_dir)
        if forced is not None:
            return forced
        return is_excluded(self.gitignores, self.prefix + path, is_dir=is_dir)


class _Asset(NamedTuple):
    path: str
    source: str  # its path, as the user wrote it
    real: str  # its path with every link followed
    inside: bool  # true if it lies in the project; its path in the tree is then its path there


def project_files(root: Path, exclude: Sequence[str]) -> Tree:
    """List the files of a project that are shipped; git is not called."""
    if not os.path.isdir(root):  # noqa: PTH112 - Path's raises where it may not look
        base = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links
        raise ConfigError(f"project.path: {str(root)!r} is not a directory", hint=_nearby(base))
    collector = Collector()
    prefix, above = _find_outer_rules(collector, root.resolve())
    rules = _Rules(
        never=Ignore(NEVER_SHIPPED), forced=Ignore(exclude), prefix=prefix, gitignores=above
    )
    _walk_project(collector, str(root), "", rules)
    return collector.tree(
        what=f"the project {root}",
        hint="make them readable, rename them, or leave them out with project.exclude",
    )


def asset_files(root: Path, patterns: Sequence[str]) -> Tree:
    """List the files that ``assets.paths`` names, whatever a ``.gitignore`` says.

    One in the project keeps its path, another its name. Links out of an asset become their targets.
    """
    assets, problems = _resolve_entries(root, patterns)
    if problems:
        raise _bad_assets(problems, root)
    collector = Collector()
    sources = {asset.source for asset in assets}
    for asset in assets:
        parents = map(str, Path(asset.source).parents)
        if asset.inside and not sources.isdisjoint(parents):
            continue  # it comes with the directory that another entry names
        if os.path.isdir(asset.real):  # noqa: PTH112
            _walk_asset(collector, asset.real, asset.path, asset, ())
        else:
            collector.add(asset.path, asset.real)
    return collector.tree(
        what="assets.paths", hint="repair, rename or remove them, or name narrower paths"
    )


def _bad_assets(problems: Sequence[str], root: Path) -> ConfigError:
    hint = f"correct assets.paths; relative paths start from {root}"
    if len(problems) == 1:
        return ConfigError(problems[0], hint=hint)
    return ConfigError(f"assets.paths: {len(problems)} problems", hint=hint, context=problems)


def asset_place(root: Path, patterns: Sequence[str], path: Path) -> str:
    """Return where a path of ``assets.paths``, or in a folder there, lies in the assets."""
    listed = [pattern for pattern in patterns if path.is_relative_to(pattern)]
    assets, problems = _resolve_entries(root, [*listed, str(path)])
    if problems:
        raise _bad_assets([one.replace("assets.paths", "assets.env") for one in problems], root)
    first = assets[0]
    return posixpath.normpath(posixpath.join(first.path, os.path.relpath(path, first.source)))


def asset_excludes(paths: Sequence[str], root: Path) -> tuple[str, ...]:
    """Return patterns with which :func:`project_files` leaves out the assets in the project."""
    assets, _ = _resolve_entries(root, paths)
    return tuple(sorted({anchor(asset.path) for asset in assets if asset.inside}))


def _walk_project(collector: Collector, folder: str, path: str, rules: _Rules) -> None:
    entries = collector.entries(folder, path)
    names = {entry.name for entry in entries}
    kind = next((kind for mark, kind in ENVIRONMENT_MARKS.items() if mark in names), "")
    if path and kind:
        collector.notes.append(f"{quote_path(path)}: {kind}, left out")
        return
    rules = _add_rules(collector, folder, path, names, rules)
    for entry in entries:
        entry_path = posixpath.join(path, entry.name)
        is_dir = entry.is_dir(follow_symlinks=False)
        if rules.leave_out(entry_path, is_dir=is_dir):
            continue
        if is_dir:
            _walk_project(collector, entry.path, entry_path, rules)
        elif entry.is_symlink():
            target = os.readlink(entry.path)  # noqa: PTH115 - Path would tidy it up
            collector.link(entry_path, target)
        else:
            collector.add(entry_path, entry.path)


def _find_outer_rules(collector: Collector, root: Path) -> tuple[str, tuple[Ignore, ...]]:
    top = find_repository(root)
    rules: tuple[Ignore, ...] = ()
    path = ""
    for part in root.relative_to(top).parts:
        rules += _gitignore(collector, str(top / path), path)
        path = f"{path}/{part}" if path else part
        if is_excluded(rules, path, is_dir=True):
            return "", ()
    return f"{path}/" if path else "", rules


def find_repository(root: Path) -> Path:
    """Return the git repository that a project lies in; the project itself outside of any."""
    for folder in (root, *root.parents):
        if os.path.lexists(folder / ".git"):
            return folder
    return root


def _gitignore(collector: Collector, folder: str, base: str) -> tuple[Ignore, ...]:
    file = Path(folder, ".gitignore")
    try:
        # Git reads no .gitignore through a link either (since 2.32).
        status = file.lstat()
        collector.looked_at[str(file)] = to_stamp(status)
        if not stat.S_ISREG(status.st_mode):
            return ()
        return (Ignore.from_bytes(file.read_bytes(), base=base),)
    except FileNotFoundError:
        collector.looked_at[str(file)] = []
        return ()
    except OSError as exc:
        collector.refuse(str(file), exc.strerror or str(exc))
        return ()


def _add_rules(
    collector: Collector, folder: str, path: str, names: Collection[str], rules: _Rules
) -> _Rules:
    gitignores = rules.gitignores
    if path and ".git" in names:
        gitignores = ()  # a repository in the repository has rules of its own only, as for git
    if ".gitignore" in names:
        gitignores += _gitignore(collector, folder, (rules.prefix + path).rstrip("/"))
    return replace(rules, gitignores=gitignores)


def _walk_asset(
    collector: Collector, folder: str, path: str, asset: _Asset, above: tuple[str, ...]
) -> None:
    for entry in collector.entries(folder, path):
        entry_path = f"{path}/{entry.name}"
        if entry.is_symlink():
            _follow(collector, entry.path, entry_path, asset, (*above, folder))
        elif entry.is_dir(follow_symlinks=False):
            _walk_asset(collector, entry.path, entry_path, asset, above)
        else:
            collector.add(entry_path, entry.path)


def _follow(
    collector: Collector, source: str, path: str, asset: _Asset, above: tuple[str, ...]
) -> None:
    try:
        real = os.path.realpath(source, strict=True)
    except OSError as exc:
        target = quote_path(str(Path(source).readlink()))
        collector.refuse(path, f"a link to {target}: {exc.strerror or exc}")
        return
    if _is_within(real, asset.real):
        goal = asset.path + real[len(asset.real) :]
        collector.link(path, posixpath.relpath("/" + goal, "/" + posixpath.dirname(path)))
    elif any(_is_within(folder, real) for folder in above):
        collector.refuse(
            path, f"a link to {quote_path(real)}, which contains it: following it would never end"
        )
    elif os.path.isdir(real):  # noqa: PTH112
        _walk_asset(collector, real, path, asset, above)
    else:
        collector.add(path, real)


def _resolve_entries(root: Path, patterns: Sequence[str]) -> tuple[list[_Asset], list[str]]:
    base = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links
    assets: dict[str, tuple[str, _Asset]] = {}
    problems: list[str] = []
    for number, pattern in enumerate(patterns):
        key = f"assets.paths[{number}]"
        matches = _matches(base, pattern)
        if not matches:
            near = _nearby(Path(os.path.normpath(base / os.path.expanduser(pattern))))  # noqa: PTH111
            problems.append(f"{key}: {pattern!r} does not exist; {near}")
        for match in matches:
            asset = _asset(base, match)
            if isinstance(asset, str):
                problems.append(f"{key}: {match!r} {asset}")
                continue
            other, known = assets.setdefault(asset.path, (key, asset))
            if known.real != asset.real:
                problems.append(
                    f"{key}: {match!r} would be shipped under the same name as {known.source!r} "
                    f"({other})"
                )
    return [asset for _, asset in assets.values()], problems


def _matches(base: Path, pattern: str) -> list[str]:
    """Return the paths that one entry names; a file of that very name wins over a glob pattern."""
    expanded = os.path.expanduser(pattern)  # noqa: PTH111 - Path's raises for an unknown user
    literal = os.path.normpath(os.path.join(base, expanded))  # noqa: PTH118
    if expanded and os.path.lexists(literal):
        return [literal]
    names = glob.glob(expanded, root_dir=base, recursive=True)  # noqa: PTH207
    return sorted({os.path.normpath(os.path.join(base, name)) for name in names})  # noqa: PTH118


def _asset(base: Path, match: str) -> _Asset | str:
    try:
        mode = Path(match).stat().st_mode
        real = os.path.realpath(match, strict=True)
    except OSError as exc:
        return f"is a broken link ({exc.strerror})"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return "is a pipe, socket or device, not a file or a directory"
    projects = (str(base), os.path.realpath(base))
    for project in projects:
        if _is_within(project, match) or _is_within(project, real):
            return "contains the project itself"
    for project in projects:
        if _is_within(match, project):
            path = os.path.relpath(match, project)
            return _Asset(path=path, source=match, real=real, inside=True)
    return _Asset(path=os.path.basename(match), source=match, real=real, inside=False)  # noqa: PTH119


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _nearby(path: Path) -> str:
    while not os.path.isdir(path.parent):  # noqa: PTH112
        path = path.parent
    folder = path.parent
    try:
        names = sorted(quote_path(entry.name) for entry in folder.iterdir())
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(repr(str(folder / name)) for name in close)}?"
    return f"{folder} holds {', '.join(names[:NEARBY]) or 'nothing'}"
