"""Help pages: options under a heading for each group, and summaries that are never cut.

Rich is not used for it: importing it takes longer than all else that ``--help`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, cast

import typer.core

if TYPE_CHECKING:
    import typer

_ARGUMENTS, _OPTIONS, _COMMANDS = "Arguments", "Options", "Commands"


class _Writer(Protocol):
    """The formatter of a help page, as far as it is used here."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """Open a section."""

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write a list of terms and their explanations."""


class HelpfulCommand(typer.core.TyperCommand):
    """A command whose options stand under the heading of their group."""

    def format_options(self, ctx: object, formatter: _Writer) -> None:
        """Write arguments first, then the options by group, those without one last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(cast("typer.Context", ctx)):
            row = param.get_help_record(cast("typer.Context", ctx))
            if row is None:
                continue
            panel = getattr(param, "rich_help_panel", None)
            default = _ARGUMENTS if param.param_type_name == "argument" else _OPTIONS
            groups.setdefault(panel or default, []).append(row)
        last = groups.pop(_OPTIONS, [])
        for name, rows in (*groups.items(), (_OPTIONS, last)):
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


class HelpfulGroup(typer.core.TyperGroup):
    """The list of commands, with the whole summary of each."""

    def format_commands(self, ctx: object, formatter: _Writer) -> None:
        """Write a row for each command."""
        rows = []
        for name in self.list_commands(cast("typer.Context", ctx)):
            command = self.get_command(cast("typer.Context", ctx), name)
            if command is not None and not command.hidden:
                rows.append((name, (command.help or "").split("\n\n")[0].strip()))
        with formatter.section(_COMMANDS):
            formatter.write_dl(rows)
