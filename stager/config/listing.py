"""Every setting, its value, and where that came from: the result of ``stager config``."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from bundle.redaction.secrets import masked, without_url_secrets

from ..core.values import Target
from .load import Config
from .sources import OVERRIDING, SITE_FILE, user_file, variable_of
from .table import WrittenSetting


@dataclass(frozen=True, kw_only=True)
class ListedSetting:
    """A setting as ``stager config`` shows it."""

    key: str
    """Its key path."""
    value: Any
    """Its value as it was written, without secrets, else the default that is in force; null where
    that is decided later, by the nodes or Slurm, or there is none."""
    origin: str
    """``variable``, ``project``, ``user``, ``site`` or ``default``."""
    place: str
    """The file or the variable; empty for a default."""
    variable: str
    """The variable that sets it."""


@dataclass(frozen=True, kw_only=True)
class ConfigResult:
    """The result of ``stager config``."""

    project: Path
    """The project's file; it need not exist."""
    user: Path
    """The user's own file; it need not exist."""
    site: Path
    """The site's file; it need not exist."""
    settings: tuple[ListedSetting, ...]
    """Every setting."""


def listed(config: Config, env: Mapping[str, str], offline_root: Path) -> ConfigResult:
    """Return every setting of a project and where it came from."""
    host = Target.of_host()
    in_force = {
        "environment.python": host.python,
        "environment.platform": host.platform,
        "environment.offline-root": str(offline_root),
    }
    settings = [
        replace(setting, value=in_force.get(setting.path)) if setting.value is None else setting
        for setting in config.settings
    ]
    return ConfigResult(
        project=config.source,
        user=user_file(env),
        site=SITE_FILE,
        settings=tuple(_listed(_overridden(setting, env)) for setting in settings),
    )


def _overridden(setting: WrittenSetting, env: Mapping[str, str]) -> WrittenSetting:
    variable = OVERRIDING.get(setting.path, "")
    if not env.get(variable):
        return setting
    return replace(setting, value=env[variable], origin="variable", place=variable)


def _listed(setting: WrittenSetting) -> ListedSetting:
    return ListedSetting(
        key=setting.path,
        value=_shown(setting.value),
        origin=setting.origin,
        place=setting.place,
        variable=variable_of(setting.path),
    )


def _shown(value: object) -> object:
    """Convert a value for JSON, with secrets masked."""
    if isinstance(value, Enum | Path | datetime.date | datetime.time):
        return str(value)
    if isinstance(value, str):
        return _without_secrets(value)
    if isinstance(value, Mapping):
        return {str(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        texts = [item for item in value if isinstance(item, str)]
        if len(texts) == len(value):
            return masked([without_url_secrets(text) for text in texts])
        return [_shown(item) for item in value]
    return value


def _without_secrets(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        return without_url_secrets(text)
    hidden = masked(words)
    return without_url_secrets(text if hidden == words else shlex.join(hidden))
