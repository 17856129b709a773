"""The places that settings come from, and their reader, which collects every problem."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bundle.node.node_root import ROOT_VARIABLE

from ..core import toml
from ..core.errors import ConfigError
from .checks import RefusedValue
from .job_settings import SettingRow, make_key

# --- The places that settings come from, and the rule by which a variable is named after a key

Document = Mapping[str, Any]
"""A parsed TOML document, or a table of one."""
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
    origin: str
    """``project``, ``user`` or ``site``."""
    data: Document
    fixed: tuple[str, ...] = ()
    """Keys and tables of it that no other place may change: ``trust``, ``cluster.node-root``."""

    def is_fixed(self, path: str) -> bool:
        """Return whether no other place may change a setting."""
        return any(is_within(path, key) for key in self.fixed)


def is_within(path: str, key: str) -> bool:
    """Return whether a key path is this one, or lies in this table."""
    return path == key or path.startswith(f"{key}.")


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
    # The XDG base directory specification has a relative path ignored.
    if base.startswith("/"):
        return Path(base) / "stager" / "config.toml"
    home = os.path.expanduser("~")  # noqa: PTH111 - Path's own raises where there is none
    folder = Path(home if home.startswith("/") else NO_HOME) / ".config"
    return folder / "stager" / "config.toml"


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


def find_misspelt_variables(
    env: Mapping[str, str], paths: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield each variable that looks like a setting's and is none's, with what is wrong."""
    known = [make_variable_name(path) for path in paths]
    begins = tuple(make_variable_name(f"{table}.") for table in TABLES)
    for name in sorted(env):
        foreign = not name.startswith(PREFIX) or name in _TAKEN
        if foreign or name in known or name.startswith(_TAKEN_PREFIXES):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
        if near:
            yield name, f"unknown variable; did you mean {near[0]}?"
        elif name.startswith(begins):
            yield name, "unknown variable; `stager config` lists the known ones"


class WrittenSetting(NamedTuple):
    """A setting, and where its value came from."""

    path: str
    value: object
    """The value as it was written; else the default, as its user would write it."""
    origin: str = "default"
    """``variable``, ``project``, ``user``, ``site`` or ``default``."""
    place: str = ""
    """The file or the variable; empty for a default."""


