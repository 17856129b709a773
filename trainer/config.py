"""The command line of ``python -m trainer``, read and checked once.

Nothing here imports PyTorch, so that ``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple


def format_count(number: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``3 nodes``; or with the plural ``several``."""
    plural = several or f"{noun}s"
    return f"1 {noun}" if number == 1 else f"{number} {plural}"


STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that was stopped by a signal and has saved a checkpoint."""
DEFAULT_TOKENIZER = "google/bert_uncased_L-2_H-128_A-2"
_WIDTH_STEP = 8
_PLACE = re.compile(r"^\[[^\]]*:\d+\]\s*")


class TrainerError(Exception):
    """An expected failure: shown as a message and a hint, never as a traceback.

    Attributes:
        message: what is wrong, and where.
        hint: what to do about it.
        everywhere: whether every rank raised the same, so that one of them can speak for all.
    """

    def __init__(self, message: str, *, hint: str, everywhere: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.everywhere = everywhere

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}"


@contextmanager
def explain_errors(
    message: str, hint: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Turn errors of the block into a TrainerError: the message, and what the error says."""
    try:
        yield
    except kinds as error:
        why = getattr(error, "strerror", "") or shorten_error(error)
        raise TrainerError(f"{message}: {why}", hint=hint) from error


def shorten_error(error: Exception) -> str:
    """Return the first line of an error, without the place in PyTorch's source."""
    first = str(error).strip().partition("\n")[0]
    return _PLACE.sub("", first)[:300]


class TrainingStopped(Exception):
    """The run was stopped by a signal, and has saved a checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One training run, as asked for on the command line."""

    workload: str
    data: Path | None
    """A data file or folder; None takes the data set from the Hugging Face cache."""
    epochs: int
    subset: int | None
    held_out: int | None
    """Number of rows kept back for the final accuracy; None lets the workload choose."""
    batch_size: int
    """Rows of a step on each rank."""
    lr: float | None
    """The peak learning rate; None lets the workload choose."""
    seed: int
    """Seeds the model's first weights, the order of the rows and the choice of the subset."""
    out: Path
    resume: bool
    vocab: Path | None = None
    tokenizer: str | None = None
    sync: str = "ddp"
    precision: str = "auto"
    save_every: int | None = None
    keep: int = 3
    width: int = 64


class Workload(NamedTuple):
    """A workload that can be trained, by its page in :mod:`trainer.workloads`."""

    summary: str
    """One line for ``--help``."""
    data_help: str
    """The kind of data that ``--data`` names; empty if there is none."""
    add_options: Callable[[argparse.ArgumentParser], None]
    """Adds the options that only this workload has."""
    epochs: int
    batch_size: int
    needed: tuple[str, ...] = ("torch", "numpy")


def _add_tiny_bert_options(parser: argparse.ArgumentParser) -> None:
    words = parser.add_mutually_exclusive_group()
    add = words.add_argument
    add("--vocab", type=_input, metavar="FILE", help="WordPiece vocabulary, one token a line")
    text = f"tokenizer from the Hugging Face cache, or a folder (default: {DEFAULT_TOKENIZER})"
    add("--tokenizer", metavar="NAME", help=text)


def _add_loop_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--sync",
        choices=("ddp", "all-reduce", "parameter-server", "dp"),
        default="ddp",
        help="how the ranks keep their models the same (default: ddp)",
    )
    add(
        "--precision",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto: bfloat16 where the hardware has it (default: auto)",
    )
    count = partial(add, type=whole_number(1), metavar="N")
    count("--save-every", help="a checkpoint every N steps, too")
    count("--keep", default=3, help="checkpoints to keep (default: 3)")


def _add_cifar10_options(parser: argparse.ArgumentParser) -> None:
    _add_loop_options(parser)
    parser.add_argument(
        "--width",
        type=_width,
        default=64,
        metavar="N",
        help="channels of the first stage, a multiple of 8; 16 is quick on a CPU (default: 64)",
    )


WORKLOADS = {
    "mlp": Workload(
        "10 numbers, 50 hidden units, 2 classes: no data needed, done in seconds",
        "",
        _add_loop_options,
        epochs=3,
        batch_size=32,
    ),
    "mnist": Workload(
        "a small convolutional network that reads handwritten digits",
        "folder with the IDX files of MNIST, compressed or not",
        _add_loop_options,
        epochs=3,
        batch_size=32,
    ),
    "cifar10": Workload(
        "a ResNet-18 that sorts photos into ten classes",
        "npz file with x_train, y_train, x_test and y_test, or its folder",
        _add_cifar10_options,
        epochs=15,
        batch_size=32,
    ),
    "tiny-bert": Workload(
        "a two-layer BERT that sorts texts into four classes",
        "csv file of class 1-4, title, description, or a folder with train.csv and test.csv "
        "(default: ag_news from the Hugging Face cache)",
        _add_tiny_bert_options,
        epochs=3,
        batch_size=16,
        needed=("torch", "transformers", "accelerate", "numpy"),
    ),
}


