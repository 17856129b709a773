"""``stager.toml``: finding it, checking every value in it, and the resulting values.

A default of None means "decided later, from the machine".
"""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Backend
from bundle.protocol.job import ONE_A_CPU
from bundle.redaction.secrets import mask_arguments, strip_url_secrets

from ..core import toml
from ..core.errors import ConfigError
from ..core.values import Target
from .job_settings import ClusterConfig, LaunchConfig, ProjectConfig, list_rows, make_project_name
from .sections import AssetsConfig, EnvironmentConfig, TrustConfig
from .table import (
    OVERRIDING,
    SITE_FILE,
    Document,
    ListedSetting,
    SettingsReader,
    SettingsSource,
    describe,
    find_user_file,
    is_fixed,
    load_default_sources,
)

FILE_NAME = "stager.toml"
PYPROJECT = "pyproject.toml"
_KEYS_HINT = "`stager init` writes a file that explains every key; so does docs/settings.md"
SECTIONS = {
    "environment": EnvironmentConfig,
    "project": ProjectConfig,
    "assets": AssetsConfig,
    "cluster": ClusterConfig,
    "launch": LaunchConfig,
    "trust": TrustConfig,
}
"""The tables of ``stager.toml``, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one project."""

    root: Path  # the folder of the file; relative paths start here
    source: Path
    environment: EnvironmentConfig
    project: ProjectConfig
    assets: AssetsConfig
    cluster: ClusterConfig
    launch: LaunchConfig
    trust: TrustConfig = field(default_factory=TrustConfig)
    settings: tuple[ListedSetting, ...] = field(default=(), compare=False, repr=False)
    fixed: tuple[str, ...] = field(default=(), compare=False, repr=False)  # as the site's file says

    @property
    def name(self) -> str:
        """The project's name: of the bundle's file, and of the job."""
        return self.project.name

    def is_fixed(self, path: str) -> bool:
        """Return whether the site's file fixes a key, alone or with its table."""
        return is_fixed(path, self.fixed)

    def refuse_fixed(self, paths: Iterable[str]) -> None:
        """Refuse to change keys that the site's file fixes; all such are named."""
        wrong = [path for path in paths if self.is_fixed(path)]
        if wrong:
            raise ConfigError(
                f"fixed by your site in {SITE_FILE}: {', '.join(wrong)}",
                hint="leave out the option that changes it",
            )


class NoSettingsError(ConfigError):
    """There is no settings file."""


def load(start: Path) -> Config:
    """Read a settings file, or the nearest one in a folder or above it.

    That is a ``stager.toml``, or a ``pyproject.toml`` with a ``[tool.stager]`` table. The error
    names all values that cannot be used.
    """
    found = find(start)
    if found is None:
        raise NoSettingsError(
            f"no {FILE_NAME}, and no {PYPROJECT} with a [tool.stager] table",
            hint="run `stager init` to write one, or go to the project's folder",
            context=[f"looked in {start.absolute()} and every folder above it"],
        )
    data = toml.read(found)
    return parse(
        _get_own_table(data, found) if found.name == PYPROJECT else data,
        root=found.parent,
        source=found,
        defaults=load_default_sources(os.environ),
        env=os.environ,
    )


def find(start: Path) -> Path | None:
    """Return the settings file that :func:`load` reads; None if there is none."""
    start = Path(os.path.realpath(start)) if ".." in start.parts else start.absolute()
    folders = [start, *start.parents]
    files = (folder / name for folder in folders for name in (FILE_NAME, PYPROJECT))
    try:
        if start.is_file():
            return start
        return next(filter(_is_settings_file, files), None)
    except OSError as exc:
        raise ConfigError(
            f"cannot look for {FILE_NAME} at {exc.filename or start}: {exc.strerror or exc}",
            hint="check the path, and the permissions of the folders in it",
        ) from exc


def parse(
    data: Document,
    *,
    root: Path,
    source: Path,
    defaults: Sequence[SettingsSource] = (),
    env: Mapping[str, str] | None = None,
) -> Config:
    """Turn a parsed document into checked values; touches no file.

    Relative paths start at ``root``, wherever they are written. ``defaults`` are for keys that the
    document does not have; variables win over all of them, but for what the site has fixed.
    """
    sources = [SettingsSource(name=str(source), origin="project", data=data), *defaults]
    reader = SettingsReader(sources, env or {})
    own_defaults: dict[str, dict[str, object]] = {
        # Settings in a pyproject.toml name that file by default.
        "environment": {"requirements": [PYPROJECT]} if source.name == PYPROJECT else {},
        "project": {"name": make_project_name(root.name)},
    }
    sections: dict[str, Any] = {
        section: kind(**reader.read(section, list_rows(kind), root, own_defaults.get(section, {})))
        for section, kind in SECTIONS.items()
    }
    fixed = tuple(key for source in defaults for key in source.fixed)
    settings = tuple(reader.settings)
    config = Config(root=root, source=source, settings=settings, fixed=fixed, **sections)
    _check_together(config, reader)
    problems = reader.finish()
    if problems:
        many = format_count(len(problems), "problem")
        raise ConfigError(
            f"{', '.join(reader.places) or source}: {many} in the settings",
            hint=_KEYS_HINT,
            context=problems,
        )
    paths = config.assets.paths
    more = (place for _, place in config.assets.env if not any(map(place.is_relative_to, paths)))
    assets = replace(config.assets, paths=(*paths, *dict.fromkeys(more)))
    return replace(config, assets=assets, launch=choose_ranks(config.launch))


