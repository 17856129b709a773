"""Options that several commands share, written once: a dataclass field is an option.

typer reads a command's options from its signature. A command marked :func:`grouped` may take a
dataclass; typer is shown a signature in which that parameter is replaced by the class's fields.
A class's ``panel`` is their heading on the help page.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take options as dataclasses, whose fields are annotated as typer needs it."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind) or not isinstance(kind, type):
            shown.append(_keyword(name, parameter.default, kind))
            continue
        groups[name] = kind
        inner = get_type_hints(kind, include_extras=True)
        panel = getattr(kind, "panel", None)
        shown += [
            _keyword(one.name, one.default, _under(panel, inner[one.name])) for one in fields(kind)
        ]

    @wraps(command)
    def called(**given: object) -> None:
        made = {
            name: kind(**{one.name: given.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        command(**made, **given)

    called.__dict__["__signature__"] = inspect.Signature(shown)
    called.__annotations__ = {one.name: one.annotation for one in shown}
    return called


def _under(panel: str | None, annotation: type[Any]) -> object:
    if panel is None:
        return annotation
    kind, option = get_args(annotation)[:2]
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]


def _keyword(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