def parse(argv: Sequence[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Train one of the workloads, alone or under torchrun.",
        epilog="`python -m trainer all-reduce` trains nothing: it measures the network between the "
        "ranks.",
    )
    names = parser.add_subparsers(dest="workload", metavar="NAME", required=True)
    for name, workload in WORKLOADS.items():
        one = names.add_parser(name, help=workload.summary, description=workload.summary)
        _add_shared_options(one, name)
        workload.add_options(one)
    if argv and not argv[0].startswith("-") and argv[0] not in WORKLOADS:
        near = difflib.get_close_matches(argv[0], [*WORKLOADS, "all-reduce"], n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        parser.error(f"no workload {argv[0]!r} (there are: {', '.join(WORKLOADS)}){guess}")
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        one = names.choices[found.workload]
        one.error(f"unrecognized arguments: {' '.join(unknown)}{_suggest_option(one, unknown[0])}")
    return Options(**vars(found))


def _suggest_option(parser: argparse.ArgumentParser, word: str) -> str:
    known = re.findall(r"--[\w-]+", parser.format_help())
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def require_fitting_batch(options: Options, rows: int) -> None:
    """See whether a step fits into the rows to train on."""
    if options.batch_size > rows:
        raise TrainerError(
            f"--batch-size {options.batch_size}: only {format_count(rows, 'row')} to train on",
            hint="it is the number of rows that each rank takes in a step; name a smaller one",
        )


def check_paths(options: Options) -> None:
    """Look at the named files before any work is done."""
    problems = []
    if options.data is not None and not options.data.exists():
        problems.append(f"--data {options.data}: there is no such file or folder")
    if options.vocab is not None and not options.vocab.is_file():
        problems.append(f"--vocab {options.vocab}: there is no such file")
    if options.out.exists() and not options.out.is_dir():
        problems.append(f"--out {options.out}: this is a file, and must be a folder")
    if problems:
        places = ", or ".join(map(str, (Path.cwd(), *_list_staged_places())))
        hint = f"correct the path; relative ones are taken from {places}"
        raise TrainerError("\n".join(problems), hint=hint)


def _add_shared_options(parser: argparse.ArgumentParser, name: str) -> None:
    _, data_help, _, epochs, batch_size, _ = WORKLOADS[name]
    out = f"{name.partition('-')[0]}_out"
    lr = "grows with the rows of a step" if name == "tiny-bert" else "one that suits the workload"
    add = parser.add_argument
    count = partial(add, type=whole_number(1), metavar="N")
    if data_help:
        add("--data", type=_input, metavar="PATH", help=data_help)
    else:
        parser.set_defaults(data=None)
    count("--epochs", default=epochs, help=f"default: {epochs}")
    count("--subset", help="train on N rows only, chosen by the seed")
    count(
        "--held-out",
        help="rows kept back for the final accuracy: the last N of a file (default: one in seven, "
        "at most 1000; mlp: 512), the first N of a test split (default: all)",
    )
    text = f"rows a step, on each rank (default: {batch_size})"
    count("--batch-size", default=batch_size, help=text)
    add("--lr", type=_rate, metavar="RATE", help=f"default: {lr}")
    add("--seed", type=_seed, default=42, metavar="N", help="default: 42")
    add("--out", type=_path, default=Path(out), metavar="DIR", help=f"default: {out}")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")


def _list_staged_places() -> list[Path]:
    places = [os.environ.get(name) for name in ("STAGER_PROJECT", "STAGER_ASSETS")]
    return [Path(place) for place in places if place]


def _input(text: str) -> Path:
    """Return the path of a file to read: in the working directory, else among what was staged.

    A node that does not see the directory of a job starts the ranks in an empty one.
    """
    path = _path(text)
    if path.exists():
        return path
    return next((place / path for place in _list_staged_places() if (place / path).exists()), path)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a path: {error}") from error
    return path


def _width(text: str) -> int:
    number = whole_number(_WIDTH_STEP)(text)
    if number % _WIDTH_STEP:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {_WIDTH_STEP}")
    return number


def _seed(text: str) -> int:
    number = whole_number(0)(text)
    if number >= 2**32:  # the largest that numpy.random.seed takes
        raise argparse.ArgumentTypeError(f"{text} is too large: seeds are below 2**32")
    return number


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a function that reads a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            end = "up" if most is None else f"to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} {end}")
        return number

    return read


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return rate
