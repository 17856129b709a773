"""The licences in a bundle, as lines of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bundle.protocol.counts import counted

from ..core.errors import in_one_line

if TYPE_CHECKING:
    from ..inventory.inventory import LicenceList, LicensedComponent

_COLUMNS = 80
_NAME, _VERSION = 30, 16
"""The widest that a column gets for the sake of one long entry."""
_LABELS = {"decompressor": "decompressor ", "model": "model ", "dataset": "data set "}
_COMMIT = 12
"""Digits of a commit that are shown."""


def licence_lines(result: LicenceList) -> Iterator[str]:
    """Yield a line for each component; then how many name no licence, and which."""
    rows = [(_named(one), _version(one), one.licence) for one in result.components]
    names = min(_NAME, max((len(name) for name, _, _ in rows), default=0))
    versions = min(_VERSION, max((len(version) for _, version, _ in rows), default=0))
    licensed = len(rows) - result.without_licence
    for name, version, licence in rows[:licensed]:
        yield from _row(f"{name:{names}}  {version:{versions}}", licence, names + versions + 4)
    if result.without_licence:
        yield f"{counted(result.without_licence, 'component')} without a licence:"
    for name, version, _ in rows[licensed:]:
        yield from _row(f"{name:{names}}", version, names + 2)


def _named(one: LicensedComponent) -> str:
    return in_one_line(_LABELS.get(one.kind, "") + one.name)


def _version(one: LicensedComponent) -> str:
    is_commit = one.kind in ("model", "dataset")
    return in_one_line(one.version[:_COMMIT] if is_commit else one.version)


def _row(start: str, text: str, column: int) -> Iterator[str]:
    """Yield a row whose last text begins at a column, on lines of its own where it has no room."""
    lines = textwrap.wrap(in_one_line(text), _COLUMNS - column) or [""]
    if len(start) + 2 <= column:
        yield f"{start:{column}}{lines.pop(0)}".rstrip()
    else:
        yield from textwrap.wrap(start.rstrip(), _COLUMNS)
    for line in lines:
        yield " " * column + line
