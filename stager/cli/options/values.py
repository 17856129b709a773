"""Checks of options' values: a value that cannot be used is a usage error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import typer
import typer.models

from bundle.protocol.enumerations import TextEnum

T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=TextEnum)


def path_option(text: str) -> Path:
    """Return an option's value as a path; an empty one is a usage error, not this folder."""
    if not text:
        raise typer.BadParameter("it is empty: is a shell variable unset?")
    expanded = os.path.expanduser(text)  # noqa: PTH111 - Path's own raises
    if text.startswith("~") and expanded == text and not os.path.lexists(text):
        raise typer.BadParameter(f"{text}: there is no home directory that it could start at")
    return Path(text)


def choice(words: Iterable[str], help_text: str, *names: str) -> typer.models.OptionInfo:
    """Return an option whose help page and shell completion list the words that it takes."""
    allowed = tuple(map(str, words))

    def completed(incomplete: str) -> list[str]:
        return [word for word in allowed if word.startswith(incomplete)]

    shown: typer.models.OptionInfo = typer.Option(
        *names, metavar="|".join(allowed), help=help_text, autocompletion=completed
    )
    return shown


def one_of(allowed: tuple[str, ...], text: str | None, option: str) -> str | None:
    """Return an option's value; one that is not allowed is a usage error."""
    if text is None or text in allowed:
        return text
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(allowed)}", param_hint=option)


def member_of(kind: type[EnumT], text: str | None, option: str) -> EnumT | None:
    """Return an option's value as a word of an enumeration; another one is a usage error."""
    chosen = one_of(tuple(str(word) for word in kind), text, option)
    return None if chosen is None else kind(chosen)


def checked(
    check: Callable[[object], T], value: str | int | None, option: str, allowed: str
) -> T | None:
    """Return an option's value, read as the same key of the settings is."""
    if value is None:
        return None
    try:
        return check(value)
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} cannot be used, allowed: {allowed}", param_hint=option
        ) from None


def each(
    check: Callable[[object], str], texts: list[str] | None, option: str, allowed: str
) -> tuple[str, ...]:
    """Return the values of an option that may be given several times, each checked."""
    values = (checked(check, text, option, allowed) for text in texts or ())
    return tuple(value for value in values if value is not None)
