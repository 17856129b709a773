"""Settings of uv, Poetry and PDM that change what is installed.

A build that ignored them silently would install something else than the project's own tool does:
the index's package in place of a local fork, a version that the project excludes. uv is handed
those of its own (:mod:`stager.lock.uv_project`); all others are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.markers import (
    InvalidMarker,
    Marker,
    UndefinedComparison,
    UndefinedEnvironmentName,
)
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from ..config.foreign_files import PDM_EXPORT, POETRY_EXPORT, UV_COMPILE
from ..core import toml
from ..core.errors import ConfigError

_UV_KEYS = (
    "constraint-dependencies",
    "dependency-metadata",
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
    "resolution",
    "sources",
    "torch-backend",
)
"""Keys of ``[tool.uv]`` and of ``uv.toml`` that can change what is installed."""

_REFUSED = {
    "pip": "what stands there is for uv's own commands; move indexes and the like to [tool.uv]",
    "torch-backend": "set environment.torch-backend in stager's settings instead",
}
"""Keys that are not handed to uv, and the remedy for each."""

_LATEST_PATCH = 99


def refuse(data: Mapping[str, Any], path: Path, *, shown: str) -> list[str]:
    """Return one message for each setting that would be ignored.

    Args:
        data: a ``pyproject.toml``.
        path: the file; a ``uv.toml`` beside it counts, and the root of a workspace above it.
        shown: its name in messages.
    """
    messages = []
    for key in uv_keys(data, path, shown=shown, requested=None):
        remedy = _REFUSED.get(key.rpartition(".")[2].rpartition(" ")[2])
        if remedy:
            messages.append(f"{key}: it is not honoured here; {remedy}")
    tools = table(data, "tool")
    poetry, pdm = table(tools, "poetry"), table(tools, "pdm")
    if poetry.get("source"):
        messages.append(_message(shown, ["tool.poetry.source"], "Poetry", POETRY_EXPORT))
    keys = _pdm_keys(pdm)
    if keys:
        messages.append(_message(shown, keys, "PDM", PDM_EXPORT))
    return messages


def _pdm_keys(pdm: Mapping[str, Any]) -> list[str]:
    """Return the settings of PDM that change what is installed."""
    keys = []
    if pdm.get("source"):
        keys.append("tool.pdm.source")
    resolution = table(pdm, "resolution")
    for key in ("excludes", "overrides"):
        if key in resolution:
            keys.append(f"tool.pdm.resolution.{key}")
    return keys


def refuse_folder(folder: Path, python: str, *, shown: str) -> list[str]:
    """Return one message for each setting of a local project that a build of it would ignore.

    Args:
        folder: the project's folder; one without ``pyproject.toml`` has no settings.
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
    messages = refuse(data, path, shown=shown)
    problem = wrong_python(data, python, shown=shown)
    if problem:
        messages.append(problem)
    return messages


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
    settings = folder / "uv.toml"
    if not settings.is_file() or all(map(_is_pinned, texts)):
        return ""
    try:
        keys = _uv_keys(toml.read(settings), None)
    except ConfigError as exc:
        return exc.message
    if not keys:
        return ""
    return (
        f"{shown}: {', '.join(keys)}: only uv honours this, and without it other packages would "
        f"be installed; run {UV_COMPILE} there and name pinned.txt instead"
    )


