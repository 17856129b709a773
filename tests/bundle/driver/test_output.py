"""The driver's standard output, whatever its reader does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bundle.driver import output
from bundle.driver.output import HELD_BYTES, Display
from bundle.protocol.events import RankOutput

REPO = str(Path(__file__).resolve().parents[3])
LINES = 64
"""Lines of one piece of output."""
WIDTH = 1000


class Pipe:
    """A display with a pipe, and its reader."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.writing = writing
        self.display = Display("4711", writing)

    def print(self, pieces: int, first: int = 0) -> int:
        """Print numbered lines, and an event after each piece; return the number of the next."""
        for piece in range(first, first + pieces):
            numbers = range(piece * LINES, (piece + 1) * LINES)
            data = b"".join(b"%*d\n" % (WIDTH - 1, number) for number in numbers)
            self.display.output("launch", RankOutput("n1", 3, data), head=True)
            self.display.event(json.dumps({"event": "note", "text": str(piece)}))
        return first + pieces

    def read_to(self, text: str) -> list[dict[str, Any]]:
        """Read events up to the one with this text."""
        with os.fdopen(self.reading, "rb") as stream:
            events = []
            for line in stream:
                events.append(json.loads(line))
                if events[-1].get("text") == text:
                    return events
        raise AssertionError(text)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.writing)


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [int(line) for event in events for line in event.get("lines", ())]


def test_a_descriptor_that_does_not_wait_loses_nothing(pipe: Pipe) -> None:
    """Another program that has the same terminal open may have set it so."""
    os.set_blocking(pipe.writing, False)
    pieces = 4  # several times what a pipe takes
    pipe.print(pieces)
    pipe.display.event(json.dumps({"event": "note", "text": "end"}))
    assert not pipe.display.drain(0.3)
    assert numbers(pipe.read_to("end")) == list(range(pieces * LINES))


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_a_reader_that_keeps_up_or_is_late_once_misses_nothing(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """It is waited for, a while."""
    monkeypatch.setattr(output, "_PATIENCE_SECONDS", 120.0)
    pipe.display = Display("4711", pipe.writing)
    pieces = HELD_BYTES // (LINES * WIDTH) * (2 if late else 1)
    read: list[dict[str, Any]] = []
    reader = threading.Timer(late, lambda: read.extend(pipe.read_to("end")))
    reader.start()
    pipe.print(pieces)
    pipe.display.event(json.dumps({"event": "note", "text": "end"}))
    reader.join()
    assert pipe.display.drain(60)
    assert numbers(read) == list(range(pieces * LINES))
    assert not any(event.get("skipped") for event in read)
    first = {"v": 1, "job_id": "4711", "phase": "launch", "event": "output"}
    assert first.items() <= read[0].items()
    assert (read[0]["node"], read[0]["rank"], read[0]["head"]) == ("n1", 3, True)


def test_a_reader_that_has_stopped_holds_nobody_up_and_learns_what_it_missed(pipe: Pipe) -> None:
    pieces = pipe.print(3 * HELD_BYTES // (LINES * WIDTH))  # without the thread, this never returns
    assert not pipe.display.drain(0.1)
    pipe.display.event(json.dumps({"event": "note", "text": "end"}))
    read = pipe.read_to("end")
    shown = numbers(read)
    assert shown == sorted(set(shown))
    assert shown[-1] == pieces * LINES - 1
    skipped = [event["skipped"] for event in read if event.get("skipped")]
    assert len(skipped) == 1
    assert sum(skipped) == pieces * LINES - len(shown)
    assert len(shown) * WIDTH < HELD_BYTES + (1 << 20)
    kept = [event["text"] for event in read if event["event"] == "note"]
    assert kept == [*map(str, range(pieces)), "end"]
    done = -1  # the order of output and other events stays
    for event in read[:-1]:
        if event["event"] == "note":
            done = int(event["text"])
        else:
            assert int(event["lines"][0]) // LINES == done + 1
    assert pipe.display.drain(60)


def test_many_small_pieces_take_no_more_memory(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 20
    monkeypatch.setattr(output, "HELD_BYTES", most)
    count = most // 100
    tracemalloc.start()
    for rank in range(count):
        pipe.display.output("launch", RankOutput("n1", rank, b"a line\n"), head=True)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1.5 * most
    pipe.display.event(json.dumps({"event": "note", "text": "end"}))
    read = pipe.read_to("end")
    assert sum(event.get("skipped", 0) for event in read) == count - len(read) + 1 > 0


def state_program(work: str) -> str:
    """A program that prints the events of a job."""
    return (
        f"import sys; sys.path.insert(0, {REPO!r})\n"
        "import os, time\n"
        "from dataclasses import replace\n"
        "from bundle.driver.logs import Logs\n"
        "from bundle.driver.state import State\n"
        "from bundle.system import signals\n"
        "from tests.support.jobs import PLAIN\n"
        "signals.end_on_signals()\n"
        "job = replace(PLAIN, log_dir=sys.argv[1])\n"
        "state = State(job, Logs(job))\n"
        f"try:\n    state.note('begun')\n    {work}\n"
        "except signals.Stopped:\n"
        "    signals.ignore_signals()\n"
        "    state.note('ended')\n"
        "    state.display.drain(60)\n"
    )


def test_a_signal_while_the_driver_prints_leaves_all_lines_whole(tmp_path: Path) -> None:
    """The reader is slow, so that the signal mostly comes in the middle of printing.

    The loop has two lines: CPython 3.11 lets no ``except`` see a signal that comes at the end of a
    loop of one line with which a ``try`` begins.
    """
    code = state_program("while True:\n        state.note('x' * 5000)")
    for round_ in range(0, 12, 2):
        folder = tmp_path / str(round_)
        argv = [sys.executable, "-c", code, str(folder)]
        running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert running.stdout is not None
        assert b"begun" in running.stdout.readline()
        for _ in range(round_):
            running.stdout.readline()
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=300)
        assert (running.returncode, err) == (0, b"")
        texts = [json.loads(line)["text"] for line in out.splitlines()[1:]]
        assert texts[-1] == "ended"
        kept = (folder / "events.4711.jsonl").read_bytes().splitlines()
        assert json.loads(kept[-1])["text"] == "ended"
        assert all(json.loads(line)["event"] == "note" for line in kept)


def test_a_reader_that_has_gone_ends_the_job(tmp_path: Path) -> None:
    """Though the driver waits for its agents, a moment at a time, and prints nothing more.

    A signal that comes just before a wait begins is seen at its end.
    """
    gone = tmp_path / "gone"
    waiting = "[time.sleep(0.1) for _ in range(6000)]"
    until_gone = f"while not os.path.exists({str(gone)!r}): time.sleep(0.01)"
    code = state_program(f"{until_gone}\n    state.note('more'); {waiting}")
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert b"begun" in running.stdout.readline()
        running.stdout.close()
        gone.touch()
        assert running.stderr is not None
        assert running.stderr.read() == b""
        assert running.wait(timeout=300) == 0
    kept = (tmp_path / "events.4711.jsonl").read_text()
    assert json.loads(kept.splitlines()[-1])["text"] == "ended"
