"""Reading a program's options the way it reads them itself, from a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Option:
    """What one option of a launcher means to a job."""

    takes: bool = False
    """Whether a value follows it."""
    dropped: str = ""
    """Why it has no place in the job; empty where it means something."""
    refused: str = ""
    """Why the whole command cannot be converted; empty where it can."""
    short: str = ""
    """Its one-letter form, without the dash."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One option on the command line."""

    name: str
    """Its name in the table."""
    value: str
    """Its value; empty for an option that takes none."""


def scan(
    program: str, table: Mapping[str, Option], words: Sequence[str]
) -> tuple[list[Found], list[str]]:
    """Split a launcher's arguments into its options and what it launches.

    As with ``argparse``, dashes and underscores in names are the same, a beginning stands for the
    name where it fits only one, a value follows after ``=`` or as the next word, and the first word
    that is no option ends the options.

    Args:
        program: the launcher, for messages.
        table: its options, by long name without the dashes.
        words: its arguments.

    Raises:
        ConfigError: an option that is not in the table or is refused, or a value is missing.
    """
    found: list[Found] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, joined = _recognise(program, table, word)
        option = table[name]
        shown = word.partition("=")[0]
        if option.refused:
            raise ConfigError(f"{program} {shown}: {option.refused}")
        if not option.takes and joined is not None:
            raise ConfigError(f"{program} {shown}: this option takes no value")
        if option.takes and joined is None:
            if not rest:
                raise ConfigError(f"{program} {shown}: its value is missing")
            joined = rest.pop(0)
        found.append(Found(name=name, value=joined or ""))
    return found, rest


def notes_on(program: str, table: Mapping[str, Option], found: Sequence[Found]) -> list[str]:
    """One line for each option that was left out, in the order of the command."""
    names = dict.fromkeys(one.name for one in found if table[one.name].dropped)
    return [f"{program} --{name} is left out: {table[name].dropped}" for name in names]


def _recognise(program: str, table: Mapping[str, Option], word: str) -> tuple[str, str | None]:
    """The name in the table, and the value that is part of the same word."""
    if not word.startswith("--"):
        letter, joined = word[1], word[2:]
        for name, option in table.items():
            if option.short == letter:
                return name, (joined.removeprefix("=") if joined else None)
        raise _unknown(program, word)
    text, equals, value = word[2:].partition("=")
    wanted = text.replace("_", "-")
    fits = [name for name in table if name == wanted] or [
        name for name in table if wanted and name.startswith(wanted)
    ]
    if len(fits) != 1:
        raise _unknown(program, f"--{text}")
    return fits[0], (value if equals else None)


def _unknown(program: str, word: str) -> ConfigError:
    return ConfigError(
        f"{program} {word}: not an option that can be carried over to a job on several nodes",
        hint="leave it out, or name only the script: stager run -- train.py ...",
    )
