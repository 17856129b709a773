"""Fetching what a command writes: not for ever, and not against a signal."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import pytest

from bundle.driver.transports.step_transport import read_until_signal
from bundle.protocol.problem import ProblemCode
from bundle.results.receive import Received, receive_outputs
from bundle.results.stream import send_outputs
from tests.support.processes import until

WRITER = "import sys, time; sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.stdout.flush(); "


@pytest.fixture
def cut(tmp_path: Path) -> bytes:
    """The results of a node up to the middle of its second file."""
    for name in ("first", "second"):
        (tmp_path / "node" / "out").mkdir(parents=True, exist_ok=True)
        (tmp_path / "node" / "out" / name).write_bytes(bytes(100_000))
    stream = io.BytesIO()
    send_outputs(str(tmp_path / "node"), ["out"], stream)
    (tmp_path / "run").mkdir()
    return stream.getvalue()[:150_000]


@pytest.fixture
def hanging(cut: bytes) -> Iterator[IO[bytes]]:
    """The output of a program that has stopped writing, and does not end."""
    argv = [sys.executable, "-c", WRITER + "time.sleep(600)"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        stdin, stdout = cast("IO[bytes]", program.stdin), cast("IO[bytes]", program.stdout)
        fcntl.fcntl(stdout, 1031, 2 * len(cut))  # F_SETPIPE_SZ, which Python 3.9 has no name for
        stdin.write(cut)
        stdin.close()
        assert until(lambda: waiting(stdout) == len(cut))
        yield stdout
        program.kill()


def waiting(pipe: IO[bytes]) -> int:
    """Return the number of bytes that can be read from a pipe."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(count)


def assert_kept(received: Received, tmp_path: Path, why: str) -> None:
    assert not received.complete
    assert received.files == 1
    assert [path.name for path in (tmp_path / "run" / "out.partial").iterdir()] == ["first"]
    [problem] = received.problems
    assert problem.code is ProblemCode.RESULTS_INCOMPLETE
    assert why in problem.why


def test_where_nothing_comes_the_files_that_came_are_kept(
    hanging: IO[bytes], tmp_path: Path
) -> None:
    with read_until_signal(hanging, 2.0) as output:
        received = receive_outputs(
            io.BufferedReader(output, 1 << 20), str(tmp_path / "run"), ("out",)
        )
        assert output.given_up
    assert_kept(received, tmp_path, "nothing has come for 2 s")


def test_a_signal_ends_it_and_not_the_program(hanging: IO[bytes], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        until(lambda: any((tmp_path / "run").rglob("first")))
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    with read_until_signal(hanging) as output:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        received = receive_outputs(
            io.BufferedReader(output, 1 << 20), str(tmp_path / "run"), ("out",)
        )
        interrupting.join()  # a signal behind the block would end this process
        assert output.given_up
    assert_kept(received, tmp_path, "it cannot be read: stager was told to end")
    assert signal.getsignal(signal.SIGINT) == before


def test_what_ends_is_read_to_its_end() -> None:
    argv = [sys.executable, "-c", WRITER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        cast("IO[bytes]", program.stdin).write(b"all of it")
        cast("IO[bytes]", program.stdin).close()
        with read_until_signal(cast("IO[bytes]", program.stdout)) as output:
            assert io.BufferedReader(output, 1 << 20).read() == b"all of it"
            assert not output.given_up
