"""Settings of uv, Poetry and PDM that change what is installed.

A build that ignored them silently would install something else than the project's own tool does:
the index's package in place of a local fork, a version that the project excludes. uv is handed
those of its own (:mod:`stager.lock.uv_project`); all others are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.markers import (
    InvalidMarker,
    Marker,
    UndefinedComparison,
    UndefinedEnvironmentName,
)
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ..config.foreign_files import PDM_EXPORT, POETRY_EXPORT
from ..core import toml
from . import uv_settings
from .requirement_line import relative
from .uv_project import UvProject

_LATEST_PATCH = 99


def list_faults(project: UvProject, python: str, root: Path) -> Iterator[str]:
    """Yield one message for each setting of a project that would be ignored, or rules it out."""
    data, shown = project.document, relative(project.file, root)
    yield from uv_settings.refuse(project.tables, root)
    if toml.table(data, "tool", "poetry").get("source"):
        yield _message(shown, ["tool.poetry.source"], "Poetry", POETRY_EXPORT)
    keys = _pdm_keys(toml.table(data, "tool", "pdm"))
    if keys:
        yield _message(shown, keys, "PDM", PDM_EXPORT)
    for fault in (
        _wrong_python(data, python),
        _other_environments(data, python),
        _conflicting(data, project.extras, project.groups),
    ):
        if fault:
            yield f"{shown}: {fault}"


def _pdm_keys(pdm: Mapping[str, Any]) -> list[str]:
    resolution = toml.table(pdm, "resolution")
    keys = [f"tool.pdm.resolution.{key}" for key in ("excludes", "overrides") if key in resolution]
    return ["tool.pdm.source", *keys] if pdm.get("source") else keys


def no_dependencies(data: Mapping[str, Any], path: Path, *, shown: str) -> str:
    """Describe where a ``pyproject.toml`` keeps dependencies that only another tool reads.

    Returns:
        The message; empty for a file in the standard's form (``[project]``, PEP 621).
    """
    poetry = toml.table(data, "tool", "poetry")
    dependencies = {*toml.table(poetry, "dependencies")} - {"python"}
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


def _wrong_python(data: Mapping[str, Any], python: str) -> str:
    """Describe a requires-python that excludes every patch release; the nodes' is not known."""
    required = toml.table(data, "project").get("requires-python")
    if required is None:
        return ""
    try:
        allowed = SpecifierSet(str(required))
    except InvalidSpecifier as exc:
        return f"project.requires-python: {exc}"
    patches = (f"{python}.{patch}" for patch in range(_LATEST_PATCH + 1))
    if any(allowed.contains(version, prereleases=True) for version in patches):
        return ""
    return (
        f"project.requires-python is {str(required)!r}, but the environment is for Python "
        f"{python}; set environment.python to a version that it allows"
    )


def _other_environments(data: Mapping[str, Any], python: str) -> str:
    """Describe ``tool.uv.environments`` that do not include the nodes, which uv itself ignores."""
    markers = toml.listed(toml.table(data, "tool", "uv"), "environments")
    nodes = list_node_markers(python)
    try:
        if not markers or any(Marker(str(marker)).evaluate(nodes) for marker in markers):
            return ""
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName) as exc:
        return f"tool.uv.environments: {exc}"
    return (
        f"tool.uv.environments has none for Python {python} on Linux, so the project does not "
        "support the nodes"
    )


def list_node_markers(python: str) -> dict[str, str]:
    """Return the values of environment markers that all nodes with a Python version have."""
    nodes = {"python_version": python, "python_full_version": f"{python}.0"}
    return nodes | {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}


def _conflicting(data: Mapping[str, Any], extras: Collection[str], groups: Collection[str]) -> str:
    for members in toml.listed(toml.table(data, "tool", "uv"), "conflicts"):
        chosen = [
            str(member.get("extra") or member.get("group"))
            for member in (members if isinstance(members, list) else ())
            if isinstance(member, Mapping)
            and (member.get("extra") in extras or member.get("group") in groups)
        ]
        if len(chosen) > 1:
            return f"tool.uv.conflicts does not allow {' and '.join(chosen)} together"
    return ""


def _message(shown: str, keys: Collection[str], tool: str, export: str) -> str:
    return (
        f"{shown}: {', '.join(keys)}: only {tool} honours this, and without it other packages "
        f"would be installed; run {export} there and name requirements.txt instead"
    )
