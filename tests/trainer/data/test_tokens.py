"""Vocabularies, tokens, and the share of them that is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.needs import needs
from trainer.config import TrainerError, parse
from trainer.data.texts import (
    SPECIAL,
    Example,
    LabelledText,
    encode_rows,
    from_vocabulary,
    make_batch,
    read_vocabulary,
    refuse_unknown,
    unknown_share,
)

REPO = Path(__file__).resolve().parents[3]
BERT_WORDS = REPO / ".." / "shared" / "data" / "bert_uncased_vocab.txt"
TINY = parse(["tiny-bert", "--vocab", "my-words.txt"])


def vocabulary(folder, *words):
    path = folder / "vocab.txt"
    path.write_text("\n".join([*SPECIAL.values(), *words]) + "\n", encoding="utf-8")
    return path


def test_a_tokens_line_is_its_number(tmp_path):
    assert read_vocabulary(vocabulary(tmp_path, "a", "##b"))["##b"] == len(SPECIAL) + 1


def test_what_is_wrong_with_a_vocabulary_is_named_at_once(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\na\na\n", encoding="utf-8")
    with pytest.raises(TrainerError) as error:
        read_vocabulary(path)
    for part in ("[CLS]", "[SEP]", "[MASK]", "1 of its lines"):
        assert part in str(error.value)


def test_a_vocabulary_that_is_no_text(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TrainerError, match="cannot be read"):
        read_vocabulary(path)


def test_more_than_half_unknown_is_refused_and_half_is_not():
    refuse_unknown(0.5, TINY)
    with pytest.raises(TrainerError, match=r"51% of the tokens are unknown to my-words\.txt"):
        refuse_unknown(0.51, TINY)


@pytest.mark.slow
def test_words_become_pieces_and_the_ends_are_marked(tmp_path):
    pytest.importorskip("transformers")
    tokenizer = from_vocabulary(vocabulary(tmp_path, "crab", "##s", "."))
    (found,) = encode_rows(tokenizer, [LabelledText(label=2, text="Crabs zebra.")], 128)
    words = tokenizer.convert_ids_to_tokens(found.tokens)
    assert words == ["[CLS]", "crab", "##s", "[UNK]", ".", "[SEP]"]
    assert found.label == 2
    assert unknown_share(tokenizer, [found]) == pytest.approx(1 / 4)


@pytest.mark.slow
def test_a_cased_vocabulary_keeps_letter_case(tmp_path):
    pytest.importorskip("transformers")
    tokenizer = from_vocabulary(vocabulary(tmp_path, "Crab", "crab"))
    assert tokenizer.tokenize("Crab crab") == ["Crab", "crab"]


@pytest.mark.slow
def test_texts_are_cut_to_the_most_tokens(tmp_path):
    pytest.importorskip("transformers")
    tokenizer = from_vocabulary(vocabulary(tmp_path, "crab"))
    (found,) = encode_rows(tokenizer, [LabelledText(label=0, text="crab " * 50)], 10)
    assert len(found.tokens) == 10
    assert found.tokens[-1] == tokenizer.sep_token_id


@pytest.mark.slow
def test_berts_own_vocabulary_gives_berts_own_tokens():
    transformers = pytest.importorskip("transformers")
    needs("data")
    ours = from_vocabulary(BERT_WORDS)
    # The parameter changed its name in transformers 5, which ignores the old one.
    fifth = int(transformers.__version__.split(".")[0]) >= 5
    given = {"vocab" if fifth else "vocab_file": str(BERT_WORDS)}
    theirs = transformers.BertTokenizerFast(**given)
    text = "Fears for T N pension after talks: unaffable José's $10m prize, déjà-vu!"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.tokenize("unaffable José") == ["una", "##ffa", "##ble", "jose"]
    assert ours("talks")["input_ids"] == [101, 7566, 102]


@pytest.mark.slow
def test_a_batch_is_padded_to_its_longest_and_masked():
    pytest.importorskip("torch")
    found = make_batch(
        [Example(tokens=[5, 6, 7], label=1), Example(tokens=[8], label=3)], padding=0
    )
    assert found["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert found["labels"].tolist() == [1, 3]
