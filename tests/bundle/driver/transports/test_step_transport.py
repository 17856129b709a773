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
from typing import IO, NoReturn, cast

import pytest

from bundle.driver.transports import phase_run, relay_source, slurm_text
from bundle.driver.transports.phase_run import PhaseAnswers, PhaseRun
from bundle.driver.transports.slurm import ControllerWait
from bundle.driver.transports.step_transport import (
    NOT_READY,
    STEP_ENDED,
    SendCommand,
    StepTransport,
    read_until_signal,
    send_file,
)
from bundle.driver.transports.transport import Step, StepErrors, Transfer
from bundle.protocol.messages import UnpackRequest
from bundle.protocol.problem import ProblemCode
from bundle.results.receive import receive_outputs
from bundle.results.stream import send_outputs
from bundle.system import signals
from tests.support.jobs import PLAIN
from tests.support.processes import until
from tests.support.relay_step import MUTE, WELL, relay_run

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


def assert_kept(
    folder: Path,
    hanging: IO[bytes],
    why: str,
    seconds: float | None,
    meanwhile: threading.Thread | None = None,
) -> None:
    """Check that the file that came whole is kept."""
    with read_until_signal(hanging, *([seconds] if seconds else [])) as output:
        if meanwhile:
            meanwhile.start()
        stream = io.BufferedReader(output, 1 << 20)
        received = receive_outputs(stream, str(folder / "run"), ("out",))
        if meanwhile:
            meanwhile.join()  # a signal behind the block would end this process
        assert output.given_up
    assert (received.complete, received.files) == (False, 1)
    assert [path.name for path in (folder / "run" / "out.partial").iterdir()] == ["first"]
    [problem] = received.problems
    assert problem.code is ProblemCode.RESULTS_INCOMPLETE
    assert why in problem.why


def test_where_nothing_comes_the_files_that_came_are_kept(
    hanging: IO[bytes], tmp_path: Path
) -> None:
    assert_kept(tmp_path, hanging, "nothing has come for 2 s", 2.0)


def test_a_signal_ends_it_and_not_the_program(hanging: IO[bytes], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        # The second begins once the first is whole.
        until(lambda: any((tmp_path / "run").rglob("second")))
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    interrupting = threading.Thread(target=interrupt)
    why = "it cannot be read: stager was told to end"
    assert_kept(tmp_path, hanging, why, None, interrupting)
    assert signal.getsignal(signal.SIGINT) == before


def test_an_agent_that_says_nothing_is_lost_and_nothing_is_sent(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are asked again without it; until now they waited for an hour."""
    monkeypatch.setattr(phase_run, "NEXT_SECONDS", 2.0)
    wait = ControllerWait(lambda remark: None)
    with relay_run({"node01": WELL, "node02": MUTE, "node03": WELL}) as run:
        failed, _ = send_file(
            transfer, run, wait.may_retry, lambda *_: SendCommand(["false"], dict), os.environ
        )
        lost = {node: ended.problem for node, ended in run.liveness.lost.items()}
    assert failed == {"": NOT_READY}
    assert lost == {"node02": ProblemCode.NO_ANSWER_SILENT}


def test_a_sending_that_the_end_of_the_step_cuts_is_none(transfer: Transfer) -> None:
    with relay_run({"node01": WELL}) as run:

        def make_command(*_: object) -> SendCommand:
            run.step._process.kill()
            return SendCommand(["sleep", "600"], dict)

        wait = ControllerWait(lambda remark: None)
        sent = send_file(transfer, run, wait.may_retry, make_command, os.environ)
    assert sent == ({"": STEP_ENDED}, None)


class OneStep(StepTransport):
    """A transport whose step is a program that only waits for the end of its input."""

    variables = rank_variables = os.environ
    patience = 0
    errors: StepErrors = slurm_text
    not_started = ProblemCode.SRUN_NOT_STARTED

    def _make_argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.stdin.read()"]

    def _make_send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        return SendCommand(["true"], dict)


def test_a_node_that_is_lost_while_a_file_is_sent_is_named_at_the_end(
    transfer: Transfer, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(transfer: Transfer, run: PhaseRun, ports: range | None) -> NoReturn:
        run.liveness.give_up_silent("n1", 70.0)
        raise signals.Stopped

    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setattr(relay_source, "send", end)
    transport = OneStep(PLAIN)
    requests = {
        node: UnpackRequest(PLAIN, node, rank, 1, "/r", "") for rank, node in enumerate(PLAIN.nodes)
    }
    with pytest.raises(signals.Stopped):
        transport.deliver(transfer, requests, lambda event: None)
    assert transport.lost_node == "n1"


def test_agents_that_are_still_to_start_in_containers_have_more_time() -> None:
    """A large image may be fetched first, and not on all nodes at the same speed."""
    with relay_run({"node01": MUTE}) as run:
        slow = PhaseRun(run.step, run.answers, run.liveness, in_container=True)
        assert run.patience() == phase_run.NEXT_SECONDS
        assert slow.patience() == phase_run.FIRST_SECONDS
        run.step.heartbeats.note("node01")  # they have answered another phase
        begun = PhaseRun(run.step, run.answers, run.liveness, in_container=True)
        assert begun.patience() == phase_run.NEXT_SECONDS
