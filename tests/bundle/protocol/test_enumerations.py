"""Words are the texts that users, formats and Slurm know."""

from __future__ import annotations

import json

import pytest

from bundle.protocol import enumerations


@pytest.mark.parametrize("kind", enumerations.TextEnum.__subclasses__())
def test_a_word_is_its_text(kind: type[enumerations.TextEnum]) -> None:
    for word in kind:
        assert word == word.value
        assert f"{word}" == str(word) == word.value
        assert json.loads(json.dumps({word: word})) == {word.value: word.value}
