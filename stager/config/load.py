"""``stager.toml``: finding it, checking every value in it, and the resulting values.

Parsing happens here, once: after :func:`load` every value has its type and its range, paths are
absolute, and defaults are filled in. A default of None means "decided later, from the machine".
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
from .job_settings import (
    ClusterConfig,
    LaunchConfig,
    ProjectConfig,
    list_rows,
    make_project_name,
)
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
    is_within,
    load_default_sources,
)

FILE_NAME = "stager.toml"
PYPROJECT = "pyproject.toml"
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

    root: Path
    """The folder of the file; relative paths start here."""
    source: Path
    environment: EnvironmentConfig
    project: ProjectConfig
    assets: AssetsConfig
    cluster: ClusterConfig
    launch: LaunchConfig
    trust: TrustConfig = field(default_factory=TrustConfig)
    settings: tuple[ListedSetting, ...] = field(default=(), compare=False, repr=False)
    """Each setting as it was written, and where."""
    fixed: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Keys and tables that the site's file fixes, such as ``cluster.partition`` and ``trust``."""

    @property
    def name(self) -> str:
        """The project's name: of the bundle's file, and of the job."""
        return self.project.name

    def is_fixed(self, path: str) -> bool:
        """Return whether the site's file fixes a key, alone or with its table."""
        return any(is_within(path, key) for key in self.fixed)

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
    """Find and read the project's settings.

    Args:
        start: a settings file, or the folder from which to look upwards: the nearest
            ``stager.toml``, or ``pyproject.toml`` with a ``[tool.stager]`` table, wins.

    Raises:
        ConfigError: no such file, not TOML, or values that cannot be used (all of them).
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
    """Return the settings file that :func:`load` reads; None if there is none.

    Raises:
        ConfigError: a ``pyproject.toml`` on the way that seems to be meant is not TOML; or a folder
            may not be looked into.
    """
    start = Path(os.path.realpath(start)) if ".." in start.parts else start.absolute()
    try:
        return _find_nearest(start)
    except OSError as exc:
        raise ConfigError(
            f"cannot look for {FILE_NAME} at {exc.filename or start}: {exc.strerror or exc}",
            hint="check the path, and the permissions of the folders in it",
        ) from exc


def _find_nearest(start: Path) -> Path | None:
    if start.is_file():
        return start
    for folder in [start, *start.parents]:
        own, shared = folder / FILE_NAME, folder / PYPROJECT
        if own.is_file():
            return own
        if shared.is_file() and _mentions_us(shared):
            return shared
    return None


def parse(
    data: Document,
    *,
    root: Path,
    source: Path,
    defaults: Sequence[SettingsSource] = (),
    env: Mapping[str, str] | None = None,
) -> Config:
    """Turn parsed documents into checked values; touches no file.

    Args:
        data: the document (of a ``pyproject.toml``: the ``[tool.stager]`` table).
        root: the folder that relative paths start from, wherever they are written.
        source: the file the document was read from; a ``pyproject.toml`` supplies its own
            dependencies as the default of ``environment.requirements``.
        defaults: the user's own settings and the site's, for keys that the document does not have.
        env: variables, which win over all of them, but for what the site has fixed.
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
    config = Config(
        root=root,
        source=source,
        settings=tuple(reader.settings),
        fixed=tuple(key for source in defaults for key in source.fixed),
        **sections,
    )
    _check_together(config, reader)
    problems = reader.finish()
    if problems:
        many = format_count(len(problems), "problem")
        raise ConfigError(
            f"{', '.join(reader.places) or source}: {many} in the settings",
            hint="`stager init` writes a file that explains every key; so does docs/settings.md",
            context=problems,
        )
    paths = config.assets.paths
    more = (place for _, place in config.assets.env if not any(map(place.is_relative_to, paths)))
    assets = replace(config.assets, paths=(*paths, *dict.fromkeys(more)))
    return replace(config, assets=assets, launch=choose_ranks(config.launch))


def choose_ranks(config: LaunchConfig) -> LaunchConfig:
    """Replace a word of torchrun for the ranks of a node.

    Where the backend is not chosen, ``gpu`` asks for a GPU on each node, and ``cpu`` for none.
    """
    known: dict[object, tuple[int | None, Backend]] = {
        "auto": (None, config.backend),
        "gpu": (None, Backend.NCCL),
        "cpu": (ONE_A_CPU, Backend.GLOO),
    }
    number, implied = known.get(config.nproc_per_node, (config.nproc_per_node, config.backend))
    backend = implied if config.backend is Backend.AUTO else config.backend
    return replace(config, nproc_per_node=number, backend=backend)


def _check_together(config: Config, reader: SettingsReader) -> None:
    """Note values that cannot be used beside others."""
    environment, cluster, trust = config.environment, config.cluster, config.trust
    if not environment.requirements and not reader.is_given("environment.requirements"):
        reader.note(
            "environment.requirements", 'missing; name what to install: ["requirements.txt"]'
        )
    _check_target(environment, reader)
    if (cluster.min_nodes or 0) > cluster.nodes[1]:
        reader.note(
            "cluster.min-nodes", f"found {cluster.min_nodes}, which is more than cluster.nodes"
        )
    if trust.require and not (trust.allowed_signers or reader.is_given("trust.allowed-signers")):
        reader.note(
            "trust.require", "true needs allowed-signers, the file with the keys that may sign"
        )


def _check_target(environment: EnvironmentConfig, reader: SettingsReader) -> None:
    """Note a target that cannot be: it is made later, its problem is listed with the others."""
    try:
        Target(
            python=environment.python or "3.11",
            platform=environment.platform or "manylinux_2_28_x86_64",
        )
    except ConfigError as exc:
        reader.problems.append(exc.message)


def find_project_file(start: Path | None = None) -> Path:
    """Return the settings file of a directory (None: this one); the directory if there is none."""
    try:
        start = start or Path.cwd()
        return find(start) or start
    except ConfigError:
        return Path.cwd()
    except OSError:  # the directory is gone
        return Path()


def _get_own_table(data: Document, path: Path) -> Document:
    own: object = data
    for key in ("tool", "stager"):
        own = own.get(key, {}) if isinstance(own, Mapping) else own
    if isinstance(own, Mapping):
        return own
    raise ConfigError(
        f"{path}: tool.stager: found {describe(own)}, allowed: a table, written [tool.stager]",
        hint="`stager init` writes a file that explains every key; so does docs/settings.md",
    )


def _mentions_us(path: Path) -> bool:
    """Return whether a pyproject.toml has our table; ignore a broken one without it."""
    try:
        tool = toml.read(path).get("tool")
        return isinstance(tool, Mapping) and "stager" in tool
    except ConfigError:
        if b"[tool.stager" in path.read_bytes():
            raise
        return False


# --- Every setting, its value, and where that came from: the result of ``stager config`` ---------


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
    """Convert a value for JSON, with secrets masked."""
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
