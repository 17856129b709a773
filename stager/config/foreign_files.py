"""Files of other tools that are named in place of requirements, and the remedy for each.

``uv.lock``, ``Pipfile`` and ``setup.py`` are valid names of packages (PEP 508), and an index may
have a package of such a name, which a stranger wrote. So a bare name that looks like that of a file
is never asked from an index.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable
from pathlib import Path

# The name of a requirement without a version, as it may be followed by extras and a marker.
_BARE = re.compile(r"(?P<name>[\w.-]+)\s*(\[[^\]]*\])?\s*(;.*)?")

POETRY_EXPORT = "`poetry export -f requirements.txt -o requirements.txt`"
PDM_EXPORT = "`pdm export -f requirements -o requirements.txt`"

_NAME_IT = "and name requirements.txt in environment.requirements"
_CONDA = (
    "conda's packages cannot be locked here: list those that pip installs in requirements.in, one "
    "a line, and name that file in environment.requirements"
)
_BUILD = 'name the folder, for example ".", to build the project with its dependencies'
_ALONE = "name it in environment.requirements itself"

_REMEDIES = {
    "uv.lock pyproject.toml pylock.toml pylock.*.toml": _ALONE,
    "poetry.lock": f"run {POETRY_EXPORT} {_NAME_IT}",
    "pdm.lock": f"run {PDM_EXPORT} {_NAME_IT}",
    "pipfile pipfile.lock": f"run `pipenv requirements > requirements.txt` {_NAME_IT}",
    "environment*.y*ml conda*.y*ml pixi.toml pixi.lock": _CONDA,
    "setup.py setup.cfg": _BUILD,
}
"""Known names of files, in lower case, and the remedy for each."""

_SUFFIXES = (
    *(".cfg", ".conf", ".in", ".ini", ".ipynb", ".json", ".lock", ".pip", ".py", ".sh", ".toml"),
    *(".txt", ".yaml", ".yml"),
)
"""Suffixes of names that mean a file, whether it exists or not."""

_PACKAGES = ("discord.py", "ruamel.yaml", "web.py")
"""Widely used packages with names like files; taken for packages if no such file exists."""


def parse_bare_name(text: str) -> str:
    """Return the name in a requirement that has neither version nor URL; empty for any other."""
    match = _BARE.fullmatch(text.strip())
    return match["name"] if match else ""


def find_remedy(name: str) -> str:
    """Return the remedy for a file that is known by its name; empty for any other."""
    for globs, remedy in _REMEDIES.items():
        if any(fnmatch.fnmatchcase(name.lower(), glob) for glob in globs.split()):
            return remedy
    return ""


def is_export_needed(name: str) -> bool:
    """Return whether a file lists requirements in a form that only another tool reads."""
    return find_remedy(name) not in ("", _BUILD, _ALONE)


def make_remedy(name: str) -> str:
    """Return the remedy for a file that is not a requirement file, by its name."""
    if remedy := find_remedy(name):
        return remedy
    if name.endswith((".txt", ".in")):
        return f'write "-r {name}" in a requirement file, or name it in environment.requirements'
    if name.endswith(".py"):
        return (
            "a script's requirements are read where it has a block with them (PEP 723) and is "
            "named in environment.requirements itself"
        )
    return "name a requirements.txt, a pyproject.toml, a wheel, an sdist or a folder"


def explain_misread(text: str, folders: Iterable[Path]) -> str:
    """Return why a requirement is taken for a file, and the remedy; empty if it is a package."""
    name = parse_bare_name(text)
    if not name:
        return ""
    if any(os.path.isfile(folder / name) for folder in folders):  # noqa: PTH113 - never raises
        why = "is a file here"
    elif find_remedy(name) or (name.lower().endswith(_SUFFIXES) and name.lower() not in _PACKAGES):
        why = "is the name of a file"
    else:
        return ""
    return (
        f"{name} {why}, so it is not looked up in a package index; {make_remedy(name)}; "
        f'if you mean a package of this name, write "{name}>=0"'
    )
