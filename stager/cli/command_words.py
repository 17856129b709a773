"""The words behind a script: they go to the program, also where they look like ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from ..console.output import Output

_TALK = frozenset({"--quiet", "--verbose", "--json", "--help"})
"""Options that many programs have, too, and that change nothing of a job."""


def warn_of_options_behind(context: typer.Context, command: Sequence[str], console: Output) -> None:
    """Warn of options of ``stager`` behind a script, where no ``--`` says that they are its own."""
    words = misplaced(command, [word for param in context.command.params for word in param.opts])
    marked = sys.argv[-len(command) - 1 :][:1] == ["--"]
    if words and not marked:
        console.warn(
            f"{command[0]} gets {', '.join(words)}, and stager does not: words behind the script "
            f"are the program's. Options of stager stand before it; `-- {command[0]} ...` passes "
            "the same words on without this warning"
        )


def misplaced(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the words behind a script that are options of ``stager``, in their order."""
    if not command or not command[0].endswith(".py"):
        return []
    named = [word.partition("=")[0] for word in command[1:] if word.startswith("--")]
    return [word for word in dict.fromkeys(named) if word in options and word not in _TALK]
