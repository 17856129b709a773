"""Being told to end: real processes that get real signals at the worst moments."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

REPO = str(Path(__file__).resolve().parents[3])
BEGIN = (
    f"import sys; sys.path.insert(0, {REPO!r})\n"
    "import os, signal, time\n"
    "from bundle.system import signals\n"
)
END = (
    "try:\n"
    "    print('begun', flush=True)\n"
    "    work()\n"
    "except signals.Stopped:\n"
    "    print('stopped', flush=True)\n"
)


def told(
    work: str, *numbers: str, before: str = "signals.end_on_signals()\n", ready: str = "begun"
) -> tuple[int, str]:
    """Status and output of a program that works and gets signals meanwhile.

    Args:
        work: defines the function ``work``.
        numbers: the signals; the first is sent when the program is ready, the others once it has
            said a line more. It gets a line itself when all are sent.
        before: what it does first.
        ready: the line that it says when it is ready.
    """
    code = f"{BEGIN}{before}{work}{END}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert running.stdin is not None
    assert running.stdout is not None
    said = [running.stdout.readline()]
    while said[-1] != f"{ready}\n":
        assert said[-1], said
        said.append(running.stdout.readline())
    out = ""
    for place, number in enumerate(numbers):
        if place == 1:
            out += running.stdout.readline()
        running.send_signal(signal.Signals[f"SIG{number}"])
    with suppress(BrokenPipeError), running.stdin:  # it need not read it
        running.stdin.write("all are sent\n")
    # Not communicate(): what came together with the first line is in the stream's buffer.
    with running.stdout:
        out += running.stdout.read()
    return running.wait(timeout=300), out


WORK = "def work(): time.sleep(240)\n"


def test_each_of_them_ends_it() -> None:
    for number in ("TERM", "INT", "HUP"):
        assert told(WORK, number) == (0, "stopped\n")


def test_a_second_one_does_not_disturb_the_tidying_up() -> None:
    work = WORK + (
        "import contextlib\n"
        "@contextlib.contextmanager\n"
        "def tidy():\n"
        "    try:\n"
        "        print('within', flush=True)\n"
        "        yield\n"
        "    finally:\n"
        "        print('tidies', flush=True)\n"
        "        sys.stdin.readline()  # until the others have come\n"
        "        print('tidied', flush=True)\n"
        "plain = work\n"
        "def work():\n"
        "    with tidy(): plain()\n"
    )
    said = told(work, "TERM", "TERM", "INT", ready="within")
    assert said == (0, "tidies\ntidied\nstopped\n")


FORKING = """
def work():
    with signals.defer_signals():
        {before}
        child = os.fork()
        if not child:
            try:
                {after}
                signals.restore_default_signals()
                print('goes on', flush=True)
            finally:
                os._exit(3)
    ended = os.waitpid(child, 0)[1]
    print(os.WEXITSTATUS(ended) or -os.WTERMSIG(ended), flush=True)
"""
SELF = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    ("before", "after", "printed"),
    [
        pytest.param("", "", "goes on\n3\n", id="no signal"),
        pytest.param("", SELF, "3\n", id="to the child, before it is ready for it"),
        pytest.param(SELF, "", "stopped\n", id="to the parent, before the fork"),
    ],
)
def test_a_forked_child_ends_and_does_nothing_that_is_its_parents(
    before: str, after: str, printed: str
) -> None:
    work = FORKING.format(before=before or "pass", after=after or "pass")
    assert told(work) == (0, printed)


def test_a_forked_child_ends_by_the_signal_itself() -> None:
    work = FORKING.format(before="pass", after="pass").replace("print('goes on', flush=True)", SELF)
    assert told(work) == (0, "-15\n")


def test_a_hangup_that_was_ignored_stays_so() -> None:
    """As under ``nohup``."""
    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nsignals.end_on_signals()\n"
    work = "def work(): sys.stdin.readline(); print('done', flush=True)\n"
    assert told(work, "HUP", before=before) == (0, "done\n")


def test_what_python_drops_is_raised_again() -> None:
    """A signal that arrives while a destructor runs; its exception is only printed by Python."""
    work = (
        "class Held:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGTERM)\n"
        "def work():\n"
        "    held = Held()\n"
        "    del held\n"
        "    time.sleep(240)\n"
    )
    assert told(work) == (0, "stopped\n")


def test_it_is_not_raised_again_once_the_end_has_come() -> None:
    work = (
        "class Held:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGTERM)\n"
        "def work():\n"
        "    held = Held()\n"
        "    del held\n"
        "    signals.ignore_signals()\n"
        "    print(signal.getitimer(signal.ITIMER_REAL)[0] > 0)  # it was to be raised again\n"
        "    signal.raise_signal(signal.SIGALRM)  # that moment has come\n"
        "    print('quiet', flush=True)\n"
    )
    # Not in the usual moment: on a busy machine it would be over before the signals are ignored.
    before = "signals._AGAIN_SECONDS = 3600\nsignals.end_on_signals()\n"
    assert told(work, before=before) == (0, "True\nquiet\n")


def test_other_exceptions_that_are_dropped_are_shown() -> None:
    work = "class Held:\n    def __del__(self): raise ValueError('odd')\ndef work(): Held()\n"
    code, out = told(work)
    assert code == 0
    assert "ValueError: odd" in out


def test_a_block_that_puts_signals_off_is_not_left_half_way() -> None:
    work = (
        "def work():\n"
        "    with signals.defer_signals():\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        print('whole', flush=True)\n"
        "    print('too late', flush=True)\n"
    )
    assert told(work) == (0, "whole\nstopped\n")


def test_a_block_of_another_thread_puts_nothing_off() -> None:
    """A signal that comes meanwhile ends the main thread, at once, and is not lost."""
    work = (
        "import threading\n"
        "inside, over = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with signals.defer_signals():\n"
        "        inside.set()\n"
        "        over.wait()\n"
        "def work():\n"
        "    thread = threading.Thread(target=hold)\n"
        "    thread.start()\n"
        "    inside.wait()\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        time.sleep(0.1)\n"
        "        print('put off', flush=True)\n"
        "    finally:\n"
        "        over.set()\n"
        "        thread.join()\n"
    )
    assert told(work) == (0, "stopped\n")
