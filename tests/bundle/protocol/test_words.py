"""Words are the texts that users, formats and Slurm know."""

from __future__ import annotations

import json

import pytest

from bundle.protocol import words


@pytest.mark.parametrize("kind", words.Word.__subclasses__())
def test_a_word_is_its_text(kind: type[words.Word]) -> None:
    for word in kind:
        assert word == word.value
        assert f"{word}" == str(word) == word.value
        assert json.loads(json.dumps({word: word})) == {word.value: word.value}
