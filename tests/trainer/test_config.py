"""The command line of the trainer, and that reading it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import Options, TrainerError, check_paths, parse

REPO = Path(__file__).resolve().parents[2]


def trainer(*arguments, cwd=REPO):
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_defaults():
    options = parse(["tiny-bert"])
    assert options == Options(
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


def test_every_option_arrives():
    line = (
        "tiny-bert --data d.csv --epochs 2 --subset 10 --held-out 5 --batch-size 4 --lr 3e-4 "
        "--seed 7 --out o --resume --vocab v.txt"
    )
    assert parse(line.split()) == Options(
        workload="tiny-bert",
        data=Path("d.csv"),
        epochs=2,
        subset=10,
        held_out=5,
        batch_size=4,
        lr=3e-4,
        seed=7,
        out=Path("o"),
        resume=True,
        vocab=Path("v.txt"),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--epochs", "0"],
        ["--epochs", "1.5"],
        ["--subset", "-1"],
        ["--lr", "nan"],
        ["--lr", "0"],
        ["--lr", "fast"],
        ["--seed", "4294967296"],
        ["--data", ""],
    ],
)
def test_values_that_make_no_sense_name_their_option(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["tiny-bert", *arguments])
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_vocabulary_and_a_tokenizer_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        parse(["tiny-bert", "--vocab", "v.txt", "--tokenizer", "t"])
    assert "not allowed with" in capsys.readouterr().err


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


def test_an_unknown_workload_is_answered_with_the_nearest():
    done = trainer("tiny-brt")
    assert done.returncode == 2
    assert "did you mean 'tiny-bert'?" in done.stderr
    assert "Traceback" not in done.stderr


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
