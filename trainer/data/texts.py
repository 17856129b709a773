"""Labelled texts: from a csv file, a folder of them, or the Hugging Face cache.

A csv row is ``class,title,description`` as in AG News (Zhang et al. 2015): class 1 to 4, any
further columns are text, and a backslash stands for a line break within a text.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Options, TrainerError
from ..counts import counted

CLASSES = 4
# The data set moved on the hub; which of its names the cache knows depends on the library that
# filled it, and offline no redirect is followed.
HUB_NAMES = ("ag_news", "fancyzhx/ag_news")
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """One labelled text."""

    label: int
    """The class, from 0."""
    text: str
    """Title and description, in one line."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The rows of one run."""

    train: list[LabelledText]
    """The rows to learn from."""
    held_out: list[LabelledText]
    """The rows that accuracy is measured on; none of them is trained on."""


def load(options: Options) -> Corpus:
    """Read the rows that ``options`` asks for, the same on every rank.

    Raises:
        TrainerError: they cannot be read, or are too few to train on and to measure.
    """
    train, held_out = _read(options.data)
    source = options.data or HUB_NAMES[0]
    if held_out is None:
        train, held_out = _split(train, options.held_out, source)
    elif options.held_out is not None:
        held_out = held_out[: options.held_out]
    if options.subset is not None and options.subset < len(train):
        train = _sample(train, options.subset, options.seed)
    classes = {row.label for row in train}
    if len(classes) < 2 or not held_out:
        raise TrainerError(
            f"{source}: {counted(len(train), 'row')} to train on, of "
            f"{counted(len(classes), 'class', 'classes')}, and "
            f"{len(held_out)} held out: there is nothing to learn",
            hint="give rows of at least two classes to train on, and one row to hold out",
        )
    return Corpus(train=train, held_out=held_out)


def _read(data: Path | None) -> tuple[list[LabelledText], list[LabelledText] | None]:
    """Return the training rows, and the held-out ones if the source has them apart."""
    if data is None:
        return read_hub()
    if data.is_dir():
        return _read_folder(data)
    return read_csv(data), None


def _sample(rows: list[LabelledText], count: int, seed: int) -> list[LabelledText]:
    """Sample the whole file, and keep its order: files are often sorted by class."""
    numbers = random.Random(seed).sample(range(len(rows)), count)  # noqa: S311
    return [rows[number] for number in sorted(numbers)]


def read_csv(path: Path) -> list[LabelledText]:
    """Return the rows of a csv file, with or without a header line.

    Raises:
        TrainerError: lines are not labelled texts; the message names the first and counts all.
    """
    rows, problems = [], []
    try:
        for line, cells in _cells(path):
            row = _row(cells)
            if isinstance(row, LabelledText):
                rows.append(row)
            else:
                problems.append(f"line {line}: {row}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TrainerError(
            f"{path} cannot be read as csv: {error}",
            hint="it must be a text file in UTF-8 with the columns class, title, description",
        ) from error
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
        raise TrainerError(
            f"{path}: {len(problems)} of {counted(len(rows) + len(problems), 'row')} "
            f"cannot be used:{shown}{more}",
            hint=f"each row is a class from 1 to {CLASSES}, then one or more columns of text",
        )
    if not rows:
        raise TrainerError(f"{path} has no rows", hint="check that the file arrived complete")
    return rows


def read_hub() -> tuple[list[LabelledText], list[LabelledText]]:
    """Return the training and test rows of ``ag_news``, from the cache if offline.

    Raises:
        TrainerError: the cache does not have it.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise TrainerError(
            f"without --data, ag_news is read by the package {error.name}, which is missing",
            hint="name a csv file with --data, or add datasets to the environment",
        ) from error
    reasons = []
    for name in HUB_NAMES:
        try:
            dataset = datasets.load_dataset(name)
        except (OSError, ValueError) as error:  # includes ConnectionError and FileNotFoundError
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        return _rows_of(dataset["train"]), _rows_of(dataset["test"])
    raise TrainerError(
        "ag_news is not in the Hugging Face cache:" + "".join(f"\n  {why}" for why in reasons),
        hint='name a csv file with --data; or list datasets = ["ag_news"] under [assets] in '
        "stager.toml and build again; or fetch it once where there is a network, with "
        "HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0 before this command",
    )


def _rows_of(split: Any) -> list[LabelledText]:  # noqa: ANN401 - a type of a package that may be missing
    labels, texts = split["label"], split["text"]
    return [
        LabelledText(label=label, text=_clean(text))
        for label, text in zip(labels, texts, strict=True)
    ]


def _read_folder(folder: Path) -> tuple[list[LabelledText], list[LabelledText] | None]:
    files = {path.name: path for path in sorted(folder.glob("*.csv"))}
    if {"train.csv", "test.csv"} <= files.keys():
        return read_csv(files["train.csv"]), read_csv(files["test.csv"])
    if len(files) == 1:
        return read_csv(next(iter(files.values()))), None
    raise TrainerError(
        f"--data {folder}: which file is meant? It has {', '.join(files) or 'no csv file'}",
        hint="name one file, or a folder with train.csv and test.csv",
    )


def _split(
    rows: list[LabelledText], held_out: int | None, source: object
) -> tuple[list[LabelledText], list[LabelledText]]:
    count = min(1000, len(rows) // 7) if held_out is None else held_out
    if count >= len(rows):
        raise TrainerError(
            f"{source}: --held-out {count} leaves none of its {counted(len(rows), 'row')} "
            "to train on",
            hint="hold out fewer rows",
        )
    return rows[: len(rows) - count], rows[len(rows) - count :]


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        for index, cells in enumerate(reader):
            if cells and not (index == 0 and _is_header(cells)):
                yield reader.line_num, cells


def _is_header(cells: Sequence[str]) -> bool:
    return len(cells) > 1 and any(character.isalpha() for character in cells[0])


def _row(cells: Sequence[str]) -> LabelledText | str:
    """Return the row in some cells, or the reason why they are none."""
    label = cells[0].strip()
    if label not in {str(number) for number in range(1, CLASSES + 1)}:
        return f"the class is {label[:20]!r}"
    text = _clean(" ".join(cells[1:]))
    if not text:
        return "there is no text"
    return LabelledText(label=int(label) - 1, text=text)


def _clean(text: str) -> str:
    return " ".join(text.replace("\\", " ").split())
