"""``[project]`` and ``[assets]``: the user's own code, and the data it needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bundle.launch.program_variables import DROPPED, RANK
from bundle.results import patterns

from ..hub.repositories import HubRequest, Kind, parse_request
from . import checks
from .table import Table

_LONGEST_NAME = 100
"""A file's name has 255 bytes; a log's also has the job's id, a node's name and a task's number."""

_OURS = re.compile(rf"PATH$|STAGER_|{DROPPED.pattern}|{RANK.pattern}")
"""Variables that ranks do not get from the settings."""


@dataclass(frozen=True, kw_only=True)
class ProjectConfig:
    """``[project]``: the user's own code."""

    path: Path | None
    """The folder that is shipped; None (``path = false``) ships none."""
    exclude: tuple[str, ...]
    """Patterns of files not to ship, in the form of ``.gitignore``, on top of that file."""
    outputs: tuple[str, ...]
    """Paths below the run directory that are brought back when the job ends."""
    resume_limit: int
    """Most bytes of them that are sent before a job to nodes that do not see that directory."""
    command: tuple[str, ...]
    """The command of every rank if the command line names none."""


@dataclass(frozen=True, kw_only=True)
class AssetsConfig:
    """``[assets]``: models and data, fetched at build time and never later."""

    paths: tuple[Path, ...]
    """Files and folders, absolute, with those that ``env`` names."""
    models: tuple[HubRequest, ...]
    """Models (and their tokenizers) of the hub."""
    datasets: tuple[HubRequest, ...]
    """Data sets of the hub."""
    spaces: tuple[HubRequest, ...] = ()
    """Spaces of the hub, such as the metrics of ``evaluate``."""
    env: tuple[tuple[str, Path], ...] = ()
    """Variables of the ranks, each with the asset that it is the place of."""


def project(table: Table, root: Path) -> tuple[str, ProjectConfig]:
    """Read ``[project]``: the name, and the rest; problems are noted in the table."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", root.name).strip("-._")[:_LONGEST_NAME] or "project"
    name = table.take(
        "name",
        safe,
        checks.matching(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST_NAME - 1}}}"),
        f"up to {_LONGEST_NAME} letters, digits, dots, dashes and underscores, a letter or digit "
        "first, since files are named by it",
    )
    strings = "a list of strings"
    own = ProjectConfig(
        path=table.take("path", root, checks.path_or_false(root), "a path, or false", "."),
        exclude=table.take("exclude", (), checks.texts, strings),
        outputs=table.take("outputs", (), checks.texts, strings),
        resume_limit=table.take("resume-limit", 2 * 10**9, checks.size, checks.SIZE, "2GB"),
        command=table.take(
            "command", (), checks.texts, 'a list of strings, for example ["train.py", "--epochs"]'
        ),
    )
    _refuse_outside(table, own.outputs)
    return name, own


def _refuse_outside(table: Table, outputs: tuple[str, ...]) -> None:
    """Report outputs outside the folder that a job runs in: they are not collected."""
    for path in outputs:
        try:
            output(path)
        except ValueError as exc:
            table.problem("outputs", str(exc))


def output(value: object) -> str:
    """Return the path or pattern of an output.

    Raises:
        ValueError: it is none, or lies outside the folder that a job runs in.
    """
    path = checks.text(value)
    if patterns.split(path) is None:
        raise ValueError(f"{path!r} lies outside the folder that a job runs in")
    return path


def assets(table: Table, root: Path) -> AssetsConfig:
    """Read ``[assets]``; problems are noted in the table."""
    paths = table.take("paths", (), checks.each(checks.path(root)), "a list of paths")
    env = table.take(
        "env", (), checks.variables, 'a table of paths, { TIKTOKEN_CACHE_DIR = "caches/tiktoken" }'
    )
    places = []
    for name, value in env:
        try:
            if _OURS.match(name):
                raise ValueError("stager sets this variable itself")
            places.append((name, checks.path(root)(value)))
        except ValueError as exc:
            table.problem(f"env.{name}", str(exc) or f"{value!r} is no path")
    more = (place for _, place in places if not any(map(place.is_relative_to, paths)))
    return AssetsConfig(
        paths=(*paths, *dict.fromkeys(more)),
        env=tuple(places),
        models=_of_hub(table, "models", "model"),
        datasets=_of_hub(table, "datasets", "dataset"),
        spaces=_of_hub(table, "spaces", "space"),
    )


def _of_hub(table: Table, key: str, kind: Kind) -> tuple[HubRequest, ...]:
    allowed = 'a list of names on the hub, for example ["org/name", "org/name@revision"]'
    requests = []
    for number, value in enumerate(table.take(key, (), checks.listed, allowed)):
        try:
            requests.append(parse_request(kind, value))
        except ValueError as exc:
            table.problem(f"{key}[{number}]", f"{exc}; allowed: org/name, org/name@revision, or a "
                          "table with name and more, as docs/models.md says")  # fmt: skip
    return tuple(dict.fromkeys(requests))
