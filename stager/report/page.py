"""The page: one file of HTML that needs no other, no network and no script.

What a job has left may hold anything. The templates (``*.html.j2``) have all of the markup; a value
becomes part of it in one way only, which shows what is invisible in it and escapes the rest.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from bundle.protocol.counts import counted, sized

from ..core.errors import TURNING
from ..diagnosis.failure import ranks_in_words, when
from .charts import curve_charts, decimal, duration, percent
from .collect import ReportData
from .nodes import Node, apart
from .timeline import timeline

if TYPE_CHECKING:
    from jinja2 import Environment

_LONGEST = 600
"""Characters of a text that are shown; what ranks write may have no end."""
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: "\u2421"}
_SHOWN |= dict.fromkeys(
    (
        *range(0x80, 0xA0),  # a terminal's, as escape is
        *range(0xD800, 0xE000),  # halves of characters, which no file can hold
    ),
    "\ufffd",
)
_SHOWN |= {code: f"\\u{code:04x}" for code in TURNING}
_COLUMNS = {
    "state": "state",
    "ending": "exit status",
    "problems": "problems",
    "python": "Python",
    "packages": "packages",
    "interface": "interface",
    "address": "address",
}
"""The columns about a node, by its fields."""


def page(data: ReportData) -> str:
    """Return the whole file."""
    style = _resource("style.css")
    template = environment().get_template("page.html.j2")
    return template.render(
        data=data,
        timeline=timeline(data.phases, data.first),
        training=[(curves, curve_charts(curves)) for curves in data.training.curves],
        columns=_columns(data.nodes),
        different=apart(data.nodes),
        style=style,
        style_digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )


def environment() -> Environment:
    """Return the environment of the templates: each value is escaped, and a wrong name fails."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    templates = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(
        clipped=clipped,
        counted=counted,
        decimal=decimal,
        duration=duration,
        percent=percent,
        ranks=ranks_in_words,
        sized=sized,
        when=when,
    )
    return templates


def shown(value: object) -> object:
    """Return a value with characters shown that are invisible or change the display."""
    # What a macro gives is markup already, and knows it.
    if isinstance(value, int | float) or hasattr(value, "__html__"):
        return value
    return str(value).translate(_SHOWN)


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Return a text, or its beginning where it is very long."""
    return text if len(text) <= longest else f"{text[:longest]}\N{HORIZONTAL ELLIPSIS}"


def _columns(nodes: Sequence[Node]) -> dict[str, str]:
    return {
        field: title
        for field, title in _COLUMNS.items()
        if any(getattr(node, field) for node in nodes)
    }


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
