"""Reading labelled texts, and splitting them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.needs import needs
from trainer.config import TrainerError, parse
from trainer.data.texts import (
    SPECIAL,
    Example,
    LabelledText,
    compute_unknown_share,
    encode_rows,
    from_vocabulary,
    load,
    make_batch,
    read_csv,
    read_vocabulary,
    refuse_unknown,
)

REPO = Path(__file__).resolve().parents[3]
AG_NEWS = REPO / ".." / "shared" / "data" / "ag_news.csv"


def written(folder, text, name="rows.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def corpus(path, *arguments):
    return load(parse(["tiny-bert", "--data", str(path), *arguments]))


def numbered(folder, count, name="rows.csv"):
    text = "".join(f'"{n % 4 + 1}","title {n}","text"\n' for n in range(count))
    return written(folder, text, name)


def test_quotes_line_breaks_and_backslashes(tmp_path):
    rows = '"3","He said ""no""","first\\second\nthird,  fourth"\n"1","b","ünïcode"\n'
    assert read_csv(written(tmp_path, rows)) == [
        LabelledText(2, 'He said "no" first second third, fourth'),
        LabelledText(0, "b ünïcode"),
    ]


@pytest.mark.parametrize(
    "header", ["", "class,title,description\n", '"Class Index","Title","Description"\n', "\ufeff"]
)
def test_a_header_or_none_gives_the_same_rows(tmp_path, header):
    path = written(tmp_path, header + "1,a,b\n4,c,d\n\n")
    assert read_csv(path) == [LabelledText(0, "a b"), LabelledText(3, "c d")]


def test_wrong_rows_are_all_counted_and_the_first_named(tmp_path):
    good = "1,a,b\n"
    path = written(tmp_path, good + "0,a,b\n5,a,b\nx,a,b\n2,,\n3\n" + good + "9,a,b\n9,c,d\n")
    with pytest.raises(TrainerError) as error:
        read_csv(path)
    text = str(error.value)
    assert "7 of 9 rows cannot be used" in text
    assert "line 2: the class is '0'" in text
    assert "line 4: the class is 'x'" in text
    assert "line 5: there is no text" in text
    assert "and 2 more" in text


@pytest.mark.parametrize(
    ("content", "named"), [(b"", "has no rows"), (b"1,\xff\xfe,b\n", "cannot be read as csv")]
)
def test_a_file_that_is_no_csv(tmp_path, content, named):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(TrainerError, match=named):
        read_csv(path)


def test_the_last_rows_are_held_out_and_a_subset_of_the_others_follows_the_seed(tmp_path):
    asked = corpus(numbered(tmp_path, 20), "--held-out", "5")
    assert [row.text for row in asked[0]] == [f"title {n} text" for n in range(15)]
    assert [row.text for row in asked[1]] == [f"title {n} text" for n in range(15, 20)]
    with pytest.raises(TrainerError, match="leaves none of the 20 rows"):
        corpus(tmp_path / "rows.csv", "--held-out", "20")
    path = numbered(tmp_path, 70)
    by_default = corpus(path)
    assert (len(by_default[0]), len(by_default[1])) == (60, 10)
    first = corpus(path, "--subset", "20")
    assert (len(first[0]), first[1]) == (20, by_default[1])
    assert corpus(path, "--subset", "20") == first
    assert corpus(path, "--subset", "20", "--seed", "1") != first
    assert len(corpus(path, "--subset", "5000")[0]) == 60
    with pytest.raises(TrainerError, match="of 1 class, and"):
        corpus(written(tmp_path, "1,a,b\n" * 20))


def test_a_folder_with_one_file_with_two_and_with_unclear_ones(tmp_path):
    numbered(tmp_path, 14, "rows.csv")
    assert len(corpus(tmp_path)[0]) == 12
    numbered(tmp_path, 14, "more.csv")
    with pytest.raises(TrainerError, match=r"more\.csv, rows\.csv"):
        corpus(tmp_path)
    numbered(tmp_path, 12, "train.csv")
    numbered(tmp_path, 6, "test.csv")
    found = corpus(tmp_path)
    assert (len(found[0]), len(found[1])) == (12, 6)
    assert len(corpus(tmp_path, "--held-out", "4")[1]) == 4


def test_ag_news_is_split_as_its_reference_results_were():
    needs("data")
    every = read_csv(AG_NEWS)
    found = corpus(AG_NEWS)
    assert len(every) == 7600
    assert (found[0], found[1]) == (every[:6600], every[6600:])
    assert sorted(row.label for row in every) == sorted([0, 1, 2, 3] * 1900)
    assert "\\" not in "".join(row.text for row in every)


# --- Vocabularies, tokens, and the share of them that is unknown ---------------------------------


BERT_WORDS = REPO / ".." / "shared" / "data" / "bert_uncased_vocab.txt"


def vocabulary(folder, *words):
    path = folder / "vocab.txt"
    path.write_text("\n".join([*SPECIAL.values(), *words]) + "\n", encoding="utf-8")
    return path


def test_what_is_wrong_with_a_vocabulary_is_named_at_once(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\na\na\n", encoding="utf-8")
    with pytest.raises(TrainerError) as error:
        read_vocabulary(path)
    for part in ("[CLS]", "[SEP]", "[MASK]", "1 of its lines"):
        assert part in str(error.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TrainerError, match="cannot be read"):
        read_vocabulary(path)
    assert read_vocabulary(vocabulary(tmp_path, "a", "##b"))["##b"] == len(SPECIAL) + 1


@pytest.mark.slow
def test_words_become_pieces_and_the_ends_are_marked_also_of_a_text_that_is_cut(tmp_path):
    pytest.importorskip("transformers")
    tokenizer = from_vocabulary(vocabulary(tmp_path, "crab", "##s", "."))
    (found,) = encode_rows(tokenizer, [LabelledText(label=2, text="Crabs zebra.")], 128)
    words = tokenizer.convert_ids_to_tokens(found.tokens)
    assert words == ["[CLS]", "crab", "##s", "[UNK]", ".", "[SEP]"]
    assert found.label == 2
    assert compute_unknown_share(tokenizer, [found]) == pytest.approx(1 / 4)
    options = parse(["tiny-bert", "--vocab", "my-words.txt"])
    refuse_unknown(0.5, options)
    with pytest.raises(TrainerError, match=r"51% of the tokens are unknown to my-words\.txt"):
        refuse_unknown(0.51, options)
    (cut,) = encode_rows(tokenizer, [LabelledText(label=0, text="crab " * 50)], 10)
    assert len(cut.tokens) == 10
    assert cut.tokens[-1] == tokenizer.sep_token_id
    cased = from_vocabulary(vocabulary(tmp_path, "Crab", "crab"))
    assert cased.tokenize("Crab crab") == ["Crab", "crab"]


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
    found = make_batch([Example([5, 6, 7], 1), Example([8], 3)], padding=0)
    assert found["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert found["labels"].tolist() == [1, 3]
