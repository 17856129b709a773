"""Several layers laid over one another: which of them writes what.

Of equal files in several layers the first one writes. Everything else that two layers disagree
about is refused, and so is whatever would lie where the environment's own files go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..format.layer import Entry, Index, LayerError, check_links, parents
from ..format.manifest import Layer

STATE = ".stager"
"""Where in an environment its manifest and what belongs to it are kept."""
KEPT = ("layers", "decompressor")
"""Directories there: the heads of the layers, and the wheel that they were unpacked with."""

HOOK = "_stager_"
"""How modules that interpreters of an environment run at their start begin; no wheel has such."""
HOOKS = ("imports", "patches")
"""What is behind that."""


@dataclass(frozen=True)
class Merged:
    """The content of an environment."""

    entries: tuple[tuple[Entry, ...], ...]
    """For each layer the files that it writes."""
    links: dict[str, str]
    """The targets of all symbolic links by their paths."""
    directories: tuple[str, ...]
    """Every directory, each after those it lies in."""


def site_packages(python: str) -> str:
    """Where packages lie in an environment for Python ``major.minor``."""
    return f"lib/python{python}/site-packages"


def own_directories(python: str) -> tuple[str, ...]:
    """Directories that every environment has."""
    own = [f"{STATE}/{name}" for name in ("site", *KEPT)]
    return ("bin", site_packages(python), "project", "assets", *own)


def own_files(python: str) -> tuple[str, ...]:
    """What an environment consists of besides its layers, directories left out."""
    site = site_packages(python)
    return (
        "pyvenv.cfg",
        "pkgs",
        "lib64",
        "bin/python",
        "bin/python3",
        f"bin/python{python}",
        *(f"{site}/{HOOK}{name}.{ending}" for name in HOOKS for ending in ("pth", "py")),
        f"{STATE}/manifest.json",
        f"{STATE}/listing",
    )


def merge(layers: Sequence[Layer], indexes: Sequence[Index], python: str) -> Merged:
    """Decide who writes what.

    Args:
        layers: in the order in which they are stored.
        indexes: what each of them holds.
        python: ``major.minor``, which decides the names of directories.

    Raises:
        LayerError: two layers do not go together, or one would overwrite the environment's own
            files, or links lead outside through one another.
    """
    files: dict[str, Entry] = {}
    links: dict[str, str] = {}
    entries = []
    for layer, index in zip(layers, indexes):
        mine = []
        for entry in index.files:
            other = files.setdefault(entry.path, entry)
            if other is entry:
                mine.append(entry)
            elif other.sha256 != entry.sha256:
                raise _clash(entry.path, f"differs in {layer.name} {layer.version}".rstrip())
        for path, target in index.links:
            if links.setdefault(path, target) != target:
                raise _clash(path, f"leads elsewhere in {layer.name}")
        entries.append(tuple(mine))
    own = own_directories(python)
    folders = parents([*files, *links])
    _refuse_in(folders)
    folders |= {*own, *parents(own)}
    _refuse_clashes(files, links, folders, own_files(python))
    check_links(links)
    return Merged(tuple(entries), links, tuple(sorted(folders)))


def _refuse_in(folders: set[str]) -> None:
    """Refuse layers that write where the environment keeps what it was made from."""
    for name in KEPT:
        if f"{STATE}/{name}" in folders:
            raise _clash(f"{STATE}/{name}", "belongs to the environment itself")


def _refuse_clashes(
    files: Mapping[str, Entry], links: Mapping[str, str], folders: set[str], own: Iterable[str]
) -> None:
    """Refuse a path that would have to be two things at once."""
    for path in own:
        if path in files or path in links or path in folders:
            raise _clash(path, "belongs to the environment itself")
    for path in sorted(files.keys() & folders) + sorted(links.keys() & folders):
        raise _clash(path, "is a directory, and something else")
    for path in sorted(links.keys() & files.keys()):
        raise _clash(path, "is a file, and a link")


def _clash(path: str, why: str) -> LayerError:
    return LayerError(f"the layers do not go together: {path} {why}")
