"""The command line: each command parses, makes one call, and renders."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import unwrap
from itertools import takewhile
from typing import cast

from typer.models import CommandInfo

from . import application
from .application import HelpfulCommand, app, drop_options, expand_groups

COMMANDS = (
    *("init", "config", "lock", "build", "sign", "inspect", "export", "import", "mirror"),
    *("verify", "run", "script", "exec", "estimate", "plan", "nodes"),
    *("logs", "stacks", "replay", "diagnose", "report", "support", "clean", "clean-node"),
)
"""All commands, in the order of the help page."""

_HELP = frozenset({"-h", "--help"})
_FILES = {
    "bundle_commands": ("init", "config", "lock", "build", "sign", "inspect"),
    "carrying_commands": ("export", "import", "mirror"),
    "job_commands": ("verify", "run", "script", "exec"),
    "log_commands": ("logs", "stacks", "replay", "diagnose", "report", "support"),
    "node_commands": ("estimate", "plan", "nodes", "clean", "clean-node"),
}
"""The commands in each file."""
_MODULES = {command: file for file, commands in _FILES.items() for command in commands}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code, however it ends."""
    if argv is None:
        _restart_in_utf8()
    words = list(sys.argv[1:] if argv is None else argv)
    load_commands(words)
    return application.main(words)


def _restart_in_utf8() -> None:
    """Start this program again in UTF-8 mode where the locale has another encoding (PEP 540).

    Names of files are bytes. A bundle has them as UTF-8, the same ones in every locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606


def load_commands(words: Sequence[str] | None = None) -> None:
    """Import the commands that a command line names, or all: importing all takes 0.03 s.

    Each registers itself. The first word that is no option may be the value of one, so every word
    counts that is a command's name. The page of all commands, and the one that is meant by a word
    that is none, need all, but not their options.
    """
    named = [word for word in words or () if word in COMMANDS]
    _import_commands(COMMANDS if _needs_all(words or ()) else named)
    # Completion has its words in a variable.
    is_listed_only = words is not None and not named and "_STAGER_COMPLETE" not in os.environ
    adapt = drop_options if is_listed_only else expand_groups
    for registered in app.registered_commands:
        registered.cls = HelpfulCommand
        registered.callback = adapt(unwrap(cast("Callable[..., None]", registered.callback)))
    app.registered_commands.sort(key=_place)


def _needs_all(words: Sequence[str]) -> bool:
    options = list(takewhile(lambda word: word.startswith("-"), words))
    first = words[len(options) : len(options) + 1]
    return set(COMMANDS).isdisjoint(first) or not _HELP.isdisjoint(options)


def _import_commands(commands: Sequence[str]) -> None:
    for command in commands:
        import_module(f".{_MODULES[command]}", __name__)


def _place(registered: CommandInfo) -> int:
    name = registered.name or getattr(registered.callback, "__name__", "")
    return COMMANDS.index(name)


__all__ = ["COMMANDS", "app", "load_commands", "main"]
