"""A launcher's options, read from a table as the launcher reads them itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a launcher, and its meaning for a job."""

    takes: bool = False
    """True for an option with a value."""
    dropped: str = ""
    """The reason why it is left out of the job; empty where it is used."""
    refused: str = ""
    """The reason why the whole command cannot be converted; empty where it can."""
    short: str = ""
    """Its one-letter form, without the dash."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """An option on the command line."""

    name: str
    """Its name in the table."""
    value: str
    """Its value; empty for an option that takes none."""


def scan(
    program: str, table: Mapping[str, Option], words: Sequence[str]
) -> tuple[list[Given], list[str]]:
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
    given: list[Given] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, value = _recognise(program, table, word)
        option = table[name]
        _check(f"{program} {word.partition('=')[0]}", option, value, rest)
        if option.takes and value is None:
            value = rest.pop(0)
        given.append(Given(name=name, value=value or ""))
    return given, rest


def notes_on(program: str, table: Mapping[str, Option], given: Sequence[Given]) -> list[str]:
    """Return a line for each option that was left out, in the order of the command."""
    names = dict.fromkeys(option.name for option in given if table[option.name].dropped)
    return [f"{program} --{name} is left out: {table[name].dropped}" for name in names]


def _check(shown: str, option: Option, value: str | None, rest: Sequence[str]) -> None:
    """Refuse an option that cannot be converted, or whose value is missing or too much."""
    if option.refused:
        raise ConfigError(f"{shown}: {option.refused}")
    if not option.takes and value is not None:
        raise ConfigError(f"{shown}: this option takes no value")
    if option.takes and value is None and not rest:
        raise ConfigError(f"{shown}: its value is missing")


def _recognise(program: str, table: Mapping[str, Option], word: str) -> tuple[str, str | None]:
    """Return an option's name in the table, and the value that is part of the same word."""
    if not word.startswith("--"):
        return _recognise_short(program, table, word)
    text, equals, value = word[2:].partition("=")
    names = _names(table, text.replace("_", "-"))
    if len(names) != 1:
        raise _unknown(program, f"--{text}")
    return names[0], (value if equals else None)


def _recognise_short(
    program: str, table: Mapping[str, Option], word: str
) -> tuple[str, str | None]:
    """Return the same for an option of one letter."""
    letter, joined = word[1], word[2:]
    for name, option in table.items():
        if option.short == letter:
            return name, (joined.removeprefix("=") if joined else None)
    raise _unknown(program, word)


def _names(table: Mapping[str, Option], text: str) -> list[str]:
    """Return the option of this name, else all whose names begin with it."""
    if text in table:
        return [text]
    return [name for name in table if text and name.startswith(text)]


def _unknown(program: str, word: str) -> ConfigError:
    return ConfigError(
        f"{program} {word}: not an option that can be carried over to a job on several nodes",
        hint="leave it out, or name only the script: stager run -- train.py ...",
    )
