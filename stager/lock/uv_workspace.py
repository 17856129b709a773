"""The part of a project, and of its workspace, that uv compares with a ``uv.lock``.

``uv lock --check`` refuses a lock when one of these has changed since. uv itself decides that when
the lock is read (:mod:`stager.lock.uv_export`); here it is only noticed that it has to be asked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import toml
from ..core.errors import ConfigError
from . import tool_settings

_PROJECT_KEYS = (
    "dependencies",
    "dynamic",
    "name",
    "optional-dependencies",
    "requires-python",
    "version",
)
"""Keys of ``[project]`` that a lock depends on."""


def declared(root: Path, project: Path) -> list[object]:
    """Return what a lock depends on besides its own bytes, as JSON can have it.

    Args:
        root: the folder of the lock, which is that of the workspace.
        project: the folder of the project that the lock is read for.
    """
    places = sorted({root, project, *members(root)})
    named = [[os.path.relpath(place, root), _of_project(place)] for place in places]
    return as_json([named, read(root / "uv.toml")])


def _of_project(folder: Path) -> list[object]:
    document = read(folder / "pyproject.toml")
    project = tool_settings.table(document, "project")
    return [
        {key: project[key] for key in _PROJECT_KEYS if key in project},
        tool_settings.table(document, "dependency-groups"),
        uv_table(document),
        "build-system" in document,  # a project without one is not installed
    ]


def members(root: Path) -> set[Path]:
    """Return the folders of a workspace's members; one that uv refuses may be among them."""
    workspace = tool_settings.table(uv_table(read(root / "pyproject.toml")), "workspace")
    found = {file.parent for file in _matches(root, workspace.get("members"))}
    return found - {file.parent for file in _matches(root, workspace.get("exclude"))}


def _matches(root: Path, patterns: object) -> Iterator[Path]:
    for pattern in patterns if isinstance(patterns, list) else ():
        try:
            yield from root.glob(f"{pattern}/pyproject.toml")
        except (ValueError, NotImplementedError):  # uv says what is wrong with it
            continue


def read(path: Path) -> Mapping[str, Any]:
    """Return a document; an empty one where there is none, or uv will say what is wrong with it."""
    try:
        return toml.read(path)
    except ConfigError:
        return {}


def uv_table(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``[tool.uv]`` of a document; an empty table where there is none."""
    return tool_settings.table(tool_settings.table(document, "tool"), "uv")


def as_json(value: Sequence[object]) -> list[object]:
    """Return values of a document as JSON can have them: TOML has times, JSON has not."""
    return list(json.loads(json.dumps(value, default=str)))
