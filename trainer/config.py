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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple


def format_count(number: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``3 nodes``; or with the plural ``several``."""
    return f"1 {noun}" if number == 1 else f"{number} {several or f'{noun}s'}"


STOPPED = 128 + signal.SIGTERM  # exit code of a run that a signal stopped, with a checkpoint
DEFAULT_TOKENIZER = "google/bert_uncased_L-2_H-128_A-2"
_PLACE = re.compile(r"^\[[^\]]*:\d+\]\s*")


class TrainerError(Exception):
    """An expected failure: shown as a message and a hint, never as a traceback."""

    def __init__(self, message: str, *, hint: str, everywhere: bool = False) -> None:
        super().__init__(f"{message}\nhint: {hint}")
        self.message, self.hint = message, hint
        self.everywhere = everywhere
        """True if every rank raised the same, so that one of them can report for all."""


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
    """The run was stopped by a signal, and has saved a checkpoint: ``stopped after step N``."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One training run, as asked for on the command line."""

    workload: str
    data: Path | None = None  # a file or folder; None for the Hugging Face cache
    epochs: int
    subset: int | None
    held_out: int | None  # rows; None lets the workload choose
    batch_size: int  # rows of a step on each rank
    lr: float | None  # the peak; None lets the workload choose
    seed: int  # of the first weights, the order of the rows and the choice of the subset
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
    data_help: str  # the kind of data that ``--data`` names; empty if there is none
    epochs: int = 3
    batch_size: int = 32
    needed: tuple[str, ...] = ("torch", "numpy")


WORKLOADS = {
    "mlp": Workload("10 numbers, 50 hidden units, 2 classes: no data needed, done in seconds", ""),
    "mnist": Workload(
        "a small convolutional network that reads handwritten digits",
        "folder with the IDX files of MNIST, compressed or not",
    ),
    "cifar10": Workload(
        "a ResNet-18 that sorts photos into ten classes",
        "npz file with x_train, y_train, x_test and y_test, or its folder",
        epochs=15,
    ),
    "tiny-bert": Workload(
        "a two-layer BERT that sorts texts into four classes",
        "csv file of class 1-4, title, description, or a folder with train.csv and test.csv "
        "(default: ag_news from the Hugging Face cache)",
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
        if name == "tiny-bert":
            _add_tiny_bert_options(one)
        else:
            _add_loop_options(one, has_width=name == "cifar10")
    if argv and not argv[0].startswith("-") and argv[0] not in WORKLOADS:
        guess = _suggest_word(argv[0], [*WORKLOADS, "all-reduce"])
        parser.error(f"no workload {argv[0]!r} (there are: {', '.join(WORKLOADS)}){guess}")
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        one = names.choices[found.workload]
        known = re.findall(r"--[\w-]+", one.format_help())
        guess = _suggest_word(unknown[0].partition("=")[0], known)
        one.error(f"unrecognized arguments: {' '.join(unknown)}{guess}")
    return Options(**vars(found))


def _suggest_word(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _add_shared_options(parser: argparse.ArgumentParser, name: str) -> None:
    workload, out = WORKLOADS[name], f"{name.partition('-')[0]}_out"
    lr = "grows with the rows of a step" if name == "tiny-bert" else "one that suits the workload"
    add = parser.add_argument
    count = partial(add, type=whole_number(1), metavar="N")
    if workload.data_help:
        add("--data", type=_input, metavar="PATH", help=workload.data_help)
    count("--epochs", default=workload.epochs, help="default: %(default)s")
    count("--subset", help="train on N rows only, chosen by the seed")
    count(
        "--held-out",
        help="rows kept back for the final accuracy: the last N of a file (default: one in seven, "
        "at most 1000; mlp: 512), the first N of a test split (default: all)",
    )
    text = "rows a step, on each rank (default: %(default)s)"
    count("--batch-size", default=workload.batch_size, help=text)
    add("--lr", type=_rate, metavar="RATE", help=f"default: {lr}")
    # numpy.random.seed takes no larger one.
    seed = whole_number(0, 2**32 - 1)
    add("--seed", type=seed, default=42, metavar="N", help="default: %(default)s")
    add("--out", type=_path, default=Path(out), metavar="DIR", help="default: %(default)s")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")


def _add_tiny_bert_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_mutually_exclusive_group().add_argument
    add("--vocab", type=_input, metavar="FILE", help="WordPiece vocabulary, one token a line")
    text = f"tokenizer from the Hugging Face cache, or a folder (default: {DEFAULT_TOKENIZER})"
    add("--tokenizer", metavar="NAME", help=text)


def _add_loop_options(parser: argparse.ArgumentParser, *, has_width: bool) -> None:
    add = parser.add_argument
    ways = ("ddp", "all-reduce", "parameter-server", "dp")
    text = "how the ranks keep their models the same (default: ddp)"
    add("--sync", choices=ways, default="ddp", help=text)
    kinds = ("auto", "float32", "bfloat16")
    text = "auto: bfloat16 where the hardware has it (default: auto)"
    add("--precision", choices=kinds, default="auto", help=text)
    count = partial(add, type=whole_number(1), metavar="N")
    count("--save-every", help="a checkpoint every N steps, too")
    count("--keep", default=3, help="checkpoints to keep (default: 3)")
    if has_width:
        text = "channels of the first stage, a multiple of 8; 16 is quick on a CPU (default: 64)"
        add("--width", type=whole_number(8, step=8), default=64, metavar="N", help=text)


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


def _list_staged_places() -> list[Path]:
    places = [os.environ.get(name) for name in ("STAGER_PROJECT", "STAGER_ASSETS")]
    return [Path(place) for place in places if place]


def _input(text: str) -> Path:
    """Return the path of a file to read: in the working directory, else among what was staged."""
    path = _path(text)
    paths = (path, *(place / path for place in _list_staged_places()))
    return next((one for one in paths if one.exists()), path)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a path: {error}") from error
    return path


def whole_number(least: int, most: int | None = None, step: int = 1) -> Callable[[str], int]:
    """Return a function that reads a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most) or number % step:
            end = "up" if most is None else f"to {most}"
            kind = "whole number" if step == 1 else f"multiple of {step}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {kind} from {least} {end}")
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
