"""Markup that cannot be broken out of."""

from __future__ import annotations

import pytest

from stager.report.markup import Html, clipped, element, escaped, joined

BAD = """<b>&amp;"'</b>"""


def test_text_is_escaped_and_markup_is_not() -> None:
    made = element("p", BAD, element("b", "x"), [None, ["y", Html("<i></i>")]])
    assert made == ("<p>&lt;b&gt;&amp;amp;&quot;&#x27;&lt;/b&gt;<b>x</b>y<i></i></p>")
    assert isinstance(made, Html)
    assert joined(None) == ""


def test_attributes_are_escaped_and_named() -> None:
    made = element("rect", class_="a", aria_label=BAD, width=3, x=None, viewBox="0 0 1 1", name="n")
    assert made == (
        '<rect class="a" aria-label="&lt;b&gt;&amp;amp;&quot;&#x27;&lt;/b&gt;" width="3"'
        ' viewBox="0 0 1 1" name="n"></rect>'
    )
    assert element("br") == "<br>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x00\x1b[31m\r\x7f", "\u2400\u241b[31m\u240d\u2421"),
        ("\x85\x9b", "\ufffd\ufffd"),
        ("\u202egpj.exe\u2066", "\\u202egpj.exe\\u2066"),
        ("\ud83c half", "\ufffd half"),
        ("\U0001f3d6 \u05d0 \xe4", "\U0001f3d6 \u05d0 \xe4"),
    ],
)
def test_what_is_invisible_is_shown(text: str, shown: str) -> None:
    assert escaped(text) == shown
    escaped(text).encode()


def test_what_joins_text_to_markup_is_text() -> None:
    """Pieces that are put together by hand are escaped once more, and never too little."""
    assert element("p", element("b", "x") + " <i>") == "<p>&lt;b&gt;x&lt;/b&gt; &lt;i&gt;</p>"
    assert element("p", f"{element('b', 'x')}") == "<p>&lt;b&gt;x&lt;/b&gt;</p>"


def test_long_texts_are_cut() -> None:
    assert clipped("abc", 3) == "abc"
    assert clipped("abcd", 3) == "abc\u2026"
