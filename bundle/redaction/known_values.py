"""Values that are known to be secret, wherever they appear: in pieces, and in other spellings."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..regex import compile_lazily
from .secret_names import is_secret
from .secrets import Span, change_bytes, find_all, find_match_end, hide_spans, looks_random

_MIN_LENGTH = 5
_MIN_DIFFERENT = 3
_MIN_DIGITS = 6  # a number of fewer digits is too common
_MIN_LINE = 24  # characters of one line of a long value that tell by themselves
_ORDINARY = frozenset(
    b"true false none null empty enabled disabled required basic bearer digest kerberos munge "
    b"token password secret admin root user test local changeme default".split()
)
_STRUCTURE = (
    *("event", "phase", "node", "nodes", "stopped", "log_dir", "code", "how", "ended_by"),
    *("backend", "interface"),
)
"""Keys of events whose values are read by programs; none is a text that a rank wrote."""
_PATH = compile_lazily(r"[~.]{0,2}/[\w.+@-]+(?:/[\w.+@-]*)*(?::/[\w.+@/-]*)*")


def can_be_found(value: bytes) -> bool:
    """Return whether a value can be looked for without finding half of the text."""
    bare = value.strip()
    least = _MIN_DIGITS if bare.isdigit() else _MIN_LENGTH
    return len(bare) >= least and bare.lower() not in _ORDINARY and len(set(bare)) >= _MIN_DIFFERENT


def secrets_of_environment(env: Mapping[str, str], passed: Collection[str]) -> Iterator[bytes]:
    """Yield values of variables with secret names, of ``passed`` ones, of long ones each line."""
    for name, value in sorted(env.items()):
        if name in passed or (is_secret(name) and not _PATH.fullmatch(value)):
            raw = value.encode(errors="surrogateescape")
            yield raw
            yield from (line.strip() for line in raw.splitlines() if len(line.strip()) >= _MIN_LINE)


# A text and a value are compared by their letters and digits alone. So a value is found that has
# been wrapped, coloured, spaced out or escaped, and a part of it that is long enough.

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SIGNS = bytes(set(range(256)) - set(_LETTERS))
_IS_LETTER = compile_lazily(rb"[A-Za-z0-9]")
_ENCODED = compile_lazily(rb"[A-Za-z0-9+/_-]*=*")
_ENCODED_BYTES = 4096  # bytes around a find that may belong to the same base64 text
_GRAM = 8
"""Letters that are looked for; any part of a value of twice as many, less one, has such ones."""
_MIN_PART = 12  # letters of a part that is too long to be there by chance
_MAX_LETTERS = 1 << 14  # letters of a value that are looked for at all
_MAX_ENCODED = 1024  # letters of a value in base64 or hexadecimal digits that are looked for


class _Form(NamedTuple):
    letters: bytes
    grams: dict[bytes, int]  # the parts that are looked for, with their starts
    least: int  # letters in a row that count as a find
    in_base64: bool = False  # true for a part of a base64 text, which is a secret as a whole
    value: bytes = b""  # the value itself, which may begin and end with signs


class KnownValues:
    """Values to look for."""

    def __init__(self, values: Iterable[bytes] = ()) -> None:
        self.values: dict[bytes, None] = {}
        self._exact: list[bytes] = []
        self._forms: list[_Form] = []
        for value in values:
            self.add(value)

    def add(self, value: bytes) -> bool:
        """Look for one more value, and return whether it is a new one."""
        bare = value.strip()
        if not can_be_found(bare) or bare in self.values:
            return False
        self.values[bare] = None
        letters = _letters(bare)[:_MAX_LETTERS]
        if len(letters) >= _MIN_PART:
            starts = range(0, len(letters) - _GRAM + 1, _GRAM)
            grams = {letters[start : start + _GRAM]: start for start in reversed(starts)}
            # Of words that may be in any text all letters must be found.
            least = _MIN_PART if looks_random(bare) else len(letters)
            self._forms.append(_Form(letters, grams, least, value=bare))
        else:
            self._exact.append(bare)
        for shift in range(3):  # the places that a value may have in a longer text in base64
            packed = base64.b64encode(bytes(shift) + bare)
            # The first and the last letters also depend on what is around. The signs that the two
            # alphabets write in different ways are no letters.
            certain = packed[-(-shift * 8 // 6) : (shift + len(bare)) * 8 // 6]
            self._add_encoded(_letters(certain), in_base64=True)
        for digits in (bare.hex(), bare.hex().upper()):
            self._add_encoded(digits.encode(), in_base64=False)
        return True

    def _add_encoded(self, letters: bytes, *, in_base64: bool) -> None:
        """Look for an encoded value by its middle; a short one may be in any text."""
        letters = letters[:_MAX_ENCODED]
        if len(letters) >= _GRAM - 2:
            middle = max(0, (len(letters) - _GRAM) // 2)
            grams = {letters[middle : middle + _GRAM]: middle}
            least = min(len(letters), 2 * _MIN_PART)
            self._forms.append(_Form(letters, grams, least, in_base64))

    def find(self, text: bytes) -> Iterator[Span]:
        """Find the places of the values, and of telling parts of them."""
        for value in self._exact:
            for at in find_all(text, value):
                yield Span(at, at + len(value), "known-value", at)
        letters = _letters(text)
        places: Sequence[int] | None = None
        for form in self._forms:
            for first, last in _find_parts(letters, form):
                if places is None:
                    places = [match.start() for match in _IS_LETTER.finditer(text)]
                start, end = _widen(text, places[first], places[last - 1] + 1, form)
                yield Span(start, end, "known-value", start)


def _letters(text: bytes) -> bytes:
    return text.translate(None, _SIGNS)


def _find_parts(letters: bytes, form: _Form) -> Iterator[tuple[int, int]]:
    for gram, begin in form.grams.items():
        at = letters.find(gram)
        while at >= 0:
            above, behind = form.letters[:begin][::-1], form.letters[begin:]
            start = at - _common_length(above, letters[max(0, at - begin) : at][::-1])
            end = at + _common_length(behind, letters[at : at + len(behind)])
            is_enough = end - start >= form.least
            if is_enough:
                yield start, end
            at = letters.find(gram, end if is_enough else at + 1)


def _common_length(first: bytes, second: bytes) -> int:
    if first.startswith(second):
        return len(second)
    pairs = enumerate(zip(first, second))
    return next((at for at, (one, other) in pairs if one != other), len(first))


def _widen(text: bytes, start: int, end: int, form: _Form) -> tuple[int, int]:
    """Return a find with what belongs to it: the signs of the value, or the rest of a base64."""
    if form.in_base64:
        before = find_match_end(_ENCODED, text[max(0, start - _ENCODED_BYTES) : start][::-1])
        return start - before, find_match_end(_ENCODED, text, end, end + _ENCODED_BYTES)
    lead = form.value[: len(form.value) - len(form.value.lstrip(_SIGNS))]
    trail = form.value[len(form.value.rstrip(_SIGNS)) :]
    start -= len(lead) if text.endswith(lead, 0, start) else 0
    return start, end + (len(trail) if text.startswith(trail, end) else 0)


class SecretMask:
    """Hides the secrets of an environment in JSON values."""

    def __init__(self, env: Mapping[str, str], passed: Collection[str]) -> None:
        """Take the values of variables with secret names, and of those the user declares secret."""
        self._known = KnownValues(secrets_of_environment(env, passed))

    def hide_secrets(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return a JSON object with the secrets in its texts hidden."""
        if not self._known.values:
            return dict(fields)
        return {
            key: value if key in _STRUCTURE else self._hide(value) for key, value in fields.items()
        }

    def _hide(self, value: object) -> object:
        if isinstance(value, str):
            return change_bytes(value, lambda text: hide_spans(text, self._known.find(text)))
        if isinstance(value, Mapping):
            return self.hide_secrets(value)
        if isinstance(value, (list, tuple)):
            return [self._hide(item) for item in value]
        return value
