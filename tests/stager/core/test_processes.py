"""The process runner: what it returns, what it raises, and that it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys

import pytest

from bundle.system.processes import MARK
from stager.core.errors import StagerError
from stager.core.processes import (
    TAIL_LINES,
    CommandError,
    feed_command,
    follow_command,
    run,
    run_with_input,
)
from tests.support.processes import until


def python(code):
    return [sys.executable, "-c", code]


def test_variables_are_added_to_this_process_own_and_the_directory_counts(monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_HERE", "kept")
    code = "import os; print(os.environ['FROM_HERE'], os.environ['ADDED'], os.getcwd())"
    done = run(python(code), timeout=300, env={"ADDED": "more"}, cwd=tmp_path)
    assert done.stdout == f"kept more {tmp_path.resolve()}\n"


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_a_failure_carries_command_status_and_the_end_of_what_it_said(stream, caplog):
    caplog.set_level(logging.DEBUG)
    code = f"import sys; [print('line', i, file=sys.{stream}) for i in range(40)]; sys.exit(7)"
    with pytest.raises(CommandError) as caught:
        run([*python(code), "--token", "hunter2"], timeout=300)
    error = caught.value
    assert error.completed.returncode == 7
    assert error.message.startswith(f"exit status 7: {sys.executable} ")
    assert error.message.endswith("--token '***'")
    assert "--token" in caplog.text
    assert "hunter2" not in caplog.text
    assert error.context == tuple(f"line {i}" for i in range(40 - TAIL_LINES, 40))


def test_a_command_is_fed_and_gets_these_variables_only():
    code = "import os, sys; print(sys.stdin.read().upper(), sorted(os.environ))"
    done = run_with_input(
        python(code), "a script\n", environment={"A": "1", "LC_CTYPE": "C"}, timeout=300
    )
    assert done.stdout == f"A SCRIPT\n {sorted(['A', 'LC_CTYPE', MARK])}\n"
    with pytest.raises(CommandError, match="exit status 3"):
        run_with_input(python("raise SystemExit(3)"), "x" * 10**6, environment={}, timeout=300)


SPEAKS = """\
import sys
for number in range(3):
    print("line", number, flush=True)
    print("talk", number, file=sys.stderr, flush=True)
sys.stdout.write("no end")
raise SystemExit(5)
"""


def test_lines_and_talk_are_passed_on():
    lines: list[str] = []
    talk: list[str] = []
    ended = follow_command(python(SPEAKS), lines.append, on_talk=talk.append)
    assert (ended.returncode, ended.interrupted) == (5, False)
    assert lines == ["line 0", "line 1", "line 2", "no end"]
    assert talk == ["talk 0", "talk 1", "talk 2"]


WAITS = """\
import os, signal, sys
def end(number, frame):
    signal.signal(number, signal.SIG_IGN)
    os.write(1, b"told\\n")
    sys.exit(4)
signal.signal(signal.{0}, end)
print(os.getpid(), os.getpgrp(), flush=True)
signal.pause()
"""


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def interrupt(request):
    """Yield a signal that ends the commands of this program as Ctrl-C does."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield request.param
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("own", [False, True])
def test_interrupts_are_passed_on_and_no_line_is_lost(own, interrupt):
    lines: list[str] = []
    told: list[int] = []

    def on_line(line):
        for _ in range(2):  # it comes before the line is where it belongs
            signal.raise_signal(interrupt)
        lines.append(line)

    def end_it(pid):
        told.append(pid)
        os.kill(pid, signal.SIGUSR1)

    code = WAITS.format("SIGUSR1" if own else "SIGINT")
    ended = follow_command(python(code), on_line, end_it=end_it if own else None)
    assert (ended.returncode, ended.interrupted) == (4, True)
    assert lines[1:] == ["told"]
    pid, group = map(int, lines[0].split())
    # Out of the terminal's reach only where something else is going to end it.
    # There the second one is passed on, too: the terminal reaches all others by itself.
    assert (told[:2], group) == ([pid, pid], pid) if own else ([], os.getpgrp())
    count = len(told)
    signal.raise_signal(interrupt)  # while the command that streamed it tells what has happened
    assert len(told) == count


def test_an_error_of_the_listener_ends_the_command():
    def on_line(line):
        raise ValueError(line)

    code = "import time\nwhile True: print('line', flush=True); time.sleep(0.01)"
    with pytest.raises(ValueError, match="line"):
        follow_command(python(code), on_line)


def test_an_informed_command_reads_the_text_and_writes_to_standard_error(capfd):
    code = "import sys; print(sys.stdin.read()); print('talk', file=sys.stderr)"
    feed_command(["true"], "x" * (1 << 22), timeout=300)  # it need not read
    feed_command(python(code), "told", timeout=300)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert sorted(captured.err.split()) == ["talk", "told"]


def test_what_an_informed_command_leaves_behind_keeps_nobody_waiting(tmp_path):
    made, go = tmp_path / "made", tmp_path / "go"
    waiting = f"(until [ -e {go} ]; do sleep 0.1; done; touch {made}) </dev/null & true"
    feed_command(["sh", "-c", waiting], "", timeout=600)
    assert not made.exists()
    go.touch()
    assert until(made.exists)


@pytest.mark.parametrize(
    ("argv", "timeout", "said"),
    [
        (["sh", "-c", "exit 7"], 300, "exit status 7: sh -c 'exit 7'"),
        (["sleep", "600"], 0.2, r"more than 0\.2 s: sleep 600"),
        (["/nowhere/it"], 300, "cannot start /nowhere/it"),
    ],
)
def test_an_informed_command_that_fails_or_takes_too_long(argv, timeout, said):
    with pytest.raises(StagerError, match=said) as caught:
        feed_command(argv, "x" * (1 << 22), timeout=timeout)
    assert getattr(caught.value, "timed_out", False) == (timeout < 1)
