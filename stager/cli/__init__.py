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

_HELP = frozenset({"-h", "--help"})
_FILES = (
    ("bundle_commands", ("init", "config", "lock", "build", "sign", "inspect")),
    ("carrying_commands", ("export", "import", "mirror")),
    ("job_commands", ("verify", "run", "script", "exec")),
    ("node_commands", ("estimate", "plan", "nodes")),
    ("log_commands", ("logs", "stacks", "replay", "diagnose", "report", "support")),
    ("node_commands", ("clean", "clean-node")),
)
"""The commands in each file, in the order of the help page."""
_MODULES = {command: file for file, commands in _FILES for command in commands}
COMMANDS = tuple(_MODULES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code, however it ends."""
    if argv is None:
        _restart_in_utf8()
    words = list(sys.argv[1:] if argv is None else argv)
    load_commands(words)
    return application.main(words)


def _restart_in_utf8() -> None:
    """Start again in UTF-8 mode in other locales (PEP 540): a bundle has names as UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606


def load_commands(words: Sequence[str] | None = None) -> None:
    """Import the commands that a command line names, or all: importing all takes 0.03 s.

    Any word may be the command's name, as the first may be the value of an option. The page of all
    commands, and the suggestion for a word that is none, need all, but not their options.
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
