"""The command line of ``python -m trainer``, read and checked once.

Nothing here imports PyTorch, so that ``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# --- Counts in words: the trainer's own helper, as it imports nothing of the tool ----------------


def format_count(number: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``3 nodes``; or with the plural ``several``."""
    if number == 1:
        return f"1 {noun}"
    plural = several or f"{noun}s"
    return f"{number} {plural}"


DEFAULT_TOKENIZER = "google/bert_uncased_L-2_H-128_A-2"
SYNCS = ("ddp", "all-reduce", "parameter-server", "dp")
PRECISIONS = ("auto", "float32", "bfloat16")
_WIDTH_STEP = 8


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


@dataclass(frozen=True, kw_only=True)
class Options:
    """One training run, as asked for on the command line."""

    workload: str
    data: Path | None
    """A data file or folder; None takes the data set from the Hugging Face cache."""
    epochs: int
    subset: int | None
    """Number of training rows; None for all of them."""
    held_out: int | None
    """Number of rows kept back for the final accuracy; None lets the workload choose."""
    batch_size: int
    lr: float | None
    """The peak learning rate; None derives it from the number of rows in a step."""
    seed: int
    """Seeds the model's first weights, the order of the rows and the choice of the subset."""
    out: Path
    resume: bool
    vocab: Path | None = None
    tokenizer: str | None = None
    """A tokenizer by name (in the Hugging Face cache) or by folder."""
    sync: str = "ddp"
    precision: str = "auto"
    save_every: int | None = None
    """Steps between checkpoints within an epoch; None writes them at its end only."""
    keep: int = 3
    """Number of checkpoints that stay, besides the best one."""
    width: int = 64


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload that can be trained."""

    module: str
    """The module in :mod:`trainer.workloads` whose ``run(options, world)`` does it."""
    summary: str
    """One line for ``--help``."""
    data_help: str
    """The kind of data that ``--data`` names; empty if there is none."""
    add_options: Callable[[argparse.ArgumentParser], None]
    """Adds the options that only this workload has."""
    defaults: tuple[int, int, str]
    """Epochs, rows of a batch, and the output folder, when not given."""
    lr_help: str = "one that suits the workload"
    needed: tuple[str, ...] = ("torch", "numpy")


def _add_tiny_bert_options(parser: argparse.ArgumentParser) -> None:
    words = parser.add_mutually_exclusive_group()
    words.add_argument(
        "--vocab",
        type=_input,
        metavar="FILE",
        help="WordPiece vocabulary, one token a line",
    )
    words.add_argument(
        "--tokenizer",
        metavar="NAME",
        help=f"tokenizer from the Hugging Face cache, or a folder (default: {DEFAULT_TOKENIZER})",
    )


def _add_loop_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--sync",
        choices=SYNCS,
        default="ddp",
        help="how the ranks keep their models the same (default: ddp)",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="auto: bfloat16 where the hardware has it (default: auto)",
    )
    add("--save-every", type=_count, metavar="N", help="a checkpoint every N steps, too")
    add("--keep", type=_count, default=3, metavar="N", help="checkpoints to keep (default: 3)")


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
        module="mlp",
        summary="10 numbers, 50 hidden units, 2 classes: no data needed, done in seconds",
        data_help="",
        add_options=_add_loop_options,
        defaults=(3, 32, "mlp_out"),
    ),
    "mnist": Workload(
        module="mnist",
        summary="a small convolutional network that reads handwritten digits",
        data_help="folder with the IDX files of MNIST, compressed or not",
        add_options=_add_loop_options,
        defaults=(3, 32, "mnist_out"),
    ),
    "cifar10": Workload(
        module="cifar10",
        summary="a ResNet-18 that sorts photos into ten classes",
        data_help="npz file with x_train, y_train, x_test and y_test, or its folder",
        add_options=_add_cifar10_options,
        defaults=(15, 32, "cifar10_out"),
    ),
    "tiny-bert": Workload(
        module="tiny_bert",
        summary="a two-layer BERT that sorts texts into four classes",
        data_help="csv file of class 1-4, title, description, or a folder with train.csv and "
        "test.csv (default: ag_news from the Hugging Face cache)",
        add_options=_add_tiny_bert_options,
        defaults=(3, 16, "tiny_out"),
        lr_help="grows with the rows of a step",
        needed=("torch", "transformers", "accelerate", "numpy"),
    ),
}


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        SystemExit: with code 2 after a usage error, with 0 after ``--help``, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Train one of the workloads, alone or under torchrun.",
        epilog="`python -m trainer all-reduce` trains nothing: it measures the network between the "
        "ranks.",
    )
    names = parser.add_subparsers(dest="workload", metavar="NAME", required=True)
    for name, workload in WORKLOADS.items():
        one = names.add_parser(name, help=workload.summary, description=workload.summary)
        _add_shared_options(one, workload)
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
        raise TrainerError(
            "\n".join(problems),
            hint=f"correct the path; relative ones are taken from {_describe_search_places()}",
        )


def _add_shared_options(parser: argparse.ArgumentParser, workload: Workload) -> None:
    epochs, batch_size, out = workload.defaults
    add = parser.add_argument
    if workload.data_help:
        add("--data", type=_input, metavar="PATH", help=workload.data_help)
    else:
        parser.set_defaults(data=None)
    add("--epochs", type=_count, default=epochs, metavar="N", help=f"default: {epochs}")
    add("--subset", type=_count, metavar="N", help="train on N rows only, chosen by the seed")
    add(
        "--held-out",
        type=_count,
        metavar="N",
        help="rows kept back for the final accuracy: the last N of a file (default: one in seven, "
        "at most 1000; mlp: 512), the first N of a test split (default: all)",
    )
    add(
        "--batch-size",
        type=_count,
        default=batch_size,
        metavar="N",
        help=f"rows a step, on each rank (default: {batch_size})",
    )
    add("--lr", type=_rate, metavar="RATE", help=f"default: {workload.lr_help}")
    add("--seed", type=_seed, default=42, metavar="N", help="default: 42")
    add("--out", type=_path, default=Path(out), metavar="DIR", help=f"default: {out}")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")


def _list_staged_places() -> list[Path]:
    places = [os.environ.get(name) for name in ("STAGER_PROJECT", "STAGER_ASSETS")]
    return [Path(place) for place in places if place]


def _describe_search_places() -> str:
    return ", or ".join(map(str, (Path.cwd(), *_list_staged_places())))


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


def _count(text: str) -> int:
    return _whole_number(text, least=1)


def _width(text: str) -> int:
    number = _whole_number(text, least=_WIDTH_STEP)
    if number % _WIDTH_STEP:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {_WIDTH_STEP}")
    return number


def _seed(text: str) -> int:
    number = _whole_number(text, least=0)
    if number >= 2**32:  # the largest that numpy.random.seed takes
        raise argparse.ArgumentTypeError(f"{text} is too large: seeds are below 2**32")
    return number


def _whole_number(text: str, *, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
    return number


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return rate
