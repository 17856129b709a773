"""Values that are known to be secret, wherever they appear: in pieces, and in other spellings.

A text and a value are compared by their letters and digits alone. So a value is found that has been
wrapped, coloured, spaced out, printed a letter a line, or escaped; and a part of it that is long
enough to matter is found, too.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .false_positives import looks_random

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_OTHERS = bytes(set(range(256)) - set(_LETTERS))
_IS_LETTER = re.compile(rb"[A-Za-z0-9]")
_RUN_OF = re.compile(rb"[A-Za-z0-9+/_-]*=*")
_RUN = 4096
_GRAM = 8
"""Letters that are looked for; any part of a value of twice as many, less one, has such ones."""
_LEAST = 12
"""Letters of a part that is too long to be there by chance."""
_LONGEST = 512
"""Letters that are looked for together; a longer value is taken to pieces."""
_MOST = 1 << 14
"""Letters of a value that are looked for at all."""
SHORTEST = 5
"""Bytes of a value that is looked for at all."""
_ORDINARY = frozenset(
    b"true false none null basic bearer token password secret default changeme admin root user "
    b"test local munge kerberos digest empty enabled disabled required".split()
)


def worth_looking_for(value: bytes) -> bool:
    """Whether a value can be looked for in a text without finding half of the text."""
    bare = value.strip()
    return (
        len(bare) >= SHORTEST
        and bare.lower() not in _ORDINARY
        and not (bare.isdigit() and len(bare) < 6)
        and len(set(bare)) >= 3
    )


@dataclass(frozen=True, kw_only=True)
class Form:
    """A spelling of a value, by its letters."""

    letters: bytes
    """All of them."""
    grams: tuple[int, ...]
    """Where those parts begin that are looked for."""
    run: bool = False
    """Whether it is a part of something that is a secret as a whole, as in base64."""
    least: int = _LEAST
    """Letters in a row that count as found."""
    lead: bytes = b""
    """Signs that are before the letters."""
    trail: bytes = b""
    """Signs that are behind them."""


class Known:
    """Values to look for."""

    def __init__(self, values: Iterable[bytes] = ()) -> None:
        """Prepare them; values that are too short or too ordinary are left out."""
        self.values: dict[bytes, None] = {}
        self._exact: list[bytes] = []
        self._forms: list[Form] = []
        for value in values:
            self.add(value)

    def add(self, value: bytes) -> bool:
        """Look for one more; says whether it is a new one."""
        bare = value.strip()
        if not worth_looking_for(bare) or bare in self.values:
            return False
        self.values[bare] = None
        letters = _bare(bare)
        if len(letters) >= _LEAST:
            sure = looks_random(bare)
            made = [_form(letters[at : at + _LONGEST], sure) for at in _pieces(letters)]
            made[0] = replace(made[0], lead=bare[: len(bare) - len(bare.lstrip(_OTHERS))])
            made[-1] = replace(made[-1], trail=bare[len(bare.rstrip(_OTHERS)) :])
            self._forms += made
        else:
            self._exact.append(bare)
        self._forms += _encoded(bare)
        return True

    def find(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Where one of them is, or a telling part of one."""
        for value in self._exact:
            at = text.find(value)
            while at >= 0:
                yield at, at + len(value)
                at = text.find(value, at + len(value))
        letters = text.translate(None, _OTHERS)
        places: Sequence[int] | None = None
        for form in self._forms:
            for start, end in _parts(letters, form):
                if places is None:
                    places = [found.start() for found in _IS_LETTER.finditer(text)]
                first, last = places[start], places[end - 1] + 1
                yield _whole_run(text, first, last) if form.run else _edges(text, first, last, form)


def _edges(text: bytes, first: int, last: int, form: Form) -> tuple[int, int]:
    """A find with the signs before and behind the letters, where they are those of the value."""
    if form.lead and text.endswith(form.lead, 0, first):
        first -= len(form.lead)
    if form.trail and text.startswith(form.trail, last):
        last += len(form.trail)
    return first, last


def _pieces(letters: bytes) -> range:
    """Where pieces of a value begin that are looked for by themselves."""
    return range(0, max(1, min(len(letters), _MOST) - _LEAST + 1), _LONGEST)


def _form(letters: bytes, sure: bool) -> Form:
    places = range(0, len(letters) - _GRAM + 1, _GRAM)
    grams = tuple({letters[at : at + _GRAM]: at for at in reversed(places)}.values())
    return Form(letters=letters, grams=grams, least=_LEAST if sure else len(letters))


def _parts(letters: bytes, form: Form) -> Iterator[tuple[int, int]]:
    """Where enough of a form is, found by one of its grams and what is the same around it."""
    for begin in form.grams:
        gram = form.letters[begin : begin + _GRAM]
        before = form.letters[:begin][::-1]
        behind = form.letters[begin + len(gram) :]
        at = letters.find(gram)
        while at >= 0:
            start, end = at, at + len(gram)
            if before[:1] == letters[at - 1 : at]:
                start -= _alike(before, letters[max(0, at - len(before)) : at][::-1])
            if behind[:1] == letters[end : end + 1]:
                end += _alike(behind, letters[end : end + len(behind)])
            if end - start >= form.least:
                yield start, end
                at = letters.find(gram, end)
            else:
                at = letters.find(gram, at + 1)


def _alike(one: bytes, other: bytes) -> int:
    """How many letters at the beginning are the same."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[:middle] == other[:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _encoded(value: bytes) -> Iterator[Form]:
    """Base64, at whatever place in a longer text the value is, and hexadecimal digits."""
    for shift in range(3):
        packed = base64.b64encode(bytes(shift) + value)[: 2 * _LONGEST]
        # The first and the last letters also depend on what is around. What the two alphabets
        # write in different ways is no letter.
        sure = packed[-(-shift * 8 // 6) : (shift + len(value)) * 8 // 6]
        yield from _one(_bare(sure), run=True)
    for text in (value.hex(), value.hex().upper()):
        yield from _one(text.encode(), run=False)


def _one(letters: bytes, *, run: bool) -> Iterator[Form]:
    if len(letters) >= _GRAM - 2:
        middle = max(0, (len(letters) - _GRAM) // 2)
        least = min(len(letters), 2 * _LEAST)
        yield Form(letters=letters, grams=(middle,), run=run, least=least)


def _bare(text: bytes) -> bytes:
    return text.translate(None, _OTHERS)


def _whole_run(text: bytes, start: int, end: int) -> tuple[int, int]:
    before = _RUN_OF.match(text[max(0, start - _RUN) : start][::-1])
    after = _RUN_OF.match(text, end, end + _RUN)
    return start - (before.end() if before else 0), after.end() if after else end


def spellings(value: bytes) -> Iterator[bytes]:
    """A value as it may be written: itself, and its parts where it has several lines."""
    yield value
    lines = [line.strip() for line in value.splitlines()]
    if len(lines) > 1:
        yield from itertools.filterfalse(lambda line: len(line) < 2 * _LEAST, lines)
