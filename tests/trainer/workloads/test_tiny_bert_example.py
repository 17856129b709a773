"""The example's corpus: made by its generator, and as hard as it claims to be."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny-bert"
DATA = EXAMPLE / "data"


@pytest.fixture(scope="module")
def rows():
    with (DATA / "sentences.csv").open(encoding="utf-8", newline="") as file:
        return [
            (int(label), set(re.findall("[a-z]+", f"{title} {text}".lower())))
            for label, title, text in csv.reader(file)
        ]


@pytest.fixture(scope="module")
def uses(rows):
    """For each word, in how many rows of each class it stands."""
    found = defaultdict(Counter)
    for label, words in rows:
        for word in words:
            found[word][label] += 1
    return found


def test_the_generator_makes_these_very_bytes(tmp_path):
    subprocess.run([sys.executable, str(EXAMPLE / "generate.py"), str(tmp_path)], check=True)
    for name in ("sentences.csv", "vocab.txt"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_four_classes_of_about_the_same_size(rows):
    sizes = Counter(label for label, _ in rows)
    assert sorted(sizes) == [1, 2, 3, 4]
    assert len(rows) >= 2000
    assert min(sizes.values()) > 0.9 * len(rows) / 4
    assert (DATA / "sentences.csv").stat().st_size < 400_000


def test_no_word_gives_its_class_away(uses):
    frequent = [count for count in uses.values() if count.total() >= 20]
    assert len(frequent) > 100
    assert max(max(count.values()) / count.total() for count in frequent) < 0.75


def test_the_best_single_word_of_a_row_is_not_enough(rows, uses):
    right = 0
    for label, words in rows:
        sure = [uses[word] for word in words if uses[word].total() >= 20]
        best = max(sure, key=lambda count: max(count.values()) / count.total())
        right += max(best, key=best.__getitem__) == label
    assert right / len(rows) < 0.6


def test_every_word_can_be_spelled(rows, uses):
    vocabulary = (DATA / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(set(vocabulary)) == len(vocabulary)
    signs = {sign for sign in (DATA / "sentences.csv").read_text().lower() if not sign.isspace()}
    assert signs <= set(vocabulary)
    assert {f"##{sign}" for sign in signs} <= set(vocabulary)
    # Most words are entries of their own, else the model would have to learn to spell first.
    whole = sum(uses[word].total() for word in uses if word in vocabulary)
    assert whole / sum(count.total() for count in uses.values()) > 0.9
