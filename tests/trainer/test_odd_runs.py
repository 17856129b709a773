"""Runs that cannot come to anything, or go on from odd things: one message, and no traceback."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import pytest

from tests.support.launching import metrics, notes, train, variables, warm_ranks, weights
from tests.support.pictures import mnist
from tests.support.warm_ranks import as_torchrun_does

torch = pytest.importorskip("torch")

SMALL = ("mlp", "--subset", "320", "--held-out", "64", "--precision", "float32", "--out", "out")
DIGITS = ("mnist", "--data", "data", "--out", "out")
OTHERWISE = """\
import os, sys
if os.environ["RANK"] == "1":
    {change}
from trainer.__main__ import _exit_without_finalizing, main
_exit_without_finalizing(main(sys.argv[1:]))
"""


def said(done):
    """What a failed run said; never a traceback of the trainer's own."""
    text = done.stdout + done.stderr
    assert 'trainer/__main__.py", line' not in text
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "arguments", "told"),
    [
        ('sys.argv += ["--held-out", "10"]', SMALL, "not what rank 0 has: --held-out 10 (rank 0:"),
        ('os.chdir("elsewhere")', DIGITS, "--data data has no IDX files of MNIST"),
    ],
    ids=["option", "data"],
)
def test_ranks_that_were_not_given_the_same(tmp_path, change, arguments, told):
    """They would train to a wrong result, or wait for each other for ever."""
    program = tmp_path / "otherwise.py"
    program.write_text(OTHERWISE.format(change=change))
    for folder in ("data", "elsewhere/data"):
        (tmp_path / folder).mkdir(parents=True)
    mnist(tmp_path / "data", "t10k", 50)
    ranks = [replace(one, program=str(program)) for one in as_torchrun_does(2, variables())]
    running = warm_ranks().start(ranks, tmp_path, [*arguments, "--epochs", "1"])
    codes, output, errors = running.wait()
    assert 0 not in codes
    assert f"error: on rank 1 of 2: {told}" in output + errors
    assert "Traceback" not in output + errors
    assert not (tmp_path / "out" / "model.pt").exists()


def test_a_loss_that_is_no_number_any_more_ends_the_run(tmp_path):
    done = train(0, tmp_path, *SMALL, "--epochs", "1", "--lr", "1e30", code=1)
    assert "the loss of step " in said(done)
    assert "lower --lr" in said(done)
    assert not (tmp_path / "out" / "metrics.json").exists()