def _is_pinned(text: str) -> bool:
    """Return whether a requirement leaves no choice of version; nor does a path or a URL."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:  # a path, or something that is refused later
        return True
    if requirement.url is not None:
        return True
    for specifier in requirement.specifier:
        if specifier.operator in ("==", "===") and not specifier.version.endswith(".*"):
            return True
    return False


def no_dependencies(data: Mapping[str, Any], path: Path, *, shown: str) -> str:
    """Describe where a ``pyproject.toml`` keeps dependencies that only another tool reads.

    Returns:
        The message; empty for a file in the standard's form (``[project]``, PEP 621).
    """
    poetry = table(table(data, "tool"), "poetry")
    dependencies = {*table(poetry, "dependencies")} - {"python"}
    if poetry and (dependencies or "project" not in data):
        return (
            f"{shown}: its dependencies stand in [tool.poetry], which only Poetry reads; run "
            f"{POETRY_EXPORT} and name requirements.txt instead, or name the folder instead of "
            "the file to build the project with its dependencies"
        )
    if "project" in data:
        return ""
    message = f"{shown}: it has no [project] table, so it declares no dependencies"
    for name in ("setup.py", "setup.cfg"):
        if path.with_name(name).is_file():
            message += f"; name the folder instead, which has {name}"
            break
    return f"{message}; or name what to install in environment.requirements"


def wrong_python(data: Mapping[str, Any], python: str, *, shown: str) -> str:
    """Describe a ``project.requires-python`` that excludes the environment's Python.

    The patch release of the nodes is not known, so a version fits if any patch release of it does.
    """
    required = table(data, "project").get("requires-python")
    if required is None:
        return ""
    try:
        allowed = SpecifierSet(str(required))
    except InvalidSpecifier as exc:
        return f"{shown}: project.requires-python: {exc}"
    patches = (f"{python}.{patch}" for patch in range(_LATEST_PATCH + 1))
    if any(allowed.contains(version, prereleases=True) for version in patches):
        return ""
    return (
        f"{shown}: project.requires-python is {str(required)!r}, but the environment is for Python "
        f"{python}; set environment.python to a version that it allows"
    )


def is_dynamic(project: Mapping[str, Any]) -> bool:
    """Return whether only a build knows the dependencies of a ``[project]`` table."""
    dynamic = project.get("dynamic", [])
    return isinstance(dynamic, list) and "dependencies" in dynamic


def declared(data: Mapping[str, Any]) -> set[str] | None:
    """Return the packages that ``[project]`` names, with all extras; None if a build decides."""
    project = table(data, "project")
    if not project or is_dynamic(project):
        return None
    texts: list[str] = []
    extras = table(project, "optional-dependencies")
    for requirements in (project.get("dependencies", []), *extras.values()):
        if isinstance(requirements, list):
            texts += map(str, requirements)
    return names(texts)


def names(texts: Iterable[str]) -> set[str]:
    """Return the packages that requirements name; a text that is no requirement names none."""
    packages = set()
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # reported when the requirements are resolved
            continue
        packages.add(str(canonicalize_name(requirement.name)))
    return packages


def uv_keys(
    data: Mapping[str, Any], path: Path, *, shown: str, requested: Collection[str] | None
) -> list[str]:
    """Return the settings of uv that change what is installed, each with its file.

    Args:
        data: a ``pyproject.toml``.
        path: the file; a ``uv.toml`` beside it counts, and the root of a workspace above it.
        shown: its name in messages.
        requested: the packages that are taken from it, normalised; a source of any other does not
            matter. None where they are not known.
    """
    files = [(shown, "tool.uv.", table(table(data, "tool"), "uv"))]
    beside = path.with_name("uv.toml")
    if beside.is_file():
        files.append((shown.removesuffix(path.name) + beside.name, "", toml.read(beside)))
    root = workspace(path)
    if root:
        files.append((str(root), "tool.uv.", table(table(toml.read(root), "tool"), "uv")))
    return [
        f"{name}: {prefix}{key}"
        for name, prefix, settings in files
        for key in _uv_keys(settings, requested)
    ]


def script_keys(
    document: Mapping[str, Any], *, shown: str, requested: Collection[str]
) -> list[str]:
    """Return the settings of uv in a script's block, as :func:`uv_keys` does for a project."""
    settings = table(table(document, "tool"), "uv")
    return [f"{shown}: tool.uv.{key}" for key in _uv_keys(settings, requested)]


def other_environments(data: Mapping[str, Any], python: str, *, shown: str) -> str:
    """Describe ``tool.uv.environments`` that do not include the nodes, which uv itself ignores."""
    markers = table(table(data, "tool"), "uv").get("environments")
    if not isinstance(markers, list) or not markers:
        return ""
    nodes = list_node_markers(python)
    try:
        if any(Marker(str(marker)).evaluate(nodes) for marker in markers):
            return ""
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName) as exc:
        return f"{shown}: tool.uv.environments: {exc}"
    return (
        f"{shown}: tool.uv.environments has none for Python {python} on Linux, so the project does "
        "not support the nodes"
    )


def list_node_markers(python: str) -> dict[str, str]:
    """Return the values of environment markers that all nodes with a Python version have."""
    nodes = {"python_version": python, "python_full_version": f"{python}.0"}
    return nodes | {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}


def conflicting(data: Mapping[str, Any], extras: Collection[str], groups: Collection[str]) -> str:
    """Describe extras or groups that ``tool.uv.conflicts`` does not allow together; else empty."""
    conflicts = table(table(data, "tool"), "uv").get("conflicts")
    for members in conflicts if isinstance(conflicts, list) else ():
        chosen = []
        for member in members if isinstance(members, list) else ():
            if not isinstance(member, Mapping):
                continue
            if member.get("extra") in extras or member.get("group") in groups:
                chosen.append(str(member.get("extra") or member.get("group")))
        if len(chosen) > 1:
            return f"tool.uv.conflicts does not allow {' and '.join(chosen)} together"
    return ""


def workspace(path: Path) -> Path | None:
    """Return the nearest ``pyproject.toml`` above a project that declares a workspace of uv."""
    for folder in path.absolute().parent.parents:
        file = folder / "pyproject.toml"
        if not os.access(file, os.R_OK) or not file.is_file():
            continue
        if b"tool.uv.workspace" in file.read_bytes():
            return file
    return None


def _uv_keys(table: Mapping[str, Any], requested: Collection[str] | None) -> list[str]:
    """Return the keys that change what is installed.

    A source counts for a requested package only, an explicit index only if a source names it.
    """
    values = {key: table.get(key) for key in _UV_KEYS}
    values["sources"] = _requested_sources(values["sources"], requested)
    if not values["sources"]:
        values["index"] = _implicit_indexes(values["index"])
    return [key for key, value in values.items() if value]


def _requested_sources(sources: object, requested: Collection[str] | None) -> object:
    if requested is None or not isinstance(sources, Mapping):
        return sources
    return [name for name in sources if canonicalize_name(name) in requested]


def _implicit_indexes(indexes: object) -> object:
    if not isinstance(indexes, list):
        return indexes
    implicit = []
    for index in indexes:
        if not isinstance(index, Mapping) or not index.get("explicit"):
            implicit.append(index)
    return implicit


def _message(shown: str, keys: Collection[str], tool: str, export: str) -> str:
    return (
        f"{shown}: {', '.join(keys)}: only {tool} honours this, and without it other packages "
        f"would be installed; run {export} there and name requirements.txt instead"
    )


def table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table of a document; an empty one where there is none."""
    value = data.get(key)
    if isinstance(value, Mapping):
        return value
    return {}
