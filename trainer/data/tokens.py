"""Texts to token numbers, and token numbers to padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import DEFAULT_TOKENIZER, Options, TrainerError
from .texts import LabelledText

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
MOST_UNKNOWN = 0.5


@dataclass(frozen=True, kw_only=True)
class Example:
    """One text as the model reads it."""

    tokens: list[int]
    """The token numbers, with the special ones at both ends."""
    label: int
    """The class, from 0."""


def load_tokenizer(options: Options) -> PreTrainedTokenizerBase:
    """Return the tokenizer that ``options`` asks for.

    Raises:
        TrainerError: the vocabulary is unusable, or the tokenizer is not on this machine.
    """
    if options.vocab is not None:
        return from_vocabulary(options.vocab)
    from transformers import AutoTokenizer

    name = options.tokenizer or DEFAULT_TOKENIZER
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TrainerError(
            f"the tokenizer {name} is neither a folder nor in the Hugging Face cache: "
            f"{str(error).strip().splitlines()[0]}",
            hint=f'name a vocabulary file with --vocab; or list models = ["{name}"] under [assets] '
            "in stager.toml and build again; or fetch it once where there is a network, with "
            "HF_HUB_OFFLINE=0 TRANSFORMERS_OFFLINE=0 before this command",
        ) from error
    if tokenizer.pad_token_id is None:
        raise TrainerError(
            f"the tokenizer {name} has no padding token, so it cannot make batches",
            hint="use the tokenizer of a BERT-like model",
        )
    return tokenizer


def from_vocabulary(path: Path) -> PreTrainedTokenizerBase:
    """Return a BERT tokenizer over a WordPiece vocabulary: one token a line, its line its number.

    It is put together from the parts that ``BertTokenizerFast`` has, because that class reads a
    file given as ``vocab_file=`` in transformers 4 and silently ignores it in transformers 5,
    after which every word is unknown.

    Raises:
        TrainerError: the file is no such vocabulary.
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
    """Return the number of each token of a vocabulary file.

    Raises:
        TrainerError: it cannot be read, repeats a token or lacks a special one.
    """
    try:
        tokens = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(
            f"--vocab {path} cannot be read: {error}",
            hint="it must be a text file in UTF-8 with one token a line",
        ) from error
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


def encode(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[LabelledText], most_tokens: int
) -> list[Example]:
    """Return the rows as token numbers, each cut to ``most_tokens``."""
    encoded = tokenizer([row.text for row in rows], truncation=True, max_length=most_tokens)
    return [
        Example(tokens=tokens, label=row.label)
        for tokens, row in zip(encoded["input_ids"], rows, strict=True)
    ]


def unknown_share(tokenizer: PreTrainedTokenizerBase, examples: Iterable[Example]) -> float:
    """Return the share of tokens that the vocabulary lacks, special ones aside (0 to 1)."""
    unknown = tokenizer.unk_token_id
    ignored = set(tokenizer.all_special_ids) - {unknown}
    total = 0
    misses = 0
    for example in examples:
        tokens = [token for token in example.tokens if token not in ignored]
        total += len(tokens)
        misses += tokens.count(unknown)
    return misses / total if total else 1.0


def refuse_unknown(share: float, options: Options) -> None:
    """Stop before training on texts of which the model would see next to nothing.

    Such a run goes through without an error and never learns: its loss stays at that of a guess.

    Raises:
        TrainerError: more than half of the tokens are unknown.
    """
    if share <= MOST_UNKNOWN:
        return
    words = options.vocab or options.tokenizer or DEFAULT_TOKENIZER
    raise TrainerError(
        f"{share:.0%} of the tokens are unknown to {words}: the model would learn nothing",
        hint="name the vocabulary that fits the texts (their language, their letter case) with "
        "--vocab or --tokenizer",
    )


def batch(examples: Sequence[Example], padding: int) -> dict[str, Tensor]:
    """Return the examples as tensors, padded to the longest of them; padding is masked."""
    import torch

    longest = max(len(example.tokens) for example in examples)
    tokens = torch.full((len(examples), longest), padding)
    mask = torch.zeros((len(examples), longest), dtype=torch.long)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        mask[row, : len(example.tokens)] = 1
    labels = torch.tensor([example.label for example in examples])
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
