"""The check that the script of a job exists: here, or in the project that a bundle holds."""

from __future__ import annotations

import difflib
import posixpath
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ..core.errors import ConfigError
from ..pack.existing import opened

_MAX_SHOWN = 200
"""Characters of a name that are shown."""
_FOLDER = "project/"
"""The folder of the project in an environment."""


def refuse_absent(name: str, bundle: Path) -> None:
    """Refuse a script that does not exist, before the bundle is sent to any node.

    Args:
        name: a script as the command line has it; ``-m`` is none.
        bundle: the bundle whose project is searched. An absolute path is left to the nodes.

    Raises:
        ConfigError: there is no such script.
        BundleError: the bundle cannot be read.
    """
    if name == "-m" or name.startswith("/") or _is_here(name):
        return
    path = posixpath.normpath(name)
    staged = set(_staged(bundle))
    if name and not staged.isdisjoint((path, f"{path}/__main__.py")):
        return
    scripts = {file for file in staged if file.endswith(".py")} | _scripts_here()
    raise ConfigError(
        f"there is no script {_shown(name)}: neither here nor in the project in the bundle",
        hint=_hint(path, scripts),
    )


def in_project(name: str, project: Path) -> str:
    """Return a script's path below the project's folder, which hosts have a copy of.

    Args:
        name: a script as the command line has it.
        project: the project's folder, on this machine.

    Returns:
        The path from that folder where an absolute path, or one with ``..``, leads into it; else
        the name as it is.
    """
    if not (name.startswith("/") or ".." in Path(name).parts) or not _is_here(name):
        return name
    path, root = Path(name).parent.resolve() / Path(name).name, project.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else name


def _shown(name: str) -> str:
    """Return a name as it may be shown."""
    if name.isprintable() and 0 < len(name) <= _MAX_SHOWN:
        return name
    return repr(name[:_MAX_SHOWN])


def _hint(path: str, scripts: Collection[str]) -> str:
    """Return the script that was probably meant, or a reason why it may be missing."""
    similar = difflib.get_close_matches(path[:_MAX_SHOWN], sorted(scripts), n=1)
    if similar:
        return f"did you mean {similar[0]}?"
    if path and shutil.which(path) is not None:
        return f"run starts Python scripts and modules; for other programs: stager exec -- {path}"
    return "check the name; project.exclude and .gitignore keep files out of the bundle"


def _is_here(name: str) -> bool:
    """Return whether the working directory has a file of this name, or a folder Python can run."""
    path = Path(name)
    try:
        return path.is_file() or (path / "__main__.py").is_file()
    except (OSError, ValueError):
        return False


def _scripts_here() -> set[str]:
    try:
        return {path.name for path in Path.cwd().glob("*.py")}
    except OSError:  # it was removed, or may not be read
        return set()


def _staged(bundle: Path) -> Iterator[str]:
    """Yield the project's files in a bundle, by their paths below the project's folder."""
    from ..layers.layer_file import decompress_index

    with opened(bundle) as held:
        for layer in held.manifest.layers:
            if layer.kind == "project":
                index = held.index(layer, held.head(layer), decompress_index)
                paths = [file.path for file in index.files] + [link.path for link in index.links]
                for path in paths:
                    yield path.removeprefix(_FOLDER)
