"""Patterns of ``environment.prune``: ``PACKAGE:PATTERN``, with the pattern as in ``.gitignore``.

Paths are those in ``site-packages``: ``torch:/torch/include/`` is a directory of torch, and
``torch:*.a`` are its static libraries wherever they lie. A package's metadata (``.dist-info``) is
never left out, and a pattern that would leave out the file that makes the package importable
(``torch/__init__.py``) is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..core.errors import ConfigError
from .ignore import Ignore

_INIT = "__init__.py"


def is_pattern(entry: str) -> bool:
    """Return whether an entry of the setting is a pattern, and not a word."""
    return ":" in entry


def of_package(entries: Iterable[str], package: str) -> tuple[str, ...]:
    """Return the entries that concern a package: its patterns, and all words."""
    own = f"{package}:"
    return tuple(entry for entry in entries if not is_pattern(entry) or entry.startswith(own))


def matching(entry: str, paths: Iterable[str]) -> set[str]:
    """Return the files that a pattern leaves out: those it matches, and those below directories."""
    folders = _Folders(Ignore([entry.partition(":")[2]]))
    return {path for path in paths if folders.leave_out(path)}


class _Folders:
    def __init__(self, ignore: Ignore) -> None:
        self._ignore = ignore
        self._known = {"": False}

    def leave_out(self, path: str) -> bool:
        if self._is_out(path.rpartition("/")[0]):
            return True
        return self._ignore.decide(path, is_dir=False) is True

    def _is_out(self, folder: str) -> bool:
        known = self._known.get(folder)
        if known is None:
            known = self._is_out(folder.rpartition("/")[0])
            known = known or self._ignore.decide(folder, is_dir=True) is True
            self._known[folder] = known
        return known


def check(entries: Sequence[str], packages: Mapping[str, Sequence[str]]) -> list[str]:
    """Return notes on patterns without an effect.

    Raises:
        ConfigError: patterns that would leave out what a package cannot be used without; all of
            them.
    """
    notes, faults = [], []
    for entry in filter(is_pattern, entries):
        name = entry.partition(":")[0]
        if name not in packages:
            notes.append(f"{_quoted(entry)} leaves nothing out: {_unknown(name, packages)}")
            continue
        left_out = matching(entry, packages[name])
        if not left_out:
            notes.append(f"{_quoted(entry)} leaves nothing out: no file of {name} matches")
        elif fault := _fault(name, left_out):
            faults.append(f"{_quoted(entry)} {fault}")
    if faults:
        raise ConfigError(
            faults[0] if len(faults) == 1 else "environment.prune has patterns that are refused",
            hint="name directories in the package, as in torch:/torch/test/, or remove the package "
            "from the requirements",
            context=faults[1:] and faults,
        )
    return notes


def _fault(name: str, left_out: Collection[str]) -> str:
    tops = sorted(filter(is_top, left_out))
    if tops:
        return f"leaves out {tops[0]}: {name} could not be imported"
    if all(map(is_metadata, left_out)):
        return f"names metadata of {name}, which is always kept"
    return ""


def is_metadata(path: str) -> bool:
    """Return whether a file belongs to a package's metadata, which is never left out."""
    return path.partition("/")[0].endswith(".dist-info")


def is_top(path: str) -> bool:
    """Return whether a file makes a package importable: the ``__init__.py`` at its top."""
    folder, _, name = path.partition("/")
    return name == _INIT and bool(folder)


def _quoted(entry: str) -> str:
    return f'environment.prune: "{entry}"'


def _unknown(name: str, packages: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(packages), n=1)
    there = f"; did you mean {near[0]}?" if near else ""
    return f"the lock has no package {name}{there}"