def choose_ranks(config: LaunchConfig) -> LaunchConfig:
    """Replace a word of torchrun for a node's ranks, which implies a backend if none is chosen."""
    known: dict[object, tuple[int | None, Backend]] = {
        "auto": (None, config.backend),
        "gpu": (None, Backend.NCCL),
        "cpu": (ONE_A_CPU, Backend.GLOO),
    }
    number, implied = known.get(config.nproc_per_node, (config.nproc_per_node, config.backend))
    backend = implied if config.backend is Backend.AUTO else config.backend
    return replace(config, nproc_per_node=number, backend=backend)


def _check_together(config: Config, reader: SettingsReader) -> None:
    environment, cluster, trust = config.environment, config.cluster, config.trust
    if not environment.requirements and not reader.is_given("environment.requirements"):
        missing = 'missing; name what to install: ["requirements.txt"]'
        reader.note("environment.requirements", missing)
    _check_target(environment, reader)
    if (cluster.min_nodes or 0) > cluster.nodes[1]:
        wrong = f"found {cluster.min_nodes}, which is more than cluster.nodes"
        reader.note("cluster.min-nodes", wrong)
    if trust.require and not (trust.allowed_signers or reader.is_given("trust.allowed-signers")):
        wrong = "true needs allowed-signers, the file with the keys that may sign"
        reader.note("trust.require", wrong)


def _check_target(environment: EnvironmentConfig, reader: SettingsReader) -> None:
    """Note a target that cannot be: it is made later, its problem is listed with the others."""
    python, platform = environment.python or "3.11", environment.platform
    try:
        Target(python=python, platform=platform or "manylinux_2_28_x86_64")
    except ConfigError as exc:
        reader.problems.append(exc.message)


def find_project_file(start: Path) -> Path:
    """Return the settings file of a directory; the directory if it has none that can be read."""
    try:
        return find(start) or start
    except ConfigError:
        return start


def _get_own_table(data: Document, path: Path) -> Document:
    own: object = data
    for key in ("tool", "stager"):
        own = own.get(key, {}) if isinstance(own, Mapping) else own
    if isinstance(own, Mapping):
        return own
    raise ConfigError(
        f"{path}: tool.stager: found {describe(own)}, allowed: a table, written [tool.stager]",
        hint=_KEYS_HINT,
    )


def _is_settings_file(path: Path) -> bool:
    """Return whether a file is there, and a pyproject.toml has our table, be it broken."""
    if path.name == FILE_NAME or not path.is_file():
        return path.is_file()
    try:
        tool = toml.read(path).get("tool")
        return isinstance(tool, Mapping) and "stager" in tool
    except ConfigError:
        if b"[tool.stager" in path.read_bytes():
            raise
        return False


@dataclass(frozen=True, kw_only=True)
class ConfigResult:
    """The result of ``stager config``."""

    project: Path
    user: Path
    site: Path
    settings: tuple[ListedSetting, ...]


def list_settings(config: Config, env: Mapping[str, str], offline_root: Path) -> ConfigResult:
    """Return every setting of a project and where it came from."""
    host = Target.from_host()
    in_force = {
        "environment.python": host.python,
        "environment.platform": host.platform,
        "environment.offline-root": str(offline_root),
    }
    return ConfigResult(
        project=config.source,
        user=find_user_file(env),
        site=SITE_FILE,
        settings=tuple(_mask_setting(setting, env, in_force) for setting in config.settings),
    )


def _mask_setting(
    setting: ListedSetting, env: Mapping[str, str], in_force: Mapping[str, str]
) -> ListedSetting:
    variable = OVERRIDING.get(setting.key, "")
    if env.get(variable):
        setting = replace(setting, value=env[variable], origin="variable", place=variable)
    value = in_force.get(setting.key) if setting.value is None else setting.value
    return replace(setting, value=_mask_value(value))


def _mask_value(value: object) -> object:
    if isinstance(value, Enum | Path | datetime.date | datetime.time):
        return str(value)
    if isinstance(value, str):
        return _mask_text(value)
    if isinstance(value, Mapping):
        return {str(key): _mask_value(item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if all(isinstance(item, str) for item in value):
        return mask_arguments(list(map(strip_url_secrets, value)))
    return list(map(_mask_value, value))


def _mask_text(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        return strip_url_secrets(text)
    hidden = mask_arguments(words)
    return strip_url_secrets(text if hidden == words else shlex.join(hidden))