@pytest.mark.parametrize("ready", [False, True])
def test_curves_that_cannot_be_written_are_done_without(tmp_path, ready):
    pytest.importorskip("tensorboard")
    (tmp_path / "out").mkdir()
    if ready:  # it is a folder in which there is no place for a file
        (tmp_path / "out" / "tensorboard").symlink_to("/proc/self")
    else:
        (tmp_path / "out" / "tensorboard").touch()
    done = train(0, tmp_path, *SMALL, "--epochs", "1")
    assert said(done).count("TensorBoard") == 1
    assert metrics(tmp_path / "out")["epochs"] == 1


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A folder with a run of one epoch that did not finish, but for its last word."""
    folder = tmp_path_factory.mktemp("unfinished")
    train(0, folder, *SMALL, "--epochs", "1")
    (folder / "out" / "metrics.json").unlink()
    return folder


@pytest.fixture
def trained(unfinished, tmp_path):
    """A copy of it, for a test to harm."""
    shutil.copytree(unfinished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def altered(folder, **changed):
    """Put something else into the checkpoint, under a note that is right."""
    path = folder / "out" / "checkpoint_epoch_1.pt"
    state = torch.load(path, weights_only=True)
    state = {key: value for key, value in {**state, **changed}.items() if value is not None}
    torch.save(state, path)
    note = path.with_suffix(".json")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    note.write_text(json.dumps({**json.loads(note.read_text()), "sha256": digest}))


@pytest.mark.parametrize(
    "changed",
    [
        {"model": [1, 2]},
        {"optimizer": None},
        {"optimizer": {"state": {}, "param_groups": []}},
        {"row": 10**9},
    ],
)
def test_a_checkpoint_of_something_else(trained, changed):
    altered(trained, **changed)
    done = train(0, trained, *SMALL, "--epochs", "2", "--resume", code=1)
    assert "checkpoint_epoch_1.pt cannot be resumed from: " in said(done)


@pytest.mark.parametrize("note", ["[" * 100_000, '{"step": Infinity, "sha256": "x"}', ""])
def test_a_note_that_cannot_be_read_is_no_reason_to_begin_anew(trained, note):
    """Where there is none, the checkpoint was being written when the run was killed."""
    file = trained / "out" / "checkpoint_epoch_1.json"
    if not note:
        file.unlink()
        done = train(0, trained, *SMALL, "--epochs", "1", "--resume")
        assert "out has no checkpoint: starting from the beginning" in said(done)
        return
    file.write_text(note)
    done = train(0, trained, *SMALL, "--epochs", "2", "--resume", code=1)
    assert "no checkpoint in out can be used" in said(done)
    done = train(0, trained, *SMALL, "--epochs", "2", code=1)
    assert "did not finish, the newest checkpoint_epoch_1.pt" in said(done)


def test_bytes_that_are_no_text_are_passed_over(trained):
    with (trained / "out" / "metrics.jsonl").open("ab") as log:
        log.write(b'\xff\n{"step": Infinity}\n')
    (trained / "out" / ".job").write_bytes(b"\xff")
    train(0, trained, *SMALL, "--epochs", "2", "--resume", more={"SLURM_JOB_ID": "5"})
    assert [line["step"] for line in notes(trained / "out") if "loss" in line] == [*range(1, 21)]


@pytest.mark.full
def test_work_that_was_done_before_a_restart_is_not_done_again(tmp_path):
    job = {"SLURM_JOB_ID": "5"}
    train(0, tmp_path, *SMALL, "--epochs", "1", more=job)
    before = weights(tmp_path / "out")
    done = train(0, tmp_path, *SMALL, "--epochs", "1", more={**job, "SLURM_RESTART_COUNT": "1"})
    assert "resuming from out/checkpoint_epoch_1.pt" in said(done)
    assert all(torch.equal(before[name], one) for name, one in weights(tmp_path / "out").items())
    # A second run in the same allocation is another one, and says what becomes of the first.
    done = train(0, tmp_path, *SMALL, "--epochs", "1", more=job)
    assert "out has a finished run: it is replaced" in said(done)
    # As if it had been killed before its end: its own job goes on, and no other.
    (tmp_path / "out" / "metrics.json").unlink()
    refused = train(0, tmp_path, *SMALL, "--epochs", "1", more={"SLURM_JOB_ID": "42"}, code=1)
    assert "has checkpoints of a run that did not finish" in said(refused)
    resumed = train(0, tmp_path, *SMALL, "--epochs", "1", more=job)
    assert "resuming from out/checkpoint_epoch_1.pt" in said(resumed)


@pytest.mark.parametrize("changed", [{"MASTER_PORT": "abc"}, {"GLOO_SOCKET_IFNAME": "nix0"}])
def test_a_rank_that_cannot_join(tmp_path, changed):
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29873"}
    done = train(0, tmp_path, *SMALL, code=1, more=job | changed)
    assert "rank 0 of 1 did not join the others at 127.0.0.1:" in said(done)


def test_a_partial_file_does_not_stay_on_a_full_disk(tmp_path, monkeypatch):
    from trainer.engine import checkpoints

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write_whole(out / "model.pt", b"x" * 100)
    assert list(out.iterdir()) == []


def test_ctrl_c_before_the_first_step_is_no_traceback(monkeypatch, capsys):
    from trainer import __main__ as program

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_choose_work", lambda _: (interrupted, ()))
    assert program.main(["mlp"]) == 130
    assert "interrupted; nothing was saved since the last checkpoint" in capsys.readouterr().out
