"""Several layers merged into one tree: which of them writes which file.

Of equal files in several layers the first one is written, as of documents at the top. Two layers
that disagree about another path are refused, and so is a path of the environment itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..format.layer import Entry, Index, LayerError, check_links, parents
from ..format.manifest import Layer

STATE = ".stager"
"""The directory of an environment for its manifest and its listing."""
OWN_PYTHON = "python"
"""The directory of an environment for the Python that a bundle brings."""
KEPT = ("layers", "decompressor")
"""Directories in it: the heads of the layers, and the wheel that they were unpacked with."""

_DOCUMENT = re.compile(
    r"(lib/python[0-9.]+/site-packages/)?"
    r"(authors|changelog|changes|contributing|copying|history|licen[cs]e|notice|readme)"
    r"([-_.][\w.-]*)?(?<!\.py)(?<!\.so)",
    re.IGNORECASE,
)

HOOK = "_stager_"
"""Prefix of the modules that an environment's interpreters run at start; no wheel has such."""
HOOKS = ("imports", "patches")
"""The rest of their names."""
HOOK_MODULES = ("hub_datasets",)
"""The rest of the names of modules that those import."""


@dataclass(frozen=True)
class Merged:
    """The content of an environment."""

    entries: tuple[tuple[Entry, ...], ...]
    """The files that each layer writes."""
    links: dict[str, str]
    """The targets of all symbolic links by their paths."""
    directories: tuple[str, ...]
    """Every directory, each after its parents."""


def site_packages(python: str) -> str:
    """Return the directory of packages in an environment for Python ``major.minor``."""
    return f"lib/python{python}/site-packages"


def own_python(env_dir: str, python: str) -> str:
    """Return the program of the Python that the bundle has brought."""
    return f"{env_dir}/{OWN_PYTHON}/bin/python{python}"


def own_directories(python: str) -> tuple[str, ...]:
    """Return the directories that every environment has."""
    state = [f"{STATE}/{name}" for name in ("site", *KEPT)]
    return ("bin", site_packages(python), "project", "assets", *state)


def own_files(python: str) -> tuple[str, ...]:
    """Return the files of an environment that come from no layer."""
    site = site_packages(python)
    return (
        "pyvenv.cfg",
        "pkgs",
        "lib64",
        "bin/python",
        "bin/python3",
        f"bin/python{python}",
        *(f"{site}/{HOOK}{name}.{ending}" for name in HOOKS for ending in ("pth", "py")),
        *(f"{site}/{HOOK}{name}.py" for name in HOOK_MODULES),
        f"{STATE}/manifest.json",
        f"{STATE}/listing",
    )


def merge(layers: Sequence[Layer], indexes: Sequence[Index], python: str) -> Merged:
    """Decide which layer writes which file.

    Raises:
        LayerError: two layers contradict each other, or one would overwrite the environment's own
            files, or links lead outside through one another.
    """
    files: dict[str, Entry] = {}
    links: dict[str, str] = {}
    entries = []
    for layer, index in zip(layers, indexes):
        entries.append(_add_files(files, layer, index))
        for path, target in index.links:
            if links.setdefault(path, target) != target:
                raise _clash(path, f"leads elsewhere in {layer.name}")
    own = own_directories(python)
    folders = parents([*files, *links])
    _refuse_state_directories(folders)
    folders |= {*own, *parents(own)}
    _refuse_own_files(files, links, folders, own_files(python))
    _refuse_clashes(files, links, folders)
    check_links(links)
    return Merged(tuple(entries), links, tuple(sorted(folders)))


def is_document(path: str) -> bool:
    """Return whether a file is a text beside the packages that many wheels have by mistake.

    Such a ``LICENSE`` or ``README.md`` at the top, of which installers keep any one, is no reason
    to refuse two packages together.
    """
    return bool(_DOCUMENT.fullmatch(path))


def _add_files(files: dict[str, Entry], layer: Layer, index: Index) -> tuple[Entry, ...]:
    """Add a layer's files; return the new ones. Refuse one that differs, except a document."""
    new = []
    for entry in index.files:
        first = files.setdefault(entry.path, entry)
        if first is entry:
            new.append(entry)
        elif first.sha256 != entry.sha256 and not is_document(entry.path):
            raise _clash(entry.path, f"differs in {layer.name} {layer.version}".rstrip())
    return tuple(new)


def _refuse_state_directories(folders: set[str]) -> None:
    for name in KEPT:
        if f"{STATE}/{name}" in folders:
            raise _clash(f"{STATE}/{name}", "belongs to the environment itself")


def _refuse_own_files(
    files: Mapping[str, Entry], links: Mapping[str, str], folders: set[str], own: Iterable[str]
) -> None:
    for path in own:
        if any(path in paths for paths in (files, links, folders)):
            raise _clash(path, "belongs to the environment itself")


def _refuse_clashes(
    files: Mapping[str, Entry], links: Mapping[str, str], folders: set[str]
) -> None:
    """Refuse a path that would be two kinds of thing."""
    for path in sorted(files.keys() & folders) + sorted(links.keys() & folders):
        raise _clash(path, "is a directory, and something else")
    for path in sorted(links.keys() & files.keys()):
        raise _clash(path, "is a file, and a link")


def _clash(path: str, why: str) -> LayerError:
    return LayerError(f"the layers do not go together: {path} {why}")
