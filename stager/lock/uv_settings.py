"""The settings of uv that hold for a project: those in it, beside it and in its workspace.

uv reads them itself. Here they are looked at for what cannot be honoured, for the digest of a spec,
and for the indexes that wheels are fetched from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import NormalizedName, canonicalize_name

from ..core import toml
from ..core.errors import ConfigError
from .requirement_line import list_names, relative

_KEYS = (
    *("constraint-dependencies", "dependency-metadata", "exclude-dependencies", "exclude-newer"),
    *("exclude-newer-package", "extra-index-url", "find-links", "fork-strategy", "index"),
    *("index-strategy", "index-url", "no-binary", "no-binary-package", "no-build"),
    *("no-build-package", "no-index", "no-sources", "no-sources-package"),
    *("override-dependencies", "pip", "prerelease", "resolution", "sources", "torch-backend"),
)
"""Keys of ``[tool.uv]`` and of ``uv.toml`` that can change what is installed."""

_REFUSED = {
    "pip": "what stands there is for uv's own commands; move indexes and the like to [tool.uv]",
    "torch-backend": "set environment.torch-backend in stager's settings instead",
}
"""Keys that are not handed to uv, and the remedy for each."""
_UV_TOML = "uv.toml"
_PROJECT_KEYS = (
    *("dependencies", "dynamic", "name", "optional-dependencies", "requires-python", "version"),
)
"""Keys of ``[project]`` that a ``uv.lock`` depends on."""

Tables = Mapping[Path, Mapping[str, Any]]
"""The tables with settings of uv, by the file they stand in."""


def read_tables(file: Path, document: Mapping[str, Any]) -> Tables:
    """Return the tables that hold for a ``pyproject.toml`` or a script, which has only its own.

    Raises:
        ConfigError: another file with settings cannot be read.
    """
    tables = {file: toml.table(document, "tool", "uv")}
    if file.suffix == ".py":
        return tables
    beside, workspace = file.with_name(_UV_TOML), find_workspace(file)
    if beside.is_file():
        tables[beside] = toml.read(beside)
    if workspace:
        tables[workspace] = toml.table(toml.read(workspace), "tool", "uv")
    return tables


def list_keys(tables: Tables, requested: Collection[str] | None, root: Path) -> tuple[str, ...]:
    """Return the settings that change what is installed, each with its file, as messages name them.

    Args:
        tables: the settings.
        requested: the packages that are asked for, normalised: a source of any other does not
            matter, nor does an explicit index without a source. None where they are not known.
        root: the folder that file names in messages are relative to.
    """
    keys = []
    for path, settings in tables.items():
        values = {key: settings.get(key) for key in _KEYS}
        sources = toml.table(settings, "sources")
        if requested is not None:
            values["sources"] = [one for one in sources if canonicalize_name(one) in requested]
        if not values["sources"]:
            values["index"] = [one for one in list_indexes(settings) if not one.get("explicit")]
        keys += [_name_key(path, key, root) for key, value in values.items() if value]
    return tuple(keys)


def refuse(tables: Tables, root: Path) -> Iterator[str]:
    """Yield one message for each setting that is not honoured."""
    for path, settings in tables.items():
        for key, remedy in _REFUSED.items():
            if settings.get(key):
                yield f"{_name_key(path, key, root)}: it is not honoured here; {remedy}"


def _name_key(path: Path, key: str, root: Path) -> str:
    table = "" if path.name == _UV_TOML else "tool.uv."
    return f"{relative(path, root)}: {table}{key}"


def list_indexes(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the indexes that settings list by name."""
    return [index for index in toml.listed(settings, "index") if isinstance(index, Mapping)]


def index_urls(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the address of each index that settings list by name.

    It has the credentials of ``UV_INDEX_NAME_USERNAME`` and ``UV_INDEX_NAME_PASSWORD``, if set.
    """
    for index in list_indexes(settings):
        url = index.get("url")
        if not isinstance(url, str) or "://" not in url:
            continue
        variable = "UV_INDEX_" + re.sub("[^A-Z0-9]", "_", str(index.get("name", "")).upper())
        user = os.environ.get(f"{variable}_USERNAME", "")
        password = os.environ.get(f"{variable}_PASSWORD", "")
        scheme, _, rest = url.partition("://")
        if (user or password) and "@" not in rest.partition("/")[0]:
            rest = f"{quote(user, safe='')}:{quote(password, safe='')}@{rest}"
        yield f"{scheme}://{rest}"


def overridden_by(settings: Mapping[str, Any]) -> set[NormalizedName]:
    """Return the packages that uv takes against other packages' metadata."""
    names: set[NormalizedName] = set()
    for key in ("override-dependencies", "exclude-dependencies"):
        names |= list_names(map(str, toml.listed(settings, key)))
    for entry in toml.listed(settings, "dependency-metadata"):
        if isinstance(entry, Mapping) and "name" in entry:
            names.add(canonicalize_name(str(entry["name"])))
    return names


def find_workspace(path: Path) -> Path | None:
    """Return the nearest ``pyproject.toml`` above a project that declares a workspace of uv."""
    for folder in path.absolute().parent.parents:
        file = folder / "pyproject.toml"
        if not os.access(file, os.R_OK) or not file.is_file():
            continue
        if b"tool.uv.workspace" in file.read_bytes():
            return file
    return None


def list_members(root: Path) -> set[Path]:
    """Return the folders of a workspace's members; one that uv refuses may be among them."""
    workspace = toml.table(read(root / "pyproject.toml"), "tool", "uv", "workspace")
    members, excluded = (
        {file.parent for file in _matches(root, toml.listed(workspace, key))}
        for key in ("members", "exclude")
    )
    return members - excluded


def _matches(root: Path, patterns: Sequence[object]) -> Iterator[Path]:
    for pattern in patterns:
        try:
            yield from root.glob(f"{pattern}/pyproject.toml")
        except (ValueError, NotImplementedError):  # uv says what is wrong with it
            continue


def describe_workspace(root: Path, project: Path) -> list[object]:
    """Return what ``uv lock --check`` compares with a lock besides its own bytes, as JSON.

    uv itself decides when the lock is read (:mod:`stager.lock.uv_export`); here it is only noticed
    that it has to be asked.
    """
    described = []
    for folder in sorted({root, project, *list_members(root)}):
        document = read(folder / "pyproject.toml")
        own = toml.table(document, "project")
        parts = [
            {key: own[key] for key in _PROJECT_KEYS if key in own},
            toml.table(document, "dependency-groups"),
            toml.table(document, "tool", "uv"),
            "build-system" in document,  # a project without one is not installed
        ]
        described.append([os.path.relpath(folder, root), parts])
    return as_json([described, read(root / _UV_TOML)])


def read(path: Path) -> Mapping[str, Any]:
    """Return a document; an empty one where there is none, or uv will say what is wrong with it."""
    try:
        return toml.read(path)
    except ConfigError:
        return {}


def as_json(value: Sequence[object]) -> list[object]:
    """Return values of a document as JSON can have them: TOML has times, JSON has not."""
    return list(json.loads(json.dumps(value, default=str)))
