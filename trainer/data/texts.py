"""Labelled texts: rows from files, token numbers, padded batches."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..config import DEFAULT_TOKENIZER, Options, TrainerError, explain_errors, format_count
from .rows import choose_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A csv row is ``class,title,description`` as in AG News (Zhang et al. 2015): any further columns
# are text, and a backslash stands for a line break within a text.
CLASSES = 4
# The data set moved on the hub; the cache knows one of its names, and offline no redirect.
HUB_NAMES = ("ag_news", "fancyzhx/ag_news")
_SHOWN = 5


class LabelledText(NamedTuple):
    """One labelled text."""

    label: int
    text: str  # title and description, in one line


Texts = list[LabelledText]


def load(options: Options) -> tuple[Texts, Texts]:
    """Return the rows to train on and to hold out."""
    source = options.data or HUB_NAMES[0]
    rows, others = _read(options.data)
    number = None if others is None else len(others)
    chosen, held_out = choose_rows(options, len(rows), number, "row", source)
    train = [rows[number] for number in chosen]
    classes = {row.label for row in train}
    if len(classes) < 2 or not held_out:
        kinds = format_count(len(classes), "class", "classes")
        raise TrainerError(
            f"{source}: {format_count(len(train), 'row')} to train on, of {kinds}, and "
            f"{len(held_out)} held out: there is nothing to learn",
            hint="give rows of at least two classes to train on, and one row to hold out",
        )
    return train, [(rows if others is None else others)[number] for number in held_out]


def _read(data: Path | None) -> tuple[Texts, Texts | None]:
    if data is None:
        return read_hub()
    if not data.is_dir():
        return read_csv(data), None
    files = {path.name: path for path in sorted(data.glob("*.csv"))}
    train, test = files.get("train.csv"), files.get("test.csv")
    if train is not None and test is not None:
        return read_csv(train), read_csv(test)
    if len(files) == 1:
        return read_csv(*files.values()), None
    raise TrainerError(
        f"--data {data}: which file is meant? It has {', '.join(files) or 'no csv file'}",
        hint="name one file, or a folder with train.csv and test.csv",
    )


def read_csv(path: Path) -> Texts:
    """Return the rows of a csv file, with or without a header line."""
    rows, problems = [], []
    with explain_errors(
        f"{path} cannot be read as csv",
        "it must be a text file in UTF-8 with the columns class, title, description",
        (OSError, UnicodeDecodeError, csv.Error),
    ):
        for line, cells in _read_cells(path):
            row = _parse_row(cells)
            if isinstance(row, LabelledText):
                rows.append(row)
            else:
                problems.append(f"line {line}: {row}")
    if problems:
        count, every = len(problems), format_count(len(rows) + len(problems), "row")
        more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
        raise TrainerError(
            "\n  ".join([f"{path}: {count} of {every} cannot be used:", *problems[:_SHOWN], *more]),
            hint=f"each row is a class from 1 to {CLASSES}, then one or more columns of text",
        )
    if not rows:
        raise TrainerError(f"{path} has no rows", hint="check that the file arrived complete")
    return rows


def read_hub() -> tuple[Texts, Texts]:
    """Return the training and test rows of ``ag_news``, from the cache if offline."""
    with explain_errors(
        "without --data, ag_news is read by the package datasets, which is missing",
        "name a csv file with --data, or add datasets to the environment",
        ModuleNotFoundError,
    ):
        import datasets
    reasons = ["ag_news is not in the Hugging Face cache:"]
    for name in HUB_NAMES:
        try:
            dataset = datasets.load_dataset(name)
        except (OSError, ValueError) as error:  # includes ConnectionError and FileNotFoundError
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        train, test = (_read_split(dataset[split]) for split in ("train", "test"))
        return train, test
    raise TrainerError(
        "\n  ".join(reasons),
        hint='name a csv file with --data; or list datasets = ["ag_news"] under [assets] in '
        "stager.toml and build again; or fetch it once where there is a network, with "
        "HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0 before this command",
    )


def _read_split(split: Any) -> Texts:  # noqa: ANN401 - a type of a package that may be missing
    pairs = zip(split["label"], split["text"], strict=True)
    return [LabelledText(label, _clean(text)) for label, text in pairs]


def _read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        for index, cells in enumerate(reader):
            is_header = index == 0 and len(cells) > 1 and re.search("[^\\W\\d_]", cells[0])
            if cells and not is_header:
                yield reader.line_num, cells


def _parse_row(cells: Sequence[str]) -> LabelledText | str:
    label = cells[0].strip()
    if label not in {str(number) for number in range(1, CLASSES + 1)}:
        return f"the class is {label[:20]!r}"
    text = _clean(" ".join(cells[1:]))
    if not text:
        return "there is no text"
    return LabelledText(label=int(label) - 1, text=text)


def _clean(text: str) -> str:
    return " ".join(text.replace("\\", " ").split())


# --- Texts to token numbers, and token numbers to padded batches ---------------------------------

SPECIAL = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
MOST_UNKNOWN = 0.5


class Example(NamedTuple):
    """One text as the model reads it."""

    tokens: list[int]  # with the special ones at both ends
    label: int


def load_tokenizer(options: Options) -> PreTrainedTokenizerBase:
    """Return the tokenizer that ``options`` asks for."""
    if options.vocab is not None:
        return from_vocabulary(options.vocab)
    from transformers import AutoTokenizer

    name = options.tokenizer or DEFAULT_TOKENIZER
    with explain_errors(
        f"the tokenizer {name} is neither a folder nor in the Hugging Face cache",
        f'name a vocabulary file with --vocab; or list models = ["{name}"] under [assets] '
        "in stager.toml and build again; or fetch it once where there is a network, with "
        "HF_HUB_OFFLINE=0 TRANSFORMERS_OFFLINE=0 before this command",
        (OSError, ValueError, KeyError, ImportError),
    ):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        raise TrainerError(
            f"the tokenizer {name} has no padding token, so it cannot make batches",
            hint="use the tokenizer of a BERT-like model",
        )
    return tokenizer


def from_vocabulary(path: Path) -> PreTrainedTokenizerBase:
    """Return a BERT tokenizer over a WordPiece vocabulary: one token a line, its line its number.

    ``BertTokenizerFast``, whose parts these are, silently ignores such files in transformers 5.
    """
    vocabulary = read_vocabulary(path)
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # An "uncased" model's vocabulary has lower-case words only; [NAMES] in brackets are no words.
    uncased = all(word == word.lower() for word in vocabulary if not word.startswith("["))
    wordpiece = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL["unk_token"]))
    wordpiece.normalizer = normalizers.BertNormalizer(lowercase=uncased)
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordpiece.decoder = decoders.WordPiece()
    ends = [(SPECIAL[name], vocabulary[SPECIAL[name]]) for name in ("sep_token", "cls_token")]
    wordpiece.post_processor = processors.BertProcessing(*ends)
    return PreTrainedTokenizerFast(tokenizer_object=wordpiece, **SPECIAL)


def read_vocabulary(path: Path) -> dict[str, int]:
    """Return the number of each token of a vocabulary file."""
    with explain_errors(
        f"--vocab {path} cannot be read",
        "it must be a text file in UTF-8 with one token a line",
        (OSError, UnicodeDecodeError),
    ):
        tokens = path.read_text(encoding="utf-8").splitlines()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    problems = [f"it lacks {token}" for token in SPECIAL.values() if token not in vocabulary]
    if len(vocabulary) < len(tokens):
        problems.append(f"{len(tokens) - len(vocabulary)} of its lines repeat an earlier one")
    if problems:
        raise TrainerError(
            f"--vocab {path} is not a WordPiece vocabulary: {', '.join(problems)}",
            hint="use the vocab.txt of a BERT model: one token a line, special tokens included",
        )
    return vocabulary


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[LabelledText], most_tokens: int
) -> list[Example]:
    """Return the rows as token numbers, each cut to ``most_tokens``."""
    encoded = tokenizer([row.text for row in rows], truncation=True, max_length=most_tokens)
    pairs = zip(encoded["input_ids"], rows, strict=True)
    return [Example(tokens, row.label) for tokens, row in pairs]


def compute_unknown_share(tokenizer: PreTrainedTokenizerBase, examples: Iterable[Example]) -> float:
    """Return the share of tokens that the vocabulary lacks, special ones aside (0 to 1)."""
    ignored = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    tokens = [one for example in examples for one in example.tokens if one not in ignored]
    return tokens.count(tokenizer.unk_token_id) / len(tokens) if tokens else 1.0


def refuse_unknown(share: float, options: Options) -> None:
    """Stop before training on texts of which the model would see next to nothing."""
    words = options.vocab or options.tokenizer or DEFAULT_TOKENIZER
    if share > MOST_UNKNOWN:
        raise TrainerError(
            f"{share:.0%} of the tokens are unknown to {words}: the model would learn nothing",
            hint="name the vocabulary that fits the texts (their language, their letter case) with "
            "--vocab or --tokenizer",
        )


def make_batch(examples: Sequence[Example], padding: int) -> dict[str, Tensor]:
    """Return the examples as tensors, padded to the longest of them; padding is masked."""
    rows = [torch.tensor(example.tokens) for example in examples]
    tokens = pad_sequence(rows, batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = torch.tensor([example.label for example in examples])
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
