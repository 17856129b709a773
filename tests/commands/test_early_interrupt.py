"""Ctrl-C before the program has begun: while Python starts, and while it imports."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stager
from tests.support.processes import run

STAGER = str(Path(sys.executable).with_name("stager"))
OURS = f'File "{Path(stager.__file__).parent}/'
"""How a frame of ours shows in a traceback."""


def interrupted(seconds: float) -> tuple[int, str]:
    """The exit code of a command, and what it said, that gets SIGINT so long after its start."""
    # Before Python has a handler, and where it would not be there at all, the signal's default
    # counts: a test that is started in the background would hand on that it is ignored.
    running = subprocess.Popen(
        [STAGER, "run", "--help"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        restore_signals=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=300)
    return running.returncode, said


@pytest.mark.full
def test_no_traceback_of_ours_whenever_it_comes() -> None:
    """What Python itself says while it starts nobody can help: no line of ours has run by then."""
    begun = time.monotonic()
    subprocess.run([STAGER, "run", "--help"], capture_output=True, check=True)
    whole = time.monotonic() - begun
    for count in range(30):
        code, said = interrupted(whole * count / 30)
        assert OURS not in said, said
        if "Traceback" not in said and "no Python frame" not in said:
            assert code in (0, 130, -signal.SIGINT), (code, said)


IN_A_CLASS = """
import signal, sys
from importlib.abc import MetaPathFinder

class Now:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "stager.report.page":
            class Node:
                field = Now()

sys.meta_path.insert(0, Finder())
import pytest

from stager.cli import main
sys.exit(main(["report"]))
"""
"""A command imports what it needs; Ctrl-C comes while a class of it is made, a dataclass mostly."""


def test_ctrl_c_while_a_command_imports(tmp_path: Path) -> None:
    """Python before 3.12 makes another exception of it there."""
    done = run([sys.executable, "-c", IN_A_CLASS], cwd=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 130


WHILE_IT_READS_ITS_ARGUMENTS = """
import argparse, signal, sys
from bundle import __main__ as program

def interrupt(*_, **more):
    signal.raise_signal(signal.SIGINT)

argparse.ArgumentParser.add_subparsers = interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(program.main(["drive", "job.json"]))
"""


def test_ctrl_c_while_the_node_program_reads_its_arguments() -> None:
    argv = [sys.executable, "-c", WHILE_IT_READS_ITS_ARGUMENTS]
    done = run(argv, cwd=Path(stager.__file__).parents[1])
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


IN_A_DESTRUCTOR = """
import signal, sys, time
from stager.cli import application as program

class Held:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def command(**_):
    held = Held()
    del held
    time.sleep(200)

program.app = command
sys.exit(program.main([]))
"""


def test_one_that_python_drops_comes_again() -> None:
    done = run([sys.executable, "-c", IN_A_DESTRUCTOR], seconds=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
