"""Paths that start at a home directory, which not everybody has."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError


def expanded(path: Path | str) -> Path:
    """Return a path with the home directory in place of a leading ``~`` or ``~USER``.

    Raises:
        ConfigError: there is no such user, or no home: no ``HOME``, and a user without an entry in
            the password file, as a container may have it.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigError(
            f"{path}: there is no home directory that this path could start at",
            hint="set HOME, or write the whole path",
        ) from exc
