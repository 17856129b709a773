"""The command line of the trainer, and that reading it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config import Options, TrainerError, check_paths, parse

REPO = Path(__file__).resolve().parents[2]


def test_defaults_and_every_option():
    defaults = Options(
        workload="tiny-bert",
        data=None,
        epochs=3,
        subset=None,
        held_out=None,
        batch_size=16,
        lr=None,
        seed=42,
        out=Path("tiny_out"),
        resume=False,
    )
    assert parse(["tiny-bert"]) == defaults
    line = (
        "tiny-bert --data d.csv --epochs 2 --subset 10 --held-out 5 --batch-size 4 --lr 3e-4 "
        "--seed 7 --out o --resume --vocab v.txt"
    )
    paths = {"data": Path("d.csv"), "out": Path("o"), "vocab": Path("v.txt")}
    numbers = {"epochs": 2, "subset": 10, "held_out": 5, "batch_size": 4, "lr": 3e-4, "seed": 7}
    assert parse(line.split()) == replace(defaults, **paths, **numbers, resume=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--epochs", "0"],
        ["--subset", "1.5"],
        ["--lr", "nan"],
        ["--lr", "fast"],
        ["--seed", "4294967296"],
        ["--data", ""],
        ["--vocab", "v.txt", "--tokenizer", "t"],
    ],
)
def test_values_that_make_no_sense_name_their_option(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["tiny-bert", *arguments])
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_all_wrong_paths_are_named_at_once(tmp_path):
    (tmp_path / "file").touch()
    options = parse(
        ["tiny-bert", "--data", "/no/data.csv", "--vocab", "/no/vocab", "--out", f"{tmp_path}/file"]
    )
    with pytest.raises(TrainerError) as error:
        check_paths(options)
    assert "/no/data.csv" in str(error.value)
    assert "/no/vocab" in str(error.value)
    assert f"{tmp_path}/file" in str(error.value)


def test_what_is_not_here_is_taken_from_what_was_staged(tmp_path, monkeypatch):
    """A node that does not see the job's directory starts ranks in an empty one."""
    for place, names in (
        ("work", ["here"]),
        ("project", ["here", "data/a.csv"]),
        ("assets", ["data/a.csv", "vocab.txt"]),
    ):
        for name in names:
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / name).touch()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("STAGER_PROJECT", str(tmp_path / "project"))
    monkeypatch.setenv("STAGER_ASSETS", str(tmp_path / "assets"))
    options = parse(["tiny-bert", "--data", "data/a.csv", "--vocab", "vocab.txt", "--out", "out"])
    assert options.data == tmp_path / "project" / "data" / "a.csv"
    assert options.vocab == tmp_path / "assets" / "vocab.txt"
    assert options.out == Path("out")
    check_paths(options)
    assert parse(["tiny-bert", "--data", "here"]).data == Path("here")
    with pytest.raises(TrainerError) as error:
        check_paths(parse(["tiny-bert", "--data", "absent.csv"]))
    assert "--data absent.csv: there is no such file" in str(error.value)
    looked_in = ", or ".join(str(tmp_path / place) for place in ("work", "project", "assets"))
    assert f"taken from {looked_in}" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-brt"], "no workload 'tiny-brt' (there are: mlp, mnist, cifar10, tiny-bert); did"),
        (["mlp", "--epohcs", "3"], "unrecognized arguments: --epohcs 3; did you mean --epochs?"),
        (["mlp", "--data", "x"], "unrecognized arguments: --data x"),
        (["mlp", "--out", "~nobody-of-that-name/x"], "is not a path: "),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["tiny-bert", "--help"]])
def test_help_is_complete_and_imports_no_torch(arguments):
    code = (
        "import sys\n"
        "from trainer.__main__ import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys()\n"
        "    sys.exit(f'imported {heavy}' if heavy else stop.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tiny-bert" in done.stdout
    if arguments == ["tiny-bert", "--help"]:
        for option in ("--data", "--subset", "--resume", "--vocab", "--tokenizer"):
            assert option in done.stdout


def test_an_environment_without_pytorch_is_told_so(tmp_path):
    # -S leaves out site-packages, as in an interpreter that has nothing installed.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "trainer", "tiny-bert"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "has no torch, transformers, accelerate, numpy" in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
