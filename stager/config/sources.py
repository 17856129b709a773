"""The places that settings come from, and the rule by which a variable is named after a key."""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.node.node_root import ROOT_VARIABLE

from ..core import toml
from ..core.errors import ConfigError

PREFIX = "STAGER_"
TABLES = ("environment", "project", "assets", "cluster", "launch")

_TAKEN = frozenset(
    f"STAGER_{name}"
    for name in (
        *("ASSETS", "ENV", "IMPORTS", "JOB_DIR", "LINGER_SECONDS", "NODE", "NODE_ROOT", "OUTPUT"),
        *("OUTPUT_NONCE", "PATCHES", "PATCHES_SAID", "PROCESS", "PROJECT", "TRAINER"),
    )
)
"""Variables that mean something else: most of them are set for ranks, and seen by a stager that a
rank or `stager exec` starts."""
_TAKEN_PREFIXES = ("STAGER_PROGRAM_", "STAGER_TEST_", "STAGER_TORTURE_")
_NEAR = 0.85
SITE_FILE = Path("/etc/stager/config.toml")
"""The site's settings: below all others, and above them for the keys that ``fixed`` lists."""
OVERRIDING = {"environment.offline-root": "OFFLINE_ROOT", "cluster.node-root": ROOT_VARIABLE}
"""Variables with names of their own, which win over every other place."""
NO_HOME = "/nonexistent"
"""The home of users without one, as Debian has it in its password file."""


@dataclass(frozen=True, kw_only=True)
class SettingsSource:
    """A place that settings come from."""

    name: str
    """The file."""
    origin: str
    """``project``, ``user`` or ``site``."""
    data: Mapping[str, Any]
    """Its document, or the table of it that is read."""
    fixed: tuple[str, ...] = ()
    """Keys and tables of it that no other place may change: ``trust``, ``cluster.node-root``."""

    def is_fixed(self, path: str) -> bool:
        """Return whether no other place may change a setting."""
        return any(path == key or path.startswith(f"{key}.") for key in self.fixed)


def variable_of(path: str) -> str:
    """Return the variable of a setting: ``cluster.min-nodes`` is ``STAGER_CLUSTER_MIN_NODES``."""
    return PREFIX + path.replace(".", "_").replace("-", "_").upper()


def readings(text: str) -> Iterator[object]:
    """Yield what the text of a variable may mean: a TOML value, the text, the words of a list.

    The first that the key allows counts. Words are split as a shell splits them.
    """
    if "\n" not in text:
        with contextlib.suppress(ConfigError):
            yield toml.loads(f"value = {text}", Path("a variable"))["value"]
    yield text
    try:
        yield shlex.split(text)
    except ValueError:
        return


def user_file(env: Mapping[str, str]) -> Path:
    """Return the path of the user's own settings; the file may be absent."""
    base = env.get("XDG_CONFIG_HOME", "")
    # The XDG base directory specification has a relative path ignored.
    if base.startswith("/"):
        return Path(base) / "stager" / "config.toml"
    home = os.path.expanduser("~")  # noqa: PTH111 - Path's own raises where there is none
    folder = Path(home if home.startswith("/") else NO_HOME) / ".config"
    return folder / "stager" / "config.toml"


def user_source(env: Mapping[str, str]) -> SettingsSource:
    """Return the user's own settings, which may be none.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = user_file(env)
    data = toml.read(path) if _exists(path) else {}
    return SettingsSource(name=str(path), origin="user", data=data)


def default_sources(env: Mapping[str, str]) -> list[SettingsSource]:
    """Return the settings of the user and of the site.

    Raises:
        ConfigError: a file cannot be used.
    """
    return [user_source(env), site_source()]


def site_source() -> SettingsSource:
    """Return the site's settings, which may be none.

    Raises:
        ConfigError: the file cannot be read, others than its owner may write to it, or ``fixed`` is
            no list of keys.
    """
    if not _exists(SITE_FILE):
        return SettingsSource(name=str(SITE_FILE), origin="site", data={})
    data = toml.read(SITE_FILE)
    if SITE_FILE.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{SITE_FILE}: others than its owner may write to it",
            hint=f"ask your administrator to run `chmod go-w {SITE_FILE}`",
        )
    fixed = data.pop("fixed", [])
    if not isinstance(fixed, list) or not all(isinstance(key, str) for key in fixed):
        raise ConfigError(
            f"{SITE_FILE}: fixed: allowed: a list of keys",
            hint='for example fixed = ["cluster.node-root", "trust"]',
        )
    return SettingsSource(name=str(SITE_FILE), origin="site", data=data, fixed=tuple(fixed))


def _exists(path: Path) -> bool:
    """Return False only if nothing exists; reading the file reports any other error."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def misspelt(env: Mapping[str, str], paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each variable that looks like a setting's and is none's, with what is wrong."""
    known = [variable_of(path) for path in paths]
    begins = tuple(variable_of(f"{table}.") for table in TABLES)
    for name in sorted(env):
        foreign = not name.startswith(PREFIX) or name in _TAKEN
        if foreign or name in known or name.startswith(_TAKEN_PREFIXES):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
        if near:
            yield name, f"unknown variable; did you mean {near[0]}?"
        elif name.startswith(begins):
            yield name, "unknown variable; `stager config` lists the known ones"