class SettingsReader:
    """Reads documents row by row: fixed values win, then variables, then the first document.

    Attributes:
        problems: one line for each problem.
        places: the files and variables that have them.
        settings: what was read, in this order.
    """

    def __init__(self, sources: Sequence[SettingsSource], env: Mapping[str, str]) -> None:
        self._sources = sources
        self._env = env
        self._known: list[str] = []
        self.problems: list[str] = []
        self.places: dict[str, None] = {}
        self.settings: list[WrittenSetting] = []

    def read(
        self, section: str, rows: Mapping[str, SettingRow], root: Path, **defaults: object
    ) -> dict[str, Any]:
        """Return the values of a table's rows, by field, checked; the default of a wrong one."""
        self._known.append(section)
        for source in self._sources:
            value = source.data.get(section, {})
            if not isinstance(value, Mapping):
                wrong = f"found {describe(value)}, allowed: a table, written [{section}]"
                self._note(section, source, wrong)
        values = {}
        for name, row in rows.items():
            path = f"{section}.{make_key(name)}"
            self._known.append(path)
            values[name] = self._read_row(path, row, root, defaults.get(name, row.default))
        return values

    def _read_row(self, path: str, row: SettingRow, root: Path, written: object) -> object:
        check = row.make_check(root)
        default = written if written in (None, (), "") else check(written)
        fixed = next((source for source in self._sources if source.is_fixed(path)), None)
        if fixed is not None:
            self._note_overrides(path, fixed)
        source, readings, setting = self._find_value(path, use_variable=fixed is None)
        if not readings:
            self.settings.append(WrittenSetting(path, written))
            return default
        value, read, problems = _read_first(check, readings, setting.value, row.allowed)
        self.settings.append(setting._replace(value=read))
        for place, problem in problems:
            if source is None:
                self._note_variable(setting.place, problem)
            else:
                self._note(f"{path}{place}", source, problem)
        return default if problems else value

    def _find_value(
        self, path: str, *, use_variable: bool
    ) -> tuple[SettingsSource | None, Iterator[object] | None, WrittenSetting]:
        """Return where a value is written, None for a variable; and its possible readings."""
        variable = make_variable_name(path)
        if use_variable and variable in self._env:
            text = self._env[variable]
            return None, read_text_forms(text), WrittenSetting(path, text, "variable", variable)
        source = self._find_source(path)
        if source is None:
            return None, None, WrittenSetting(path, None)
        found = _get_value(source, path)
        return source, iter([found]), WrittenSetting(path, found, source.origin, source.name)

    def _find_source(self, path: str) -> SettingsSource | None:
        """Return the document that decides a key: the one that has fixed it, else the first."""
        fixed = [source for source in self._sources if source.is_fixed(path)]
        return next(
            (one for one in fixed or self._sources if _get_value(one, path) is not None), None
        )

    def _note_overrides(self, path: str, fixed: SettingsSource) -> None:
        wrong = f"fixed by your site in {fixed.name}: remove it here"
        own = _get_value(fixed, path)
        values = [] if own is None else [own]  # none: the default is fixed
        for source in self._sources:
            if source is not fixed and _get_value(source, path) not in (None, *values):
                self._note(path, source, wrong)
        for variable in filter(None, (make_variable_name(path), OVERRIDING.get(path))):
            text = self._env.get(variable)
            if text is not None and not any(value in values for value in read_text_forms(text)):
                self._note_variable(variable, wrong)

    def is_given(self, path: str) -> bool:
        """Return whether the key is present, whatever its value."""
        return self._find_source(path) is not None or make_variable_name(path) in self._env

    def note(self, path: str, problem: str) -> None:
        """Note that a key's value cannot be used."""
        variable = make_variable_name(path)
        if variable in self._env:
            self._note_variable(variable, problem)
        else:
            self._note(path, self._find_source(path) or self._sources[0], problem)

    def _note(self, path: str, source: SettingsSource, problem: str) -> None:
        place = "" if source.origin == "project" else f" in {source.name}"
        self.problems.append(f"{path}{place}: {problem}")
        self.places[source.name] = None

    def _note_variable(self, variable: str, problem: str) -> None:
        self.problems.append(f"{variable}: {problem}")
        self.places[variable] = None

    def finish(self) -> list[str]:
        """Return all problems, including keys and variables that nothing read."""
        tables = [key for key in self._known if "." not in key]
        for table, source in product(("", *tables), self._sources):
            for path in _list_key_paths(source, table):
                if path not in self._known:
                    self._note(path, source, f"unknown key; {_suggest_key(path, self._known)}")
        self._note_unknown_fixed()
        paths = [setting.path for setting in self.settings]
        for variable, problem in find_misspelt_variables(self._env, paths):
            self._note_variable(variable, problem)
        return self.problems

    def _note_unknown_fixed(self) -> None:
        for source in self._sources:
            for key in source.fixed:
                if not any(is_within(path, key) for path in self._known):
                    self.problems.append(f"fixed in {source.name}: {key} is no setting")
                    self.places[source.name] = None


def _read_first(
    check: Callable[[object], object], readings: Iterator[object], found: object, allowed: str
) -> tuple[object, object, Sequence[tuple[str, str]]]:
    """Return the value of the first reading that is allowed, and that reading; else problems."""
    if _has_nul(found):
        return (
            None,
            found,
            [("", f"found {describe(found)}, with a NUL character in it; remove that")],
        )
    problems: Sequence[tuple[str, str]] = [("", f"found {describe(found)}, allowed: {allowed}")]
    for reading in readings:
        try:
            return check(reading), reading, ()
        except RefusedValue as exc:
            problems = exc.problems
        except ValueError:
            continue
    return None, found, problems


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


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (str, "the string {!r}"),
    ((int, float), "the number {}"),
    ((datetime.datetime, datetime.date, datetime.time), "the date or time {}"),
    (Mapping, "a table"),
)


def describe(value: object) -> str:
    """Return a TOML value in words: its type, and the value itself if it is short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        for kind, words in _KINDS:
            if isinstance(value, kind):
                return words.format(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return f"the list {value!r}" if len(repr(value)) < 60 else "a list"


def _has_nul(value: object) -> bool:
    """Find a NUL in any string of a value: no path and no argument can contain one."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(_has_nul(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_has_nul, value))


def _suggest_key(path: str, known: list[str]) -> str:
    """Suggest the known key path most like this one: in its own table first, then in any."""
    table, _, name = path.rpartition(".")
    paths = {key: key.rpartition(".") for key in known}
    siblings = {last: key for key, (start, _, last) in paths.items() if start == table}
    namesakes = {paths[key][2]: key for key in reversed(known)}
    for candidates, cutoff in ((siblings, 0.6), (namesakes, 0.75)):
        match = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
        if match:
            return f"did you mean {candidates[match[0]]}?"
    return f"known are {', '.join(siblings)}"
