"""Jobs that are ended from outside: by Ctrl-C, by a batch system, by a lost terminal, by force."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import until
from tests.support.torch_project import TorchProject

pytestmark = [pytest.mark.slow, pytest.mark.network]

WAIT = """\
import os, pathlib, signal, sys, time
def save(*_):
    while not pathlib.Path("may-end").exists():
        time.sleep(0.05)
    sys.exit("saved")
if os.environ["RANK"] in sys.argv:  # such a rank has to save something first
    signal.signal(signal.SIGTERM, save)
pathlib.Path("begun" + os.environ["RANK"]).touch()
time.sleep(600)
"""
GONE_AFTER = 300
"""Seconds within which all processes of a job must have ended, whatever happened."""


def begin(torch_project: TorchProject, folder: Path, *slow: str) -> subprocess.Popen[str]:
    """Start a job of two nodes, with one rank each, and wait until the ranks are at work."""
    (folder / "wait.py").write_text(WAIT)
    options = ["--allocation", "local", "--nodes", "2", "--nproc-per-node", "1"]
    options += ["--bundle", torch_project.bundle]
    argv = ["run", "--json", "--log-dir", folder / "logs", *options, "--", "wait.py", *slow]
    started = torch_project.start(*argv, cwd=folder)
    begun = [folder / "begun0", folder / "begun1"]
    if not until(lambda: all(path.exists() for path in begun)):
        started.terminate()
        pytest.fail(f"the ranks did not begin: {started.communicate(timeout=GONE_AFTER)}")
    return started


@pytest.mark.parametrize("how", ["ctrl-c", pytest.param("sigterm", marks=pytest.mark.full)])
def test_an_ending_that_can_be_answered(
    torch_project: TorchProject, tmp_path: Path, how: str
) -> None:
    """All ranks are ended first, then the job says so; impatience does not get in the way."""
    if how == "sigterm":
        started = begin(torch_project, tmp_path)
        started.terminate()
    else:
        started = begin(torch_project, tmp_path, "1")
        os.killpg(started.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(1)
        os.killpg(started.pid, signal.SIGINT)
        (tmp_path / "may-end").touch()
    out, err = started.communicate(timeout=GONE_AFTER)
    assert started.returncode == 130
    assert torch_project.left_over() == []
    report = json.loads(out)
    assert (report["ok"], report["first_failure"]) == (False, None)
    assert err.splitlines()[-1].startswith("interrupted; nothing is left running; logs: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGHUP, 130)]
)
def test_killed_or_with_its_terminal_gone(
    torch_project: TorchProject, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """What it has started ends, though it may not be there any more to see to that."""
    started = begin(torch_project, tmp_path)
    if number == signal.SIGHUP:
        os.killpg(started.pid, number)
    else:
        started.kill()
    _, err = started.communicate(timeout=GONE_AFTER)
    assert started.returncode == code
    assert until(lambda: not torch_project.left_over(), GONE_AFTER), torch_project.left_over()
    assert "Traceback" not in err
    (events,) = (tmp_path / "logs").glob("events.*.jsonl")
    last = json.loads(events.read_text().splitlines()[-1])
    assert (last["event"], last["interrupted"]) == ("result", True)


def test_the_reader_of_the_output_goes_away(torch_project: TorchProject, tmp_path: Path) -> None:
    """As in ``stager run ... | head -1``."""
    (tmp_path / "talk.py").write_text("while True: print('line', flush=True)\n")
    options = ["--allocation", "local", "--nodes", "1", "--nproc-per-node", "1"]
    options += ["--bundle", torch_project.bundle]
    argv = ["run", "--log-dir", tmp_path / "logs", *options, "--", "talk.py"]
    started = torch_project.start(*argv, cwd=tmp_path)
    assert started.stdout is not None
    assert started.stdout.readline() == "line\n"
    started.stdout.close()
    _, err = started.communicate(timeout=GONE_AFTER)
    assert started.returncode == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert torch_project.left_over() == []
