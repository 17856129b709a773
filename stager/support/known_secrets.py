"""The secrets that are known here: those of the environment, and those that settings spell out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from bundle.redaction.secrets import is_secret

from ..redaction.redactor import Redactor
from ..redaction.secret_values import spellings, worth_looking_for

_PATH = re.compile(r"[~.]{0,2}/[\w.+@-]+(?:/[\w.+@-]*)*(?::/[\w.+@/-]*)*")
_MIN_BYTES = 6
"""The shortest value of settings that is looked for elsewhere, too."""
_BRACKETS = (b"[", b"{", b"(")


def of_environment(environment: Mapping[str, str], passed: Collection[str]) -> Iterator[bytes]:
    """Yield values of variables that are secret by name or in ``passed``, and secrets in others."""
    for name, value in sorted(environment.items()):
        raw = value.encode(errors="surrogateescape")
        if name in passed or (is_secret(name) and not _PATH.fullmatch(value)):
            yield from spellings(raw)
        yield from _within(raw)


def of_settings(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the values that settings and commands give to names that mean a secret."""
    for text in texts:
        for value in _within(text):
            if len(value) >= _MIN_BYTES:
                yield value


def _within(text: bytes) -> Iterator[bytes]:
    for span in Redactor().find(text):
        value = span.learned or text[span.start : span.end]
        if worth_looking_for(value) and not value.startswith(_BRACKETS):
            yield value
