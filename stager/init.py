"""Starting a project: the commented ``stager.toml``, and the settings of a project without one."""

from __future__ import annotations

from pathlib import Path

from .config import FILE_NAME, Config, parse, template
from .errors import ConfigError, StagerError
from .inputs import foreign

GUESSES = ("requirements.in", "requirements.txt", "pyproject.toml")
_READ = ("*.in", "*.txt", "pyproject.toml", "pylock.toml", "pylock.*.toml", "*.whl", "*.tar.gz")
"""Names of files that ``environment.requirements`` may name."""


def create(folder: Path, source: Path | None) -> Path:
    """Write ``stager.toml`` in a folder.

    Args:
        folder: where.
        source: the requirements file to name; None takes the first of the usual ones.

    Returns:
        The file that was written.

    Raises:
        ConfigError: there is one already, or ``source`` does not exist or is no requirement file.
        StagerError: it cannot be written.
    """
    path = folder / FILE_NAME
    if source is not None and not (folder / source).is_file():
        raise ConfigError(f"there is no file {source}", hint="name a requirements file with --from")
    if source is not None and not any(source.match(pattern) for pattern in _READ):
        raise ConfigError(f"{source} is not a requirement file", hint=foreign.remedy(source.name))
    guess = source or next((name for name in GUESSES if (folder / name).is_file()), None)
    text = template([str(guess)] if guess else [])
    try:
        with path.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError as exc:
        raise ConfigError(f"{path} exists already", hint="edit it, or move it away") from exc
    except OSError as exc:
        if exc.filename is None:  # it was made here, and the disk is full: leave no half of it
            path.unlink(missing_ok=True)
        raise StagerError(
            f"{path} cannot be written: {exc.strerror or exc}", hint="check the permissions there"
        ) from exc
    return path


def default(folder: Path) -> Config:
    """The settings of a folder without a ``stager.toml``, to work on a bundle named by its path."""
    empty: list[str] = []
    nothing = {"environment": {"requirements": empty}}  # the one key that must be there
    return parse(nothing, root=folder, source=folder / FILE_NAME)
