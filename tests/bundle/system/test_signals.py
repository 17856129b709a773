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


ENDING = "signals.end_on_signals()\n"


def told(work: str, *numbers: str, before: str = ENDING, ready: str = "begun") -> tuple[int, str]:
    """Status and output of a program that defines ``work`` and gets signals meanwhile.

    The first is sent when it says ``ready``, the others once it has said a line more; it gets a
    line itself when all are sent.
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


TIDYING = """
def work():
    try:
        print('within', flush=True)
        time.sleep(240)
    finally:
        print('tidies', flush=True)
        sys.stdin.readline()  # until the others have come
        print('tidied', flush=True)
"""


@pytest.mark.parametrize("number", ["TERM", "INT", "HUP"])
def test_a_second_one_does_not_disturb_the_tidying_up(number: str) -> None:
    said = told(TIDYING, number, "TERM", "INT", ready="within")
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
        pytest.param(
            f"{SELF}; print('whole', flush=True)", "", "whole\nstopped\n", id="to the parent"
        ),
    ],
)
def test_a_forked_child_ends_and_does_nothing_that_is_its_parents(
    before: str, after: str, printed: str
) -> None:
    work = FORKING.format(before=before or "pass", after=after or "pass")
    assert told(work) == (0, printed)
    if printed.startswith("goes on"):  # then it ends by the signal itself
        assert told(work.replace("print('goes on', flush=True)", SELF)) == (0, "-15\n")


def test_a_hangup_that_was_ignored_stays_so() -> None:
    """As under ``nohup``."""
    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nsignals.end_on_signals()\n"
    work = "def work(): sys.stdin.readline(); print('done', flush=True)\n"
    assert told(work, "HUP", before=before) == (0, "done\n")


HELD = """
class Held:
    def __del__(self): {within}
def work():
    held = Held()
    del held
    {after}
"""
TERM = "signal.raise_signal(signal.SIGTERM)"
QUIET = """signals.ignore_signals()
    print(signal.getitimer(signal.ITIMER_REAL)[0] > 0)  # it was to be raised again
    signal.raise_signal(signal.SIGALRM)  # that moment has come
    print('quiet', flush=True)"""


@pytest.mark.parametrize(
    ("within", "after", "printed"),
    [
        pytest.param(TERM, "time.sleep(240)", "stopped\n", id="raised again"),
        pytest.param(TERM, QUIET, "True\nquiet\n", id="not once the end has come"),
        pytest.param("raise ValueError('odd')", "", "ValueError: odd\n", id="others are shown"),
    ],
)
def test_what_python_drops(within: str, after: str, printed: str) -> None:
    """A signal that arrives while a destructor runs; its exception is only printed by Python."""
    # Not in the usual moment: on a busy machine it would be over before the signals are ignored.
    later = "signals._AGAIN_SECONDS = 3600\n" if after == QUIET else ""
    code, out = told(HELD.format(within=within, after=after), before=f"{later}{ENDING}")
    assert (code, out[-len(printed) :]) == (0, printed)


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
