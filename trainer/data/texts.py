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

from ..config import Options, TrainerError
from ..counts import counted

CLASSES = 4
# The data set moved on the hub; which of its names the cache knows depends on the library that
# filled it, and offline no redirect is followed.
HUB_NAMES = ("ag_news", "fancyzhx/ag_news")
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One labelled text."""

    label: int
    """The class, from 0."""
    text: str
    """Title and description, in one line."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The rows of one run."""

    train: list[Row]
    """The rows to learn from."""
    held_out: list[Row]
    """The rows that accuracy is measured on; none of them is trained on."""


def load(options: Options) -> Corpus:
    """Read the rows that ``options`` asks for, the same on every rank.

    Raises:
        TrainerError: when they cannot be read, or are too few to train on and to measure.
    """
    held_out: list[Row] | None
    if options.data is None:
        train, held_out = read_hub()
    elif options.data.is_dir():
        train, held_out = _read_folder(options.data)
    else:
        train, held_out = read_csv(options.data), None
    source = options.data or HUB_NAMES[0]
    if held_out is None:
        train, held_out = _split(train, options.held_out, source)
    elif options.held_out is not None:
        held_out = held_out[: options.held_out]
    if options.subset is not None and options.subset < len(train):
        # The order of the file is kept, but not its beginning: files are often sorted by class.
        chosen = random.Random(options.seed).sample(range(len(train)), options.subset)  # noqa: S311
        train = [train[index] for index in sorted(chosen)]
    if len({row.label for row in train}) < 2 or not held_out:
        raise TrainerError(
            f"{source}: {counted(len(train), 'row')} to train on, of "
            f"{counted(len({row.label for row in train}), 'class', 'classes')}, and "
            f"{len(held_out)} held out: there is nothing to learn",
            hint="give rows of at least two classes to train on, and one row to hold out",
        )
    return Corpus(train=train, held_out=held_out)


def read_csv(path: Path) -> list[Row]:
    """The rows of a csv file, with or without a header line.

    Raises:
        TrainerError: naming the first lines that are no labelled text, and how many there are.
    """
    rows, problems = [], []
    try:
        for line, cells in _cells(path):
            row = _row(cells)
            if isinstance(row, Row):
                rows.append(row)
            else:
                problems.append(f"line {line}: {row}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TrainerError(
            f"{path} cannot be read as csv: {error}",
            hint="it has to be a text file in UTF-8 with the columns class, title, description",
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


def read_hub() -> tuple[list[Row], list[Row]]:
    """The training and test rows of ``ag_news``, from the cache when offline.

    Raises:
        TrainerError: when the cache does not have it.
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
            found = datasets.load_dataset(name)
        except (OSError, ValueError) as error:  # includes ConnectionError and FileNotFoundError
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        splits = [
            [
                Row(label=label, text=_clean(text))
                for label, text in zip(found[split]["label"], found[split]["text"], strict=True)
            ]
            for split in ("train", "test")
        ]
        return splits[0], splits[1]
    raise TrainerError(
        "ag_news is not in the Hugging Face cache:" + "".join(f"\n  {why}" for why in reasons),
        hint='name a csv file with --data; or list datasets = ["ag_news"] under [assets] in '
        "stager.toml and build again; or fetch it once where there is a network, with "
        "HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0 before this command",
    )


def _read_folder(folder: Path) -> tuple[list[Row], list[Row] | None]:
    files = {path.name: path for path in sorted(folder.glob("*.csv"))}
    if {"train.csv", "test.csv"} <= files.keys():
        return read_csv(files["train.csv"]), read_csv(files["test.csv"])
    if len(files) == 1:
        return read_csv(next(iter(files.values()))), None
    raise TrainerError(
        f"--data {folder}: which file is meant? It has {', '.join(files) or 'no csv file'}",
        hint="name one file, or a folder with train.csv and test.csv",
    )


def _split(rows: list[Row], held_out: int | None, source: object) -> tuple[list[Row], list[Row]]:
    """The rows to train on, and the last ones, held out."""
    count = min(1000, len(rows) // 7) if held_out is None else held_out
    if count >= len(rows):
        raise TrainerError(
            f"{source}: --held-out {count} leaves none of its {counted(len(rows), 'row')} "
            "to train on",
            hint="hold out fewer rows",
        )
    return rows[: len(rows) - count], rows[len(rows) - count :]


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The line number and the cells of each row that is neither a header nor empty."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        for index, cells in enumerate(reader):
            named = index == 0 and len(cells) > 1 and any(c.isalpha() for c in cells[0])
            if cells and not named:
                yield reader.line_num, cells


def _row(cells: Sequence[str]) -> Row | str:
    """The row that the cells are, or what is wrong with them."""
    label = cells[0].strip()
    if label not in {str(number) for number in range(1, CLASSES + 1)}:
        return f"the class is {label[:20]!r}"
    text = _clean(" ".join(cells[1:]))
    if not text:
        return "there is no text"
    return Row(label=int(label) - 1, text=text)


def _clean(text: str) -> str:
    return " ".join(text.replace("\\", " ").split())
