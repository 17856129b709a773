"""Whether the script that is to be run is there: here, or in the project that a bundle holds."""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import ConfigError
from ..pack.existing import opened

_LONGEST = 200
"""Characters of a name that are shown."""
_FOLDER = "project/"
"""Where the project lies in an environment."""


def refuse_absent(name: str, bundle: Path) -> None:
    """Find out now what every node would find after the bundle has been brought to it.

    Args:
        name: a script as the command line has it; ``-m`` is none.
        bundle: whose project is looked into. An absolute path is the nodes' own affair.

    Raises:
        ConfigError: there is no such script.
        BundleError: the bundle cannot be read.
    """
    if name == "-m" or name.startswith("/") or _is_here(name):
        return
    wanted = posixpath.normpath(name)
    staged = tuple(_staged(bundle))
    if name and any(path in (wanted, f"{wanted}/__main__.py") for path in staged):
        return
    scripts = {path for path in staged if path.endswith(".py")} | _scripts_here()
    close = difflib.get_close_matches(wanted[:_LONGEST], sorted(scripts), n=1)
    shown = name if name.isprintable() and 0 < len(name) <= _LONGEST else repr(name[:_LONGEST])
    raise ConfigError(
        f"there is no script {shown}: neither here nor in the project in the bundle",
        hint=f"did you mean {close[0]}?"
        if close
        else "check the name; project.exclude and .gitignore keep files out of the bundle",
    )


def _is_here(name: str) -> bool:
    """Whether the working directory has it: a file, or a folder that Python can run."""
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
    """The paths of the project's files in a bundle, as seen from the project's folder."""
    from ..layers.layer_file import decompress_index

    with opened(bundle) as held:
        for layer in held.manifest.layers:
            if layer.kind == "project":
                index = held.index(layer, held.head(layer), decompress_index)
                paths = [entry.path for entry in index.files] + [one.path for one in index.links]
                yield from (path.removeprefix(_FOLDER) for path in paths)
