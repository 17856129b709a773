"""Templates that cannot be broken out of, whatever a value holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import PurePath

import pytest

from stager.report.page import make_environment, show_value
from tests.support.stories import HOSTILE, Parsed

BAD = """<b>&amp;"'</b>"""


def rendered(source: str, **values: object) -> str:
    """What the report's environment makes of a template."""
    return make_environment().from_string(source).render(**values)


@pytest.mark.parametrize("value", [HOSTILE, BAD, '" onload="alert(1)', "' x='", "--></title>"])
def test_a_value_does_not_leave_its_attribute(value: str) -> None:
    page = Parsed(rendered('<p class="{{ value }}" id="a">{{ value }}</p>', value=value))
    (only,) = page.elements
    assert only.given == {"class": show_value(value), "id": "a"}
    assert only.text == show_value(value)


@pytest.mark.parametrize("name", ["macros.html.j2", "page.html.j2"])
def test_each_value_in_an_attribute_is_quoted(name: str) -> None:
    """Without its quotes, a value with a space in it would make attributes of its own."""
    source, _, _ = make_environment().loader.get_source(make_environment(), name)  # type: ignore[union-attr]
    assert "={{" not in source.replace(" ", "")
    assert source.count("| safe") == (name == "page.html.j2")  # the style sheet, which is ours
    assert "autoescape" not in source


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x00\x1b]0;\x9b", r"\x00\x1b]0;\x9b"),
        ("\u202egpj.exe\u2066 \ud83c half", r"\u202egpj.exe\u2066 \ud83c half"),
        ("\U0001f3d6 \u05d0 \xe4", "\U0001f3d6 \u05d0 \xe4"),
    ],
)
def test_what_is_invisible_is_shown(text: str, seen: str) -> None:
    assert rendered("{{ text }}", text=text) == seen
    assert rendered("{{ path }}", path=PurePath(text)) == seen  # a file may have any name


def test_only_a_page_takes_jinja2() -> None:
    """It takes as long to import as a whole command."""
    code = (
        "import importlib, pkgutil, sys, stager\n"
        "for module in pkgutil.walk_packages(stager.__path__, 'stager.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "print('stager.report.page' in sys.modules, 'jinja2' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
