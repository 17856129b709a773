"""Reading parsed TOML documents key by key, and collecting every problem on the way.

A check takes the value of a key and returns the value to use; it raises :class:`ValueError` for a
value that is not allowed. The allowed values are described separately, so that every message reads
the same: key path, value found, values allowed.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bundle.node.node_root import ROOT_VARIABLE

from ..core import toml
from ..core.errors import ConfigError

# --- The places that settings come from, and the rule by which a variable is named after a key

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
    trust = data.get("trust")
    signers = trust.get("allowed-signers") if isinstance(trust, dict) else None
    if isinstance(signers, str) and not signers.startswith("/"):  # it would be a file of the user
        raise ConfigError(
            f"{SITE_FILE}: trust.allowed-signers: {signers} is no absolute path",
            hint="begin it with /: other paths start at each user's project or home",
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


T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, kw_only=True)
class WrittenSetting:
    """A setting: what it is, and where its value came from."""

    path: str
    """Its key path."""
    check: Callable[[object], object]
    """Its check."""
    allowed: str
    """The allowed values, in words."""
    default: object
    """The value of an absent key, as its user would write it."""
    value: object
    """The value as it was written; else the default."""
    origin: str
    """``variable``, ``project``, ``user``, ``site`` or ``default``."""
    place: str
    """The file or the variable; empty for a default."""


class Table:
    """One table of a document, with its key path; sub-tables share the list of problems.

    Attributes:
        problems: one line for each problem.
        places: the files and variables that have them.
        settings: what was taken, in this order.
    """

    def __init__(
        self,
        sources: Sequence[SettingsSource],
        env: Mapping[str, str] | None = None,
        *,
        path: str = "",
    ) -> None:
        """Wrap documents: fixed values win, then variables, then the first document with a key."""
        self._sources = sources
        self._env = env or {}
        self._path = path
        self._known: list[str] = []
        self._tables: list[Table] = []
        self.problems: list[str] = []
        self.places: dict[str, None] = {}
        self.settings: list[WrittenSetting] = []

    def take(
        self,
        key: str,
        default: D,
        check: Callable[[object], T],
        allowed: str,
        shown: object = None,
    ) -> T | D:
        """Return the value of a key, checked; the default if it is absent or wrong."""
        self._known.append(key)
        path = self._full(key)
        setting = WrittenSetting(
            path=path,
            check=check,
            allowed=allowed,
            default=default if shown is None else shown,
            value=default if shown is None else shown,
            origin="default",
            place="",
        )
        variable = variable_of(path)
        source = self._source_of(key)
        fixed = next((source for source in self._sources if source.is_fixed(path)), None)
        if fixed is not None:
            self._note_overrides(key, fixed)
        elif variable in self._env:
            text = self._env[variable]
            setting = replace(setting, value=text, origin="variable", place=variable)
            return self._of_text(setting, text, default, check)
        if source is None:
            self.settings.append(setting)
            return default
        value = source.data[key]
        self.settings.append(replace(setting, value=value, origin=source.origin, place=source.name))
        if _has_nul(value):
            wrong = f"found {describe(value)}, with a NUL character in it; remove that"
            self._note(key, source, wrong)
            return default
        try:
            return check(value)
        except ValueError:
            self._note(key, source, f"found {describe(value)}, allowed: {allowed}")
            return default

    def _source_of(self, key: str) -> SettingsSource | None:
        """Return the document that decides a key: the one that has fixed it, else the first."""
        fixed = [source for source in self._sources if source.is_fixed(self._full(key))]
        return next((source for source in fixed or self._sources if key in source.data), None)

    def _note_overrides(self, key: str, fixed: SettingsSource) -> None:
        path = self._full(key)
        wrong = f"fixed by your site in {fixed.name}: remove it here"
        values = [fixed.data[key]] if key in fixed.data else []  # none: the default is fixed
        for source in self._sources:
            if key in source.data and source.data[key] not in values and source is not fixed:
                self._note(key, source, wrong)
        for variable in filter(None, (variable_of(path), OVERRIDING.get(path))):
            text = self._env.get(variable)
            if text is not None and not any(value in values for value in readings(text)):
                self._note_variable(variable, wrong)

    def _of_text(
        self, setting: WrittenSetting, text: str, default: D, check: Callable[[object], T]
    ) -> T | D:
        """Return a variable's value, in the first reading of its text that the key allows."""
        for reading in readings(text):
            try:
                value = check(reading)
            except ValueError:
                continue
            self.settings.append(replace(setting, value=reading))
            return value
        self.settings.append(setting)
        self._note_variable(setting.place, f"found {describe(text)}, allowed: {setting.allowed}")
        return default

    def has(self, key: str) -> bool:
        """Return whether the key is present, whatever its value."""
        present = any(key in source.data for source in self._sources)
        return present or variable_of(self._full(key)) in self._env

    def problem(self, key: str, problem: str) -> None:
        """Note that a key's value cannot be used."""
        source = self._source_of(key)
        variable = variable_of(self._full(key))
        if variable in self._env:
            self._note_variable(variable, problem)
        else:
            self._note(key, source, problem)

    def _note(self, key: str, source: SettingsSource | None, problem: str) -> None:
        source = source or self._sources[0]
        place = "" if source.origin == "project" else f" in {source.name}"
        self.problems.append(f"{self._full(key)}{place}: {problem}")
        self.places[source.name] = None

    def _note_variable(self, variable: str, problem: str) -> None:
        self.problems.append(f"{variable}: {problem}")
        self.places[variable] = None

    def table(self, key: str) -> Table:
        """Return a sub-table; an absent one is empty."""
        self._known.append(key)
        inner = []
        for source in self._sources:
            value = source.data.get(key, {})
            if not isinstance(value, Mapping):
                self._note(
                    key, source, f"found {describe(value)}, allowed: a table, written [{key}]"
                )
                value = {}
            inner.append(replace(source, data=value))
        child = Table(inner, self._env, path=self._full(key))
        child.problems, child.places = self.problems, self.places
        child.settings = self.settings
        self._tables.append(child)
        return child

    def finish(self) -> list[str]:
        """Return all problems, including keys that nothing read."""
        known = self._known_paths()
        for path, source in self._unknown_paths():
            place = "" if source.origin == "project" else f" in {source.name}"
            self.problems.append(f"{path}{place}: unknown key; {_suggestion(path, known)}")
            self.places[source.name] = None
        for source in self._sources:
            for key in source.fixed:
                if not any(path == key or path.startswith(f"{key}.") for path in known):
                    self.problems.append(f"fixed in {source.name}: {key} is no setting")
                    self.places[source.name] = None
        for variable, problem in misspelt(self._env, [setting.path for setting in self.settings]):
            self._note_variable(variable, problem)
        return self.problems

    def _full(self, key: str) -> str:
        if not self._path:
            return key
        return f"{self._path}.{key}"

    def _known_paths(self) -> list[str]:
        paths = [self._full(key) for key in self._known]
        for table in self._tables:
            paths += table._known_paths()
        return paths

    def _unknown_paths(self) -> list[tuple[str, SettingsSource]]:
        paths = [
            (self._full(key), source)
            for source in self._sources
            for key in source.data
            if key not in self._known
        ]
        for table in self._tables:
            paths += table._unknown_paths()
        return paths


