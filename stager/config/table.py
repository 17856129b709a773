"""The places that settings come from, and their reader, which collects every problem."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bundle.node.node_root import ROOT_VARIABLE
from bundle.protocol.dataclass import dataclass

from ..core import toml
from ..core.errors import ConfigError
from .checks import RefusedValue
from .job_settings import SettingRow, make_key

Document = Mapping[str, Any]  # a parsed TOML document, or a table of one
PREFIX = "STAGER_"
TABLES = ("environment", "project", "assets", "cluster", "launch")
SITE_FILE = Path("/etc/stager/config.toml")
"""The site's settings: below all others, and above them for the keys that ``fixed`` lists."""
OVERRIDING = {"environment.offline-root": "OFFLINE_ROOT", "cluster.node-root": ROOT_VARIABLE}
"""Variables with names of their own, which win over every other place."""
NO_HOME = "/nonexistent"  # the home of users without one, as Debian has it in its password file


class SettingsSource(NamedTuple):
    """A place that settings come from."""

    name: str
    origin: str  # ``project``, ``user`` or ``site``
    data: Document
    fixed: tuple[str, ...] = ()  # keys and tables that no other place may change


def is_fixed(path: str, fixed: Sequence[str]) -> bool:
    """Return whether a key path, or its table, is one of these."""
    return path in fixed or path.partition(".")[0] in fixed


def make_variable_name(path: str) -> str:
    """Return the variable of a setting: ``cluster.min-nodes`` is ``STAGER_CLUSTER_MIN_NODES``."""
    return PREFIX + path.replace(".", "_").replace("-", "_").upper()


def read_text_forms(text: str) -> Iterator[object]:
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


def find_user_file(env: Mapping[str, str]) -> Path:
    """Return the path of the user's own settings; the file may be absent."""
    base = env.get("XDG_CONFIG_HOME", "")
    if not base.startswith("/"):  # the XDG base directory specification has a relative one ignored
        home = os.path.expanduser("~")  # noqa: PTH111 - Path's own raises where there is none
        base = f"{home if home.startswith('/') else NO_HOME}/.config"
    return Path(base) / "stager" / "config.toml"


def load_default_sources(env: Mapping[str, str]) -> list[SettingsSource]:
    """Return the settings of the user and of the site, which may be none."""
    path = find_user_file(env)
    data = toml.read(path) if _exists(path) else {}
    return [SettingsSource(name=str(path), origin="user", data=data), load_site_source()]


def load_site_source() -> SettingsSource:
    """Return the site's settings, which may be none; others may not write to their file."""
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


@dataclass(frozen=True)
class ListedSetting:
    """A setting as ``stager config`` shows it, or a place that has a value for it."""

    key: str
    value: Any
    """As it was written, without secrets, else the default; null if that is decided later."""
    origin: str = "default"  # or ``variable``, ``project``, ``user`` or ``site``
    place: str = ""  # the file or the variable; empty for a default
    variable: str = ""  # the variable that can set it


