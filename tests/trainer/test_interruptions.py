"""Runs that are killed, stopped or started again end as one that was left in peace."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.launching import (
    command,
    losses,
    metrics,
    notes,
    same_bits,
    start,
    train,
    variables,
    weights,
)
from tests.support.processes import command_lines, stat_fields

pytestmark = pytest.mark.slow

STEPS = 60
# Three ranks of ten rows: 20 steps an epoch. With two, a sum has but one order.
MLP = (
    "mlp", "--subset", "600", "--held-out", "100", "--epochs", "3", "--batch-size", "10",
    "--precision", "float32", "--save-every", "3", "--out", "out",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train(3, folder, *MLP)
    return folder / "out"


LONG = (*MLP, "--epochs", "20", "--batch-size", "30", "--save-every", "1000")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train(0, folder, *LONG)
    return folder / "out"


HELD = """\
import pathlib, sys, time
from trainer.__main__ import _exit_without_finalizing, main
from trainer.engine.progress import Progress
from trainer.engine.loop import StopSignal

told = []

def held(self, number, *rest):
    count(self, number, *rest)
    while number >= {last} and not told and not pathlib.Path("go").exists():
        time.sleep(0.02)

def tell(self, number, frame):
    told.append(number)
    note(self, number, frame)

count, Progress.step = Progress.step, held
note, StopSignal.note = StopSignal.note, tell
_exit_without_finalizing(main(sys.argv[1:]))
"""
"""The trainer, which waits in a step for what comes: else it may have ended before."""


def held(folder, last):
    """The program of ranks that go no further than this step before they are told to end."""
    program = folder / "held.py"
    program.write_text(HELD.format(last=last))
    return str(program)


def launched(folder, *arguments, options=(), **more):
    """Three ranks that torchrun has started, in a session of their own."""
    argv = command(3, folder, *arguments, options=options, program=held(folder, 31))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = variables(**more)
    return subprocess.Popen(argv, cwd=folder, env=env, start_new_session=True, **pipes)


def wait_for_step(folder, step, has_ended):
    """Wait until a run is so far."""
    log = folder / "out" / "metrics.jsonl"
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if log.exists() and log.read_text().count('"loss"') >= step:
            return
        assert not has_ended(), f"it ended before step {step}"
        time.sleep(0.002)
    pytest.fail(f"step {step} did not come")


def killed_at(step, folder, *arguments):
    """Train with three ranks, and kill all of them once they are so far."""
    running = start(3, folder, *arguments, program=held(folder, 51))
    try:
        wait_for_step(folder, step, running.has_ended)
    finally:
        running.signal(signal.SIGKILL)  # the first one first: it is the one that saves
        codes, output, errors = running.wait()
    assert codes[0] == -signal.SIGKILL, output + errors
    assert 0 not in codes


def rank_of(launcher, number):
    """The process of a rank that a launcher has started."""
    for pid, _ in command_lines():
        if stat_fields(pid)[1:2] == [str(launcher.pid)]:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if b"RANK=%d" % number in environ:
                return pid
    raise AssertionError(f"there is no rank {number}")


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.full), 31])
def test_killed_at_any_step_it_ends_with_the_same_weights(undisturbed, tmp_path, step):
    killed_at(step, tmp_path, *MLP)
    done = train(3, tmp_path, *MLP, "--resume")
    assert same_bits(weights(undisturbed), weights(tmp_path / "out"))
    noted = [line["step"] for line in notes(tmp_path / "out") if "loss" in line]
    assert noted == [*range(1, STEPS + 1)]
    assert losses(tmp_path / "out") == losses(undisturbed)
    assert metrics(tmp_path / "out")["steps"] == STEPS
    if step > 3:
        assert "resuming from out/checkpoint_" in done.stdout


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGUSR1]
)
def test_told_to_stop_it_saves_and_goes_on_from_there(alone, tmp_path, number):
    """One process, which gets the signal itself."""
    running = start(0, tmp_path, *LONG, program=held(tmp_path, 301))
    try:
        wait_for_step(tmp_path, 8, running.has_ended)
    finally:
        running.signal(number)
        codes, said, errors = running.wait()
    assert codes == [143], said + errors
    assert "to continue, add --resume to the same command" in said
    stopped = int(said.partition("stopped after step ")[2].partition(":")[0])
    done = train(0, tmp_path, *LONG, "--resume")
    assert f"after {stopped} steps (0 steps to do again)" in done.stdout
    assert losses(tmp_path / "out") == losses(alone)
    assert same_bits(weights(alone), weights(tmp_path / "out"))


@pytest.mark.full
def test_torchrun_that_is_told_to_stop_lets_all_ranks_save(undisturbed, tmp_path):
    process = launched(tmp_path, *MLP)
    wait_for_step(tmp_path, 8, lambda: process.poll() is not None)
    process.terminate()
    said, _ = process.communicate(timeout=300)
    assert "to continue, add --resume to the same command" in said
    train(3, tmp_path, *MLP, "--resume")
    assert same_bits(weights(undisturbed), weights(tmp_path / "out"))


@pytest.mark.full
def test_a_rank_that_is_killed_is_started_again_with_all_others(undisturbed, tmp_path):
    """Torchrun starts the group anew, which goes on by itself."""
    # As `stager run` sets it: else the new ranks read the addresses of those that have ended.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = launched(tmp_path, *MLP, options=["--max-restarts", "2"], **apart)
    wait_for_step(tmp_path, 10, lambda: process.poll() is not None)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    (tmp_path / "go").touch()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "resuming from out/checkpoint_" in said
    assert same_bits(weights(undisturbed), weights(tmp_path / "out"))


@pytest.mark.full
def test_fewer_ranks_go_on_where_more_were_killed(tmp_path):
    killed_at(10, tmp_path, *MLP)
    train(2, tmp_path, *MLP, "--resume")
    found = metrics(tmp_path / "out")
    assert (found["world_size"], found["epochs"]) == (2, 3)
    assert found["steps"] > STEPS  # each is of two ranks' rows now
    assert found["accuracy"] > 0.9
