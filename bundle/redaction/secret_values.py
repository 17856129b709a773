"""The values of secret names in a text: after an equals sign, a colon or an option."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence

from .secret_names import is_secret

_QUOTE = re.compile(r"\\.|\"(?:\\.|[^\"\\])*\"?|'[^']*'?", re.S)
"""A quoted part of a shell command, or an escaped character outside quotes."""
_QUOTED = r"(?P<open>\\*[\"'])(?:(?!(?<!\\)(?P=open)).)*(?:(?P=open)|$)"
_VALUE = re.compile(_QUOTED, re.S)
_NOT_A_NAME = r"(?![A-Za-z_][\w.-]*=)"
"""The rest of a value after a comma: no ``NAME=`` begins there."""
_SHELL_WORD = re.compile(rf"(?:{_QUOTED}|\\.|,{_NOT_A_NAME}|[^\s,;&|\"'\\])*", re.S)
"""One word of a shell command, with everything quoted in it."""
_ARGUMENT_VALUE = re.compile(rf"(?:[,;&]{_NOT_A_NAME}|[^,;&])*", re.S)
_TEXT_LINE = re.compile(r"[^\n]*")
_JSON_ITEM = re.compile(r"[^,}\]\n]*")
_NAME_AND_SIGN = re.compile(
    r"(?<!\w)(?<!\w[.-])(?P<name>\w[\w.-]*)(?P<sign>[:+?]?="
    r"|\s{1,9}(?:=>|[:+?]?=(?!=))\s{0,9}"
    r"|(?P<own_quote>\\*[\"'])\s*:\s*"
    r"|\s*:(?:\s+|(?=\\*[\"']))"
    r"|:(?!//)(?=\S)"
    r"|\s+(?!--[a-z])(?=\S))"
)
_BRACKET = re.compile(rf"{_QUOTED}|[\[\]{{}}()]", re.S)
"""A bracket of a list or a table, or a quoted text, whose brackets do not count."""
_LIST_REACH = 512
"""Characters searched for the end of a list, where a bracket may also begin a word."""
_HEADER = re.compile(r"authorization|cookie|\w+(?:-\w+)+", re.I)
"""Header names, recognised even without a blank after the colon."""
_DASHES = re.compile(r"(?:^|[\s\"'])--?$")
_BLANK = re.compile(r"\s")
_OPENING = ("[", "{", "(")


def secret_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the value of each name of a secret begins and ends."""
    quotes = list(_quotes(text))
    blank = _BLANK.search(text)
    first_blank = blank.start() if blank else len(text)
    hidden = 0
    for match in _NAME_AND_SIGN.finditer(text):
        if match.start() < hidden or not is_secret(match["name"]):
            continue
        # Without a blank before the name it is an argument of its own, whose value may have blanks.
        word = _ARGUMENT_VALUE if first_blank > match.start() else _SHELL_WORD
        start, end = _value_range(match, _closing_quote(match, quotes), word)
        if end > start:
            yield start, end
            hidden = end


def _closing_quote(match: re.Match[str], quotes: Sequence[tuple[int, int]]) -> int:
    """Find the quote closing name and value, -1 for none; not one around the name (JSON)."""
    last_opened = bisect.bisect(quotes, (match.start(), 0)) - 1
    closing_quote = quotes[last_opened][1] if last_opened >= 0 else -1
    return closing_quote if closing_quote > match.end("name") else -1


def _quotes(text: str) -> Iterator[tuple[int, int]]:
    """Yield pairs of shell quotes; the end of the text closes one, too."""
    for match in _QUOTE.finditer(text):
        quote = match[0][0]
        if quote == "\\":
            continue
        closed = len(match[0]) > 1 and match[0][-1] == quote
        yield match.start(), match.end() - closed


def _value_range(
    match: re.Match[str], closing_quote: int, word: re.Pattern[str]
) -> tuple[int, int]:
    """Return the value's range, empty for none; ``closing_quote`` -1: no quotes around both."""
    if match["sign"].isspace():
        return _range_after_blank(match, closing_quote)
    if ":" in match["sign"] and "=" not in match["sign"]:
        return _range_after_colon(match, closing_quote)
    return _range_after_equals(match, closing_quote, word)


def _range_after_blank(match: re.Match[str], closing_quote: int) -> tuple[int, int]:
    """Return the range of ``--token VALUE``; none where the name is a word of prose."""
    text, start = match.string, match.end()
    if not _DASHES.search(_before(match)):
        return start, start
    end = _end_of(_SHELL_WORD, text, start)
    if closing_quote >= 0 and not _VALUE.match(text, start):
        end = min(end, closing_quote)
    return start, end


def _range_after_colon(match: re.Match[str], closing_quote: int) -> tuple[int, int]:
    text, start = match.string, match.end()
    quoted = _VALUE.match(text, start)
    if quoted:
        return _between_quotes(quoted)
    if match["sign"] == ":" and not _is_header(match):
        return start, start
    if match["own_quote"] and text.startswith(_OPENING, start):
        return start, _end_of_list(text, start, len(text)) or len(text)
    if closing_quote >= 0:
        return start, _end_of_quotes(text, closing_quote)
    return start, _end_of(_JSON_ITEM if match["own_quote"] else _TEXT_LINE, text, start)


def _range_after_equals(
    match: re.Match[str], closing_quote: int, word: re.Pattern[str]
) -> tuple[int, int]:
    text, start = match.string, match.end()
    if _VALUE.match(text, start):
        return start, _end_of(_SHELL_WORD, text, start)
    if text.startswith(_OPENING, start):
        end = _end_of_list(text, start, start + _LIST_REACH)
        if end:
            return start, end
    if closing_quote >= 0:
        return start, _end_of_quotes(text, closing_quote)
    return start, _end_of(word, text, start)


def _before(match: re.Match[str]) -> str:
    return match.string[max(0, match.start() - 3) : match.start()]


def _between_quotes(quoted: re.Match[str]) -> tuple[int, int]:
    quote = quoted["open"]
    closed = quoted[0].endswith(quote) and len(quoted[0]) > len(quote)
    return quoted.start() + len(quote), quoted.end() - closed * len(quote)


def _end_of_list(text: str, start: int, limit: int) -> int:
    """Return the end of the list or table at ``start``; 0 if it ends before ``limit``."""
    depth = 0
    for match in _BRACKET.finditer(text, start, limit):
        if match["open"]:
            continue
        depth += 1 if match[0] in _OPENING else -1
        if depth == 0:
            return match.end()
    return 0


def _end_of_quotes(text: str, closing_quote: int) -> int:
    """Return where a quoted value ends: at its quote, or after what is attached to that."""
    if text[closing_quote + 1 : closing_quote + 2] in ("", ",", ":", "]", "}", ")"):
        return closing_quote
    end = _end_of(_SHELL_WORD, text, closing_quote + 1)
    return end - 1 if text[end - 1] == text[closing_quote] else end


def _is_header(match: re.Match[str]) -> bool:
    """Return True if a name and a colon without a blank are a header's, not an image's tag."""
    if not _HEADER.fullmatch(match["name"]):
        return False
    return _before(match)[-1:] in ("", " ", "\t", "=", "'", '"')


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start


def end_of_shell_word(text: str, start: int) -> int:
    """Return where a word of a shell command ends."""
    return _end_of(_SHELL_WORD, text, start)
