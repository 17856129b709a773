"""The command line of the trainer, and that reading it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config import TrainerError, check_paths, parse

REPO = Path(__file__).resolve().parents[2]


def test_every_option():
    line = (
        "tiny-bert --data d.csv --epochs 2 --subset 10 --held-out 5 --batch-size 4 --lr 3e-4 "
        "--seed 7 --out o --resume --vocab v.txt"
    )
    paths = {"data": Path("d.csv"), "out": Path("o"), "vocab": Path("v.txt")}
    numbers = {"epochs": 2, "subset": 10, "held_out": 5, "batch_size": 4, "lr": 3e-4, "seed": 7}
    defaults = parse(["tiny-bert"])
    assert (defaults.epochs, defaults.batch_size, defaults.out) == (3, 16, Path("tiny_out"))
    assert parse(line.split()) == replace(defaults, **paths, **numbers, resume=True)


def test_all_wrong_paths_are_named_at_once(tmp_path):
    (tmp_path / "file").touch()
    wrong = {"--data": "/no/data.csv", "--vocab": "/no/vocab", "--out": f"{tmp_path}/file"}
    with pytest.raises(TrainerError) as error:
        check_paths(parse(["tiny-bert", *(word for pair in wrong.items() for word in pair)]))
    assert all(path in str(error.value) for path in wrong.values())


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
    ("line", "message"),
    [
        ("tiny-bert --epochs 0", "--epochs"),
        ("tiny-bert --lr nan", "--lr"),
        ("tiny-bert --seed 4294967296", "--seed"),
        ("tiny-bert --data=", "--data"),
        ("tiny-bert --vocab v.txt --tokenizer t", "--vocab"),
        ("tiny-brt", "no workload 'tiny-brt' (there are: mlp, mnist, cifar10, tiny-bert); did"),
        ("mlp --epohcs 3", "unrecognized arguments: --epohcs 3; did you mean --epochs?"),
        ("mlp --data x", "unrecognized arguments: --data x"),
        ("mlp --out ~nobody-of-that-name/x", "is not a path: "),
    ],
)
def test_a_wrong_line_is_answered_with_its_word_and_the_nearest(line, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(line.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_is_complete_and_imports_no_torch():
    code = (
        "import sys\n"
        "from trainer.__main__ import main\n"
        "for line in (['--help'], ['tiny-bert', '--help']):\n"
        "    try:\n"
        "        main(line)\n"
        "    except SystemExit as stop:\n"
        "        assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(' '.join(heavy) or 0)\n"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("cifar10", "--data", "--subset", "--resume", "--vocab", "--tokenizer"):
        assert word in done.stdout


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
