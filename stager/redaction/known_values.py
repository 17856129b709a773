"""Values that are known to be secret, wherever they appear: in pieces, and in other spellings.

A text and a value are compared by their letters and digits alone. So a value is found that has been
wrapped, coloured, spaced out, printed a letter a line, or escaped; and a part of it that is long
enough to matter is found, too.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bundle.redaction.known_values import worth_hiding

from .spans import end_of
from .values import looks_random

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SIGNS = bytes(set(range(256)) - set(_LETTERS))
_IS_LETTER = re.compile(rb"[A-Za-z0-9]")
_ENCODED = re.compile(rb"[A-Za-z0-9+/_-]*=*")
_ENCODED_BYTES = 4096
"""Bytes around a find that may belong to the same base64 text."""
_GRAM = 8
"""Letters that are looked for; any part of a value of twice as many, less one, has such ones."""
_MIN_PART = 12
"""Letters of a part that is too long to be there by chance."""
_PIECE = 512
"""Letters that are looked for together; a longer value is taken to pieces."""
_MAX_LETTERS = 1 << 14
"""Letters of a value that are looked for at all."""


def worth_looking_for(value: bytes) -> bool:
    """Return whether a value can be looked for without finding half of the text."""
    return worth_hiding(value.decode("latin-1"))


@dataclass(frozen=True, kw_only=True)
class Form:
    """A spelling of a value, by its letters."""

    letters: bytes
    """All of them."""
    grams: tuple[int, ...]
    """The starts of the parts that are looked for."""
    encoded: bool = False
    """True for a part of a base64 text, which is a secret as a whole."""
    least: int = _MIN_PART
    """Letters in a row that count as a find."""
    lead: bytes = b""
    """Signs before the letters."""
    trail: bytes = b""
    """Signs behind the letters."""


class KnownValues:
    """Values to look for."""

    def __init__(self, values: Iterable[bytes] = ()) -> None:
        self.values: dict[bytes, None] = {}
        self._exact: list[bytes] = []
        self._forms: list[Form] = []
        for value in values:
            self.add(value)

    def add(self, value: bytes) -> bool:
        """Look for one more value, and return whether it is a new one."""
        bare = value.strip()
        if not worth_looking_for(bare) or bare in self.values:
            return False
        self.values[bare] = None
        if len(_letters(bare)) >= _MIN_PART:
            self._forms += _plain_forms(bare)
        else:
            self._exact.append(bare)
        self._forms += _base64_forms(bare)
        self._forms += _hexadecimal_forms(bare)
        return True

    def find(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Find the places of the values, and of telling parts of them."""
        for value in self._exact:
            at = text.find(value)
            while at >= 0:
                yield at, at + len(value)
                at = text.find(value, at + len(value))
        letters = _letters(text)
        places: Sequence[int] | None = None
        for form in self._forms:
            for start, end in _parts(letters, form):
                if places is None:
                    places = [match.start() for match in _IS_LETTER.finditer(text)]
                yield _widened(text, places[start], places[end - 1] + 1, form)


def _letters(text: bytes) -> bytes:
    return text.translate(None, _SIGNS)


def _plain_forms(value: bytes) -> list[Form]:
    letters = _letters(value)
    is_random = looks_random(value)
    starts = range(0, max(1, min(len(letters), _MAX_LETTERS) - _MIN_PART + 1), _PIECE)
    forms = [_plain_form(letters[start : start + _PIECE], is_random) for start in starts]
    forms[0] = replace(forms[0], lead=value[: len(value) - len(value.lstrip(_SIGNS))])
    forms[-1] = replace(forms[-1], trail=value[len(value.rstrip(_SIGNS)) :])
    return forms


def _plain_form(letters: bytes, is_random: bool) -> Form:
    """Return a form of some letters; of words that may be in any text all letters must be found."""
    starts = range(0, len(letters) - _GRAM + 1, _GRAM)
    first_places = {letters[start : start + _GRAM]: start for start in reversed(starts)}
    return Form(
        letters=letters,
        grams=tuple(first_places.values()),
        least=_MIN_PART if is_random else len(letters),
    )


def _base64_forms(value: bytes) -> Iterator[Form]:
    """Yield a value in base64, at each of the three places it may have in a longer text."""
    for shift in range(3):
        packed = base64.b64encode(bytes(shift) + value)[: 2 * _PIECE]
        # The first and the last letters also depend on what is around. The signs that the two
        # alphabets write in different ways are no letters.
        certain = packed[-(-shift * 8 // 6) : (shift + len(value)) * 8 // 6]
        yield from _encoded_form(_letters(certain), encoded=True)


def _hexadecimal_forms(value: bytes) -> Iterator[Form]:
    for digits in (value.hex(), value.hex().upper()):
        yield from _encoded_form(digits.encode(), encoded=False)


def _encoded_form(letters: bytes, *, encoded: bool) -> Iterator[Form]:
    """Yield the form of an encoded value, looked for by its middle; nothing for a short one."""
    if len(letters) >= _GRAM - 2:
        middle = max(0, (len(letters) - _GRAM) // 2)
        least = min(len(letters), 2 * _MIN_PART)
        yield Form(letters=letters, grams=(middle,), encoded=encoded, least=least)


def _parts(letters: bytes, form: Form) -> Iterator[tuple[int, int]]:
    """Find enough of a form: one of its grams, and what is the same around it."""
    for begin in form.grams:
        gram = form.letters[begin : begin + _GRAM]
        before = form.letters[:begin][::-1]
        behind = form.letters[begin + len(gram) :]
        at = letters.find(gram)
        while at >= 0:
            start, end = at, at + len(gram)
            if before[:1] == letters[at - 1 : at]:
                start -= _common_length(before, letters[max(0, at - len(before)) : at][::-1])
            if behind[:1] == letters[end : end + 1]:
                end += _common_length(behind, letters[end : end + len(behind)])
            if end - start >= form.least:
                yield start, end
                at = letters.find(gram, end)
            else:
                at = letters.find(gram, at + 1)


def _common_length(first: bytes, second: bytes) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _widened(text: bytes, start: int, end: int, form: Form) -> tuple[int, int]:
    """Return a find with what belongs to it: the signs of the value, or the rest of a base64."""
    if form.encoded:
        return _whole_encoded(text, start, end)
    if form.lead and text.endswith(form.lead, 0, start):
        start -= len(form.lead)
    if form.trail and text.startswith(form.trail, end):
        end += len(form.trail)
    return start, end


def _whole_encoded(text: bytes, start: int, end: int) -> tuple[int, int]:
    before = end_of(_ENCODED, text[max(0, start - _ENCODED_BYTES) : start][::-1])
    return start - before, end_of(_ENCODED, text, end, end + _ENCODED_BYTES)


def spellings(value: bytes) -> Iterator[bytes]:
    """Yield a value as it may be written: itself, and its long lines where it has several."""
    yield value
    lines = [line.strip() for line in value.splitlines()]
    if len(lines) > 1:
        for line in lines:
            if len(line) >= 2 * _MIN_PART:
                yield line
