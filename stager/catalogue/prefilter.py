"""Which of many texts a log has in it, found without looking for each in every line.

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
    """What was found."""

    texts: tuple[bytes, ...]
    """The texts that are in one of the lines or more."""
    at: tuple[int, ...]
    """The places of the lines that have any of them."""


class Prefilter:
    """Tells which of some texts are in lines; remembers the words that are in none."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Nothing is known of any word yet.

        Args:
            texts: what is looked for; without digits.
        """
        self._by_word: dict[bytes, list[bytes]] = {}
        for text in {text.encode() for text in texts}:
            # Whatever has the text in it has this, too, within one of its words.
            self._by_word.setdefault(max(text.split(), key=len), []).append(text)
        self._dull: set[bytes] = set()
        self._telling: dict[bytes, frozenset[bytes]] = {}

    def among(self, lines: Sequence[bytes]) -> PrefilterMatches:
        """Find the texts that are in these lines.

        Args:
            lines: without digits.
        """
        unique = set(lines)
        joined = b"\n".join(unique)
        # Not "-=", which would go through all words that are remembered.
        words = set(joined.split()) - self._dull
        self._learn(words.difference(self._telling))
        parts = {part for word in words for part in self._telling.get(word, ())}
        texts = sorted(text for part in parts for text in self._by_word[part] if text in joined)
        if not texts:
            return PrefilterMatches(texts=(), at=())
        any_of = re.compile(b"|".join(map(re.escape, texts))).search
        having = {line for line in unique if any_of(line)}
        at = tuple(place for place, line in enumerate(lines) if line in having)
        return PrefilterMatches(texts=tuple(texts), at=at)

    def _learn(self, words: Collection[bytes]) -> None:
        joined = b"\n".join(words)
        telling: dict[bytes, set[bytes]] = {}
        for part in self._by_word:
            if part in joined:
                for word in words:
                    if part in word:
                        telling.setdefault(word, set()).add(part)
        self._telling.update((word, frozenset(parts)) for word, parts in telling.items())
        if len(self._dull) < _WORDS:
            self._dull.update(word for word in words if word not in telling)
