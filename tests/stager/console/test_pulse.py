"""A phase that prints nothing shows that it goes on."""

from __future__ import annotations

import queue
import re
import threading
import time

import pytest

from stager.console import output
from stager.console.output import Output, Pulse


class Listener:
    """Has not been told anything for a minute, whatever the clock says."""

    progress = ", 1 of 2 nodes"
    last_line_time = property(lambda self: time.monotonic() - 60)

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue()

    def show_pulse(self, line: str) -> None:
        self.lines.put(line)


def test_seconds_are_told_while_nothing_else_is() -> None:
    listener, before = Listener(), threading.active_count()
    sign = Pulse(listener)
    assert re.fullmatch(r"  \d+ s, 1 of 2 nodes", listener.lines.get(timeout=60))
    sign.stop()
    assert not threading.active_count() - before, "a phase that is over shows nothing"


def test_ranks_are_waited_for_until_the_first_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "RANKS_SECONDS", 0.1)
    monkeypatch.setattr(output, "SILENT_SECONDS", 0.1)
    before, talk, said = threading.active_count(), Output(), ""
    talk.begin("launch")
    while "no output yet" not in said:
        time.sleep(0.1)
        said += capsys.readouterr().err
    assert re.match(r"Running\n  \d s, no output yet \(does the script set MASTER_ADDR or", said)
    talk.data_lines(["step 1"])
    assert threading.active_count() == before
