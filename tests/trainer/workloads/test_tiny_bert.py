"""Real training with real ranks: Gloo and the Hugging Face libraries."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tests.support.launching import REPO, metrics, train, variables, warm_ranks
from tests.support.warm_ranks import as_torchrun_does
from trainer.config import parse
from trainer.data import texts
from trainer.network.dist import World
from trainer.workloads.tiny_bert import choose_learning_rate, evaluate

EXAMPLE = REPO / "examples" / "tiny-bert"
CORPUS = ("--data", str(EXAMPLE / "data" / "sentences.csv"))
WORDS = ("--vocab", str(EXAMPLE / "data" / "vocab.txt"))


def test_the_learning_rate_grows_with_the_step_and_stops_where_it_would_diverge():
    rates = [choose_learning_rate(rows) for rows in (16, 32, 64, 96, 4096)]
    assert rates == pytest.approx([1e-3, 1e-3 * math.sqrt(2), 2e-3, 2e-3, 2e-3])


@pytest.mark.full
def test_two_ranks_learn_the_example(tmp_path):
    import transformers

    done = train(2, tmp_path, "tiny-bert", *CORPUS, *WORDS, "--epochs", "8")
    out, lines = tmp_path / "tiny_out", done.stdout.splitlines()
    found = metrics(out)
    assert found["accuracy"] > 0.75
    assert found["loss"] < 0.9
    assert found["samples_per_second"] == pytest.approx(2058 * 8 / found["train_seconds"], rel=1e-3)
    assert (found["world_size"], found["epochs"]) == (2, 8)
    assert (found["train_rows"], found["held_out_rows"]) == (2058, 342)
    assert lines[-1].startswith(f"held-out accuracy {found['accuracy']:.3f} loss ")
    assert lines[-1].endswith(" on 342 rows")

    # Each rank names itself, and one saves.
    for line in ("[RANK 0] WORLD_SIZE=2", "[RANK 1] WORLD_SIZE=2", "Saving model to tiny_out"):
        assert lines.count(line) == 1
    assert len([folder for folder in out.iterdir() if folder.name.startswith("checkpoint")]) == 2
    steps = [line.split() for line in lines if line.startswith("step ")]
    assert [step[1] for step in steps] == [f"{n}/520" for n in range(10, 521, 10)]
    # transformers 5 multiplies the loss by the number of ranks unless it is told not to.
    assert float(steps[0][5]) == pytest.approx(math.log(4), rel=0.1)

    # What was saved gives the accuracy that was reported.
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    rows = texts.load(parse(["tiny-bert", *CORPUS]))[1]
    held_out = texts.encode_rows(tokenizer, rows, 128)
    accuracy, loss = evaluate(model, held_out, World(), tokenizer.pad_token_id)
    assert accuracy == found["accuracy"]
    assert loss == pytest.approx(found["loss"], abs=1e-4)


@pytest.mark.full
@pytest.mark.slow
def test_resume_goes_on_where_the_first_run_stopped(tmp_path):
    small = (*CORPUS, *WORDS, "--subset", "200", "--resume")
    first = train(2, tmp_path, "tiny-bert", *small, "--epochs", "1")
    assert "resuming" not in first.stdout
    (tmp_path / "tiny_out" / "metrics.json").unlink()  # as if it had been stopped there

    again = train(2, tmp_path, "tiny-bert", *small, "--epochs", "2")
    assert "resuming from tiny_out/checkpoint-7, after epoch 1" in again.stdout
    assert "step 10/14 " in again.stdout
    assert "step 7/" not in again.stdout
    found = metrics(tmp_path / "tiny_out")
    assert found["samples_per_second"] == pytest.approx(200 / found["train_seconds"], rel=1e-3)


@pytest.mark.full
@pytest.mark.slow
def test_an_unfit_vocabulary_stops_every_rank_and_one_speaks(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    words = tmp_path / "vocab.txt"
    words.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nand\n", encoding="utf-8")
    # Without torchrun, which would end the second rank before it can end by itself.
    ranks = as_torchrun_does(2, variables())
    arguments = ["tiny-bert", *CORPUS, "--vocab", str(words)]
    codes, output, errors = warm_ranks(hugging_face=True).start(ranks, tmp_path, arguments).wait()
    assert codes == [1, 1]
    assert errors.count(f"of the tokens are unknown to {words}") == 1
    assert "hint: " in errors
    assert "Traceback" not in output + errors
    assert not (tmp_path / "tiny_out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data", "none.csv"], "--data none.csv: there is no such file"),
        ([*WORDS], "ag_news is not in the Hugging Face cache"),
        ([*CORPUS], "google/bert_uncased_L-2_H-128_A-2 is neither a folder nor in the"),
    ],
)
def test_what_is_missing_is_named_in_one_message(tmp_path, arguments, named):
    done = train(0, tmp_path, "tiny-bert", *arguments, code=1)
    assert named in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_generator_makes_these_very_bytes(tmp_path):
    subprocess.run([sys.executable, str(EXAMPLE / "generate.py"), str(tmp_path)], check=True)
    for name in ("sentences.csv", "vocab.txt"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / "data" / name).read_bytes()
