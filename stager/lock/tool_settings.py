"""Settings of uv, Poetry and PDM that decide what is installed, and that are not honoured here.

A build that leaves them out in silence installs something else than the project's own tool does:
the index's package in place of a local fork, a version that the project rules out. So they are
refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from ..config.foreign_files import PDM_EXPORT, POETRY_EXPORT, UV_COMPILE, UV_EXPORT
from ..core import toml
from ..core.errors import ConfigError

_UV_KEYS = (
    "conflicts",
    "constraint-dependencies",
    "dependency-metadata",
    "environments",
    "exclude-dependencies",
    "exclude-newer",
    "exclude-newer-package",
    "extra-index-url",
    "find-links",
    "fork-strategy",
    "index",
    "index-strategy",
    "index-url",
    "no-binary",
    "no-binary-package",
    "no-build",
    "no-build-package",
    "no-index",
    "no-sources",
    "no-sources-package",
    "override-dependencies",
    "pip",
    "prerelease",
    "required-environments",
    "resolution",
    "sources",
    "torch-backend",
)
"""Keys of ``[tool.uv]`` and of ``uv.toml`` that can change what is installed."""

_LATEST_PATCH = 99


def refuse(
    data: Mapping[str, Any], path: Path, *, shown: str, asked: Collection[str] | None
) -> list[str]:
    """Return one message for each tool whose settings would be left out.

    Args:
        data: a ``pyproject.toml``.
        path: the file; a ``uv.toml`` beside it counts, and the root of a workspace above it.
        shown: its name in messages.
        asked: the packages that are taken from it, normalised; a source of any other does not
            matter. None where they are not known.

    Raises:
        ConfigError: the root of a workspace is not TOML.
    """
    messages = _uv(data, path, shown=shown, asked=asked)
    root = _workspace(path)
    if root:
        messages += _uv(toml.read(root), root, shown=str(root), asked=asked)
    tools = _tables(data, "tool")
    poetry, pdm = _tables(tools, "poetry"), _tables(tools, "pdm")
    if poetry.get("source"):
        messages.append(_message(shown, ["tool.poetry.source"], "Poetry", POETRY_EXPORT))
    resolution = _tables(pdm, "resolution")
    keys = ["tool.pdm.source"] if pdm.get("source") else []
    keys += [f"tool.pdm.resolution.{key}" for key in ("excludes", "overrides") if key in resolution]
    if keys:
        messages.append(_message(shown, keys, "PDM", PDM_EXPORT))
    return messages


def refuse_folder(folder: Path, python: str, *, shown: str) -> list[str]:
    """Return what a local project asks for that is left out as its wheel is built.

    Args:
        folder: the project's folder; one without ``pyproject.toml`` asks for nothing.
        python: the environment's Python, ``major.minor``.
        shown: the name of its ``pyproject.toml`` in messages.
    """
    path = folder / "pyproject.toml"
    if not path.is_file():
        return []
    try:
        data = toml.read(path)
    except ConfigError as exc:
        return [exc.message]
    found = refuse(data, path, shown=shown, asked=_declared(data))
    return [message for message in (*found, wrong_python(data, python, shown=shown)) if message]


def refuse_beside(folder: Path, texts: Iterable[str], *, shown: str) -> str:
    """Refuse a ``uv.toml`` beside requirement files that leave something for a resolver to choose.

    Where every version is pinned, as uv itself writes them, its settings have done their part.

    Args:
        folder: where the requirement files lie.
        texts: the requirements in them.
        shown: the name of the ``uv.toml`` in the message.

    Returns:
        The message; empty where there is nothing to refuse.
    """
    own = folder / "uv.toml"
    if not own.is_file() or all(map(_is_pinned, texts)):
        return ""
    try:
        keys = _uv_keys(toml.read(own), None, prefix="")
    except ConfigError as exc:
        return exc.message
    if not keys:
        return ""
    return (
        f"{shown}: {', '.join(keys)}: only uv honours this, and without it other packages would "
        f"be installed; run {UV_COMPILE} there and name pinned.txt instead"
    )


def _is_pinned(text: str) -> bool:
    """Return whether a requirement leaves no choice; a path or a URL does not, either."""
    try:
        wanted = Requirement(text)
    except InvalidRequirement:  # a path, or whoever reads it next refuses it
        return True
    return wanted.url is not None or any(
        one.operator in ("==", "===") and not one.version.endswith(".*") for one in wanted.specifier
    )


def no_dependencies(data: Mapping[str, Any], path: Path, *, shown: str) -> str:
    """Say that the dependencies of a ``pyproject.toml`` stand where only another tool reads them.

    Returns:
        The message; empty for a file in the standard's form (``[project]``, PEP 621).
    """
    poetry = _tables(_tables(data, "tool"), "poetry")
    named = {*_tables(poetry, "dependencies")} - {"python"}
    if poetry and (named or "project" not in data):
        return (
            f"{shown}: its dependencies stand in [tool.poetry], which only Poetry reads; run "
            f"{POETRY_EXPORT} and name requirements.txt instead, or name the folder instead of "
            "the file to build the project with its dependencies"
        )
    if "project" in data:
        return ""
    elsewhere = [name for name in ("setup.py", "setup.cfg") if path.with_name(name).is_file()]
    where = f"; name the folder instead, which has {elsewhere[0]}" if elsewhere else ""
    return (
        f"{shown}: it has no [project] table, so it declares no dependencies{where}; "
        "or name what to install in environment.requirements"
    )


def wrong_python(data: Mapping[str, Any], python: str, *, shown: str) -> str:
    """Say that ``project.requires-python`` rules the environment's Python out.

    The patch release of the nodes is not known, so a version fits if any patch release of it does.
    """
    wanted = _tables(data, "project").get("requires-python")
    if wanted is None:
        return ""
    try:
        allowed = SpecifierSet(str(wanted))
    except InvalidSpecifier as exc:
        return f"{shown}: project.requires-python: {exc}"
    patches = (f"{python}.{patch}" for patch in range(_LATEST_PATCH + 1))
    if any(allowed.contains(version, prereleases=True) for version in patches):
        return ""
    return (
        f"{shown}: project.requires-python is {str(wanted)!r}, but the environment is for Python "
        f"{python}; set environment.python to a version that it allows"
    )


def is_dynamic(project: Mapping[str, Any]) -> bool:
    """Return whether only a build knows the dependencies of a ``[project]`` table."""
    dynamic = project.get("dynamic", [])
    return isinstance(dynamic, list) and "dependencies" in dynamic


def _declared(data: Mapping[str, Any]) -> set[str] | None:
    """Return the packages that ``[project]`` names, with all extras; None if a build decides."""
    project = _tables(data, "project")
    if not project or is_dynamic(project):
        return None
    lists = [project.get("dependencies", []), *_tables(project, "optional-dependencies").values()]
    return names(str(text) for listed in lists if isinstance(listed, list) for text in listed)


def names(texts: Iterable[str]) -> set[str]:
    """Return the packages that requirements name; what is not a requirement names none."""
    found = set()
    for text in texts:
        try:
            found.add(str(canonicalize_name(Requirement(text).name)))
        except InvalidRequirement:  # whoever resolves it says so
            continue
    return found


def _uv(
    data: Mapping[str, Any], path: Path, *, shown: str, asked: Collection[str] | None
) -> list[str]:
    own = path.with_name("uv.toml")
    keys = _uv_keys(_tables(_tables(data, "tool"), "uv"), asked, prefix="tool.uv.")
    found = [_message(shown, keys, "uv", UV_EXPORT)] if keys else []
    if own.is_file():
        try:
            keys = _uv_keys(toml.read(own), asked, prefix="")
        except ConfigError as exc:
            return [*found, exc.message]
        beside = shown.removesuffix(path.name) + own.name
        found += [_message(beside, keys, "uv", UV_EXPORT)] if keys else []
    return found


def _workspace(path: Path) -> Path | None:
    """Return the nearest file above a project that makes a workspace of uv of what lies below."""
    files = (folder / "pyproject.toml" for folder in path.absolute().parent.parents)
    readable = (file for file in files if os.access(file, os.R_OK) and file.is_file())
    return next((file for file in readable if b"tool.uv.workspace" in file.read_bytes()), None)


def _uv_keys(table: Mapping[str, Any], asked: Collection[str] | None, *, prefix: str) -> list[str]:
    """Return the keys that count; an explicit index does only where a source names it."""
    counts = {key: table.get(key) for key in _UV_KEYS}
    sources = counts["sources"]
    if asked is not None and isinstance(sources, Mapping):
        counts["sources"] = [name for name in sources if canonicalize_name(name) in asked]
    index = counts["index"]
    if isinstance(index, list) and not counts["sources"]:
        counts["index"] = [
            entry for entry in index if not isinstance(entry, Mapping) or not entry.get("explicit")
        ]
    return [prefix + key for key, value in counts.items() if value]


def _message(shown: str, keys: Collection[str], tool: str, export: str) -> str:
    return (
        f"{shown}: {', '.join(keys)}: only {tool} honours this, and without it other packages "
        f"would be installed; run {export} there and name requirements.txt instead"
    )


def _tables(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table of a document; an empty one where there is none."""
    found = data.get(key)
    return found if isinstance(found, Mapping) else {}
