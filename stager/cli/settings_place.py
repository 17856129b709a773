"""The place of the settings, as the options before the command name it."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

from ..core.errors import ConfigError

_place: ContextVar[Path | None] = ContextVar("place", default=None)


def settings_place() -> Path:
    """Return a settings file, or the folder from which to look upwards for one.

    Raises:
        ConfigError: this directory has been removed.
    """
    place = _place.get()
    if place is not None:
        return place
    try:
        return Path.cwd()
    except OSError as exc:
        raise ConfigError(
            f"the current directory cannot be used: {exc.strerror}",
            hint="it was removed or moved: go to the project's folder again with `cd`",
        ) from exc


def choose_place(place: Path | None) -> None:
    """Take the settings from a file or a folder, in place of this directory; None changes nothing.

    Only for as long as the process runs one command.
    """
    _place.set(None if place is None else place.absolute())