class SettingsReader:
    """Reads documents row by row: fixed values win, then variables, then the first document."""

    def __init__(self, sources: Sequence[SettingsSource], env: Mapping[str, str]) -> None:
        self._sources = sources
        self._env = env
        self._known: list[str] = []
        self.problems: list[str] = []
        self.places: dict[str, None] = {}  # the files and variables that have problems
        self.settings: list[ListedSetting] = []

    def read(
        self, section: str, rows: Mapping[str, SettingRow], root: Path, defaults: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values of a table's rows, by field, checked; the default of a wrong one."""
        self._known.append(section)
        for source in self._sources:
            table = source.data.get(section, {})
            if not isinstance(table, Mapping):
                wrong = f"found {describe(table)}, allowed: a table, written [{section}]"
                self._note_key(section, source, wrong)
        values = {}
        for name, row in rows.items():
            key = f"{section}.{make_key(name)}"
            self._known.append(key)
            values[name] = self._read_row(key, row, root, defaults.get(name, row.default))
        return values

    def _read_row(self, key: str, row: SettingRow, root: Path, written: object) -> object:
        check = row.make_check(root)
        default = written if written in (None, (), "") else check(written)
        found = self._choose(key)
        if found is None:
            variable = make_variable_name(key)
            self.settings.append(ListedSetting(key, written, variable=variable))
            return default
        value, reading, problems = _read_first(check, found, row.allowed)
        self.settings.append(replace(found, value=reading))
        for place, problem in problems:
            self._note(replace(found, key=f"{key}{place}"), problem)
        return default if problems else value

    def _choose(self, key: str) -> ListedSetting | None:
        """Return the value that counts; note others where the site has fixed it."""
        found = self._list_values(key)
        fixed = next((source for source in self._sources if is_fixed(key, source.fixed)), None)
        if fixed is None:
            return next(iter(found), None)
        own = next((one for one in found if one.place == fixed.name), None)
        values = [own.value] if own else []  # none: the default is fixed
        for other in (*found, *self._list_variable(key, OVERRIDING.get(key, ""))):
            if not any(reading in values for reading in _list_readings(other)):
                self._note(other, f"fixed by your site in {fixed.name}: remove it here")
        return own

    def _list_values(self, key: str) -> list[ListedSetting]:
        variable = make_variable_name(key)
        found = self._list_variable(key, variable)
        for source in self._sources:
            value = _get_value(source, key)
            if value is not None:
                found.append(ListedSetting(key, value, source.origin, source.name, variable))
        return found

    def _list_variable(self, key: str, name: str) -> list[ListedSetting]:
        text = self._env.get(name)
        return [] if text is None else [ListedSetting(key, text, "variable", name, name)]

    def is_given(self, key: str) -> bool:
        """Return whether the key is present, whatever its value."""
        return bool(self._list_values(key))

    def note(self, key: str, problem: str) -> None:
        """Note that a key's value cannot be used."""
        values = self._list_values(key)
        if values:
            self._note(values[0], problem)
        else:
            self._note_key(key, self._sources[0], problem)

    def _note_key(self, key: str, source: SettingsSource, problem: str) -> None:
        self._note(ListedSetting(key, None, source.origin, source.name), problem)

    def _note(self, found: ListedSetting, problem: str) -> None:
        where = found.place if found.origin == "variable" else found.key
        if found.origin in ("user", "site"):
            where += f" in {found.place}"
        self.problems.append(f"{where}: {problem}")
        self.places[found.place] = None

    def finish(self) -> list[str]:
        """Return all problems, including keys and variables that nothing read."""
        self._note_unknown_keys()
        fixed = [(source, key) for source in self._sources for key in source.fixed]
        for source, key in fixed:
            if key not in self._known:
                self.problems.append(f"fixed in {source.name}: {key} is no setting")
                self.places[source.name] = None
        self._note_unknown_variables()
        return self.problems

    def _note_unknown_variables(self) -> None:
        known = [setting.variable for setting in self.settings]
        begins = tuple(make_variable_name(f"{table}.") for table in TABLES)
        for name in sorted(self._env):
            if name.startswith(begins) and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
                meant = f"did you mean {near[0]}?" if near else "`stager config` lists the known"
                found = ListedSetting(name, None, "variable", name)
                self._note(found, f"unknown variable; {meant}")

    def _note_unknown_keys(self) -> None:
        tables = [key for key in self._known if "." not in key]
        for table, source in itertools.product(("", *tables), self._sources):
            for key in _list_key_paths(source, table):
                if key not in self._known:
                    self._note_key(key, source, f"unknown key; {_suggest_key(key, self._known)}")


def _list_readings(found: ListedSetting) -> Iterable[object]:
    return read_text_forms(found.value) if found.origin == "variable" else [found.value]


def _read_first(
    check: Callable[[object], object], found: ListedSetting, allowed: str
) -> tuple[object, object, Sequence[tuple[str, str]]]:
    """Return the value of the first reading that is allowed, and that reading; else problems."""
    words = f"found {describe(found.value)}"
    if _has_nul(found.value):
        return None, found.value, [("", f"{words}, with a NUL character in it; remove that")]
    problems: Sequence[tuple[str, str]] = [("", f"{words}, allowed: {allowed}")]
    for reading in _list_readings(found):
        try:
            return check(reading), reading, ()
        except ValueError as exc:
            problems = exc.problems if isinstance(exc, RefusedValue) else problems
    return None, found.value, problems


def _list_key_paths(source: SettingsSource, table: str) -> list[str]:
    if not table:
        return list(source.data)
    content = source.data.get(table)
    return [f"{table}.{key}" for key in content] if isinstance(content, Mapping) else []


def _get_value(source: SettingsSource, path: str) -> object:
    """Return the value of a key; None where it is absent, since TOML has no null."""
    table, _, key = path.partition(".")
    content = source.data.get(table)
    return content.get(key) if isinstance(content, Mapping) else None


def describe(value: object) -> str:
    """Return a TOML value in words: its type, and the value itself if it is short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"the list {value!r}" if len(repr(value)) < 60 else "a list"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, str):
        return f"the string {value!r}"
    return f"the {'number' if isinstance(value, int | float) else 'date or time'} {value}"


def _has_nul(value: object) -> bool:
    """Find a NUL in any string of a value: no path and no argument can contain one."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(_has_nul(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_has_nul, value))


def _suggest_key(path: str, known: list[str]) -> str:
    table, _, name = path.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == table]
    near = difflib.get_close_matches(name, siblings, n=1)
    meant = [f"{table}.{near[0]}".lstrip(".")] if near else []
    meant += [key for key in known if key.endswith(f".{name}")]
    return f"did you mean {meant[0]}?" if meant else f"known are {', '.join(siblings)}"