def describe(value: object) -> str:
    """Return a TOML value in words: its type, and the value itself if it is short."""
    try:
        return _described(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"


def _described(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {value!r}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return f"the date or time {value}"
    if isinstance(value, Mapping):
        return "a table"
    return f"the list {value!r}" if len(repr(value)) < 60 else "a list"


def _has_nul(value: object) -> bool:
    """Find a NUL in any string of a value: no path and no argument can contain one."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(_has_nul(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_has_nul, value))


def _suggestion(path: str, known: list[str]) -> str:
    nearest = _nearest(path, known)
    if nearest:
        return f"did you mean {nearest}?"
    return f"known are {', '.join(_siblings(path, known))}"


def _siblings(path: str, known: list[str]) -> dict[str, str]:
    table = path.rpartition(".")[0]
    siblings = {}
    for key in known:
        key_table, _, name = key.rpartition(".")
        if key_table == table:
            siblings[name] = key
    return siblings


def _nearest(path: str, known: list[str]) -> str:
    """Return the known key path most like this one: in its own table first, then in any."""
    name = path.rpartition(".")[2]
    namesakes = {key.rpartition(".")[2]: key for key in reversed(known)}
    for candidates, cutoff in ((_siblings(path, known), 0.6), (namesakes, 0.75)):
        match = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
        if match:
            return candidates[match[0]]
    return ""
