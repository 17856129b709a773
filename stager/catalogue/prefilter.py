"""A search for many texts in a log, without looking for each in every line.

Logs repeat themselves: lines differ in digits only, and words come again and again. A word is
looked at once, whatever the number of files it is in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

_WORDS = 200_000
"""Words that are remembered, so that memory stays small."""


@dataclass(frozen=True, kw_only=True)
class PrefilterMatches:
    """The result of a search."""

    texts: tuple[bytes, ...]
    """The texts that are in one of the lines or more."""
    at: tuple[int, ...]
    """The places of the lines that have any of them."""


class Prefilter:
    """Finds which of some texts are in lines; remembers the words that have none of them."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Prepare to find texts, which contain no digits."""
        self._by_part: dict[bytes, list[bytes]] = {}
        for text in {text.encode() for text in texts}:
            # Whatever has the text in it has this, too, within one of its words.
            longest = max(text.split(), key=len)
            self._by_part.setdefault(longest, []).append(text)
        self._without_part: set[bytes] = set()
        self._parts_of: dict[bytes, frozenset[bytes]] = {}

    def among(self, lines: Sequence[bytes]) -> PrefilterMatches:
        """Find the texts in these lines, from which digits were removed."""
        unique = set(lines)
        joined = b"\n".join(unique)
        # Not "-=", which would go through all words that are remembered.
        words = set(joined.split()) - self._without_part
        self._learn(words.difference(self._parts_of))
        texts = self._present(words, joined)
        if not texts:
            return PrefilterMatches(texts=(), at=())
        any_of = re.compile(b"|".join(map(re.escape, texts))).search
        having = {line for line in unique if any_of(line)}
        at = tuple(place for place, line in enumerate(lines) if line in having)
        return PrefilterMatches(texts=tuple(texts), at=at)

    def _present(self, words: Collection[bytes], joined: bytes) -> list[bytes]:
        parts: set[bytes] = set()
        for word in words:
            parts.update(self._parts_of.get(word, ()))
        candidates = (text for part in parts for text in self._by_part[part])
        return sorted(text for text in candidates if text in joined)

    def _learn(self, words: Collection[bytes]) -> None:
        joined = b"\n".join(words)
        parts_of: dict[bytes, set[bytes]] = {}
        for part in self._by_part:
            if part not in joined:
                continue
            for word in words:
                if part in word:
                    parts_of.setdefault(word, set()).add(part)
        self._parts_of.update((word, frozenset(parts)) for word, parts in parts_of.items())
        if len(self._without_part) < _WORDS:
            self._without_part.update(word for word in words if word not in parts_of)
