"""Make the corpus and the vocabulary of this example: ``python generate.py [FOLDER]``.

Four classes of short texts: the sea (1), the kitchen (2), the railway (3) and the garden (4). Every
topical word belongs to two classes alike, so no word gives a class away; what does is which class
the words of a text have in common. On top, one word in seven is of the wrong topic, and one
label in thirty is wrong, so no model can be right about every row.

The same bytes come out on every machine: the only source of chance is ``Random.random()``, which
Python promises not to change for a given seed.
"""

from __future__ import annotations

import csv
import io
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

SEED = 20240
ROWS = 2400
WRONG_WORDS = 1 / 7
WRONG_LABELS = 1 / 30
CLASSES = ("sea", "kitchen", "railway", "garden")

# The words that two classes share.
SHARED = {
    ("sea", "kitchen"): "salt crab oyster herring barrel galley broth rum spoon bucket "
    "lobster ladle tin mackerel",
    ("sea", "railway"): "captain whistle signal engine departure cargo passenger lantern "
    "crew bell cabin freight timetable fog",
    ("sea", "garden"): "gull wind rope sand pebble rain snail island breeze pool sunrise "
    "weed spray net",
    ("kitchen", "railway"): "steam coal smoke boiler tea trolley menu biscuit waiter "
    "grease plate cup clock stove",
    ("kitchen", "garden"): "herb onion carrot thyme pumpkin bean pepper apple compost "
    "basket lemon turnip mint melon",
    ("railway", "garden"): "bridge fence gate gravel hedge sleeper shed nettle embankment "
    "path bramble brick wall puddle",
}
PEOPLE = "the old man|her sister|a stranger|the boy|nobody|our neighbour|my uncle|the twins"
VERBS = "carried|noticed|wanted|forgot|counted|painted|mentioned|cleaned|lost|repaired|sold"
WHEN = "before noon|again|on monday|at dusk|last winter|without a word|for years|too late"
TITLES = "news of|a story about|notes on|remembering|questions about|the trouble with"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LEAST = 8
"""A word needs as many uses for an entry of its own; rarer ones are spelled from pieces."""


class Dice:
    """Choices that depend on nothing but the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311

    def chance(self, share: float) -> bool:
        """Return True in the given share of calls (0 to 1)."""
        return self._random.random() < share

    def pick(self, options: Sequence[str]) -> str:
        """Return one of the options, each as likely."""
        return options[int(self._random.random() * len(options))]


def topic_word(dice: Dice, topic: str) -> str:
    """Return a word that ``topic`` shares with another class, or at times a word of no meaning."""
    if dice.chance(WRONG_WORDS):
        topic = dice.pick([name for name in CLASSES if name != topic])
    pair = dice.pick([" ".join(pair) for pair in SHARED if topic in pair])
    first, second = pair.split()
    word = dice.pick(SHARED[first, second].split())
    return word + "s" if dice.chance(0.2) else word


def row(dice: Dice, topic: str) -> tuple[str, str]:
    """Return the title and the description of one text."""
    words = [topic_word(dice, topic) for _ in range(7)]
    title = f"{dice.pick(TITLES.split('|'))} the {words[0]}"
    clauses = [
        f"{dice.pick(PEOPLE.split('|'))} {dice.pick(VERBS.split('|'))} the {a} and {b}"
        for a, b in (words[1:3], words[3:5])
    ]
    last = f"{dice.pick(WHEN.split('|'))}, near the {words[5]} with the {words[6]}"
    sentence = f"{clauses[0]}, then {clauses[1]} {last}."
    return title.capitalize(), sentence.capitalize()


def sentences() -> str:
    """Return the corpus as csv text: class 1 to 4, title, description; every field quoted."""
    dice = Dice(SEED)
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for _ in range(ROWS):
        topic = dice.pick(CLASSES)
        title, description = row(dice, topic)
        label = dice.pick(CLASSES) if dice.chance(WRONG_LABELS * 4 / 3) else topic
        writer.writerow([CLASSES.index(label) + 1, title, description])
    return text.getvalue()


def vocabulary(corpus: str) -> str:
    """Return a WordPiece vocabulary for the corpus, one token a line.

    Special tokens come first, then the single characters, alone and as continuations, the plural
    ending, and the words that are used often enough.
    """
    kept = "".join(sign if sign.isalpha() else " " for sign in corpus.lower())
    counts = Counter(kept.split())
    signs = sorted({sign for sign in corpus.lower() if not sign.isspace()})
    words = sorted(word for word, uses in counts.items() if uses >= LEAST and len(word) > 1)
    # A plural is spelled as its word and the ending, which both are read more often.
    words = [word for word in words if not (word.endswith("s") and word[:-1] in words)]
    return "\n".join([*SPECIAL, *signs, *(f"##{sign}" for sign in signs), *words]) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Write both files into the folder given, by default ``data`` beside this file."""
    folder = Path(arguments[0]) if arguments else Path(__file__).parent / "data"
    folder.mkdir(parents=True, exist_ok=True)
    corpus = sentences()
    (folder / "sentences.csv").write_bytes(corpus.encode())
    (folder / "vocab.txt").write_bytes(vocabulary(corpus).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
