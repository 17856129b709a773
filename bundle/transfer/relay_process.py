"""A relay in a process of its own, so that neither it nor the unpacking waits for the other."""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping

from ..channel.frames import Lines
from ..protocol.codec import decode, encode
from ..system import processes
from ..system.processes import fork_child
from .relay import Relay, RelayOutcome
from .relay_chunks import ChunkFile, UnwritableFile
from .relay_peers import Directory, RelayCandidates

STILL_SECONDS = 30  # without a round of its loop: it was stopped, or its disk takes nothing
_MOST_SECONDS = 2.0
_END_SECONDS = 5.0  # for a killed process, which a disk that hangs may hold for longer


class RelayProcess:
    """A forked process that takes a file and passes it on, or is the source of it."""

    def __init__(
        self,
        file: ChunkFile,
        token: bytes,
        listener: socket.socket,
        directory: Directory | None = None,
    ) -> None:
        """Start it, to wait for :meth:`begin`; close the listener here. OSError if fork fails."""
        self._ending = threading.Lock()
        self._rounds = memoryview(mmap.mmap(-1, 8)).cast("Q")  # of the child's loop: 20 a second
        self._seen_rounds, self._seen_at, self._still = 0, time.monotonic(), 0.0
        self._reading, self._lines = Lines(), list[bytes]()
        with contextlib.ExitStack() as opened:
            ends: list[int] = []
            for _ in range(2):
                for end in os.pipe():
                    opened.callback(os.close, end)
                    ends.append(end)
            control, self._control, self._report, report = ends

            def run() -> None:
                os.close(self._control)
                os.close(self._report)
                make = functools.partial(Relay, file, token, listener, self._rounds, directory)
                _run_relay(make, control, report)

            self._child = fork_child(run)
            opened.pop_all()
        os.close(control)
        os.close(report)
        listener.close()

    def begin(self, candidates: RelayCandidates | None) -> None:
        """Tell it where its candidates are; None for the source, which only serves."""
        raw = None if candidates is None else encode(candidates)
        with self._ending, contextlib.suppress(BrokenPipeError):
            if self._child:  # where it has ended there is no outcome, either
                _write_line(self._control, raw)

    def outcome(
        self, on_contact: Callable[[Mapping[int, str]], None] = lambda unreached: None
    ) -> RelayOutcome:
        """Wait for the file or a failure; report the parents that cannot be reached, and why."""
        while True:
            while not self._has_report(1.0):
                if self.measure_stillness() >= STILL_SECONDS:
                    self.end()
                    return RelayOutcome(failure=f"its relay stood still for {STILL_SECONDS} s")
            report = self._next_report()
            if isinstance(report, RelayOutcome):
                return report
            on_contact(report)

    def measure_stillness(self) -> float:
        """Return the seconds for which the loop has begun no round; call it every second or so."""
        now, rounds = time.monotonic(), int(self._rounds[0])
        # A pause counts no longer: where all of a job was stopped, so was this process.
        passed = min(now - self._seen_at, _MOST_SECONDS)
        self._still = self._still + passed if rounds == self._seen_rounds else 0.0
        self._seen_at, self._seen_rounds = now, rounds
        return self._still

    def fileno(self) -> int:
        """Return a descriptor that can be read from once there is an outcome, or none can come."""
        return self._report

    @property
    def pid(self) -> int:
        """Its process id; 0 once it has ended."""
        return self._child

    def find_source_failure(self) -> str:
        """Return why this process, a source, serves no longer; empty while it does."""
        report = self._next_report() if self._has_report(0) else None
        return report.failure if isinstance(report, RelayOutcome) else ""

    def _has_report(self, seconds: float) -> bool:
        if self._lines:
            return True
        poll = select.poll()  # select() takes no descriptor above 1023, of which a driver has many
        poll.register(self._report, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _next_report(self) -> dict[int, str] | RelayOutcome:
        while not self._lines:
            piece = os.read(self._report, 1 << 16)
            if not piece:
                return self._describe_end()
            self._lines += self._reading.feed(piece)
        report = json.loads(self._lines.pop(0))
        if isinstance(report, list):
            return {int(place): str(why) for place, why in report}
        return decode(RelayOutcome, report)

    def _describe_end(self) -> RelayOutcome:
        with self._ending:
            status = self._reap()
        if status is not None and os.WIFSIGNALED(status):
            how = processes.describe_exit(-os.WTERMSIG(status))
            return RelayOutcome(failure=f"its relay was {how}")
        return RelayOutcome(failure="its relay ended")

    def _reap(self) -> int | None:
        """Reap the ended process; return its wait status, None if it was known before."""
        if not self._child:
            return None
        status = None
        with contextlib.suppress(ChildProcessError):  # reaped elsewhere
            status = _await_end(self._child)
        os.close(self._control)
        self._child = 0
        return status

    def end(self) -> None:
        """End it, from any thread; whoever waits for the outcome learns that it ended."""
        with self._ending:
            if not self._child:
                return
            with contextlib.suppress(ProcessLookupError):  # reaped elsewhere
                os.kill(self._child, signal.SIGKILL)  # it may be stopped, or wait for a disk
            self._reap()

    def close(self) -> None:
        """End it, and forget its outcome, for which nobody may wait any more."""
        self.end()
        os.close(self._report)


def _await_end(child: int) -> int | None:
    until = time.monotonic() + _END_SECONDS
    pause = 0.001
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return None


def _run_relay(make: Callable[[], Relay], control: int, report: int) -> None:
    def send(message: dict[int, str] | RelayOutcome) -> None:
        raw = encode(message) if isinstance(message, RelayOutcome) else [*message.items()]
        _write_line(report, raw)

    failure = ""
    try:
        with open(control, "rb", closefd=False) as lines:
            raw = lines.readline()
        if raw.endswith(b"\n"):  # else its writer has ended
            start = json.loads(raw)
            candidates = None if start is None else decode(RelayCandidates, start)
            with contextlib.closing(make()) as relay:
                relay.run(candidates, control, send)
    except (OSError, UnwritableFile) as exc:
        failure = str(exc)
    except Exception as exc:
        traceback.print_exc()
        failure = f"{type(exc).__name__}: {exc}"
    with contextlib.suppress(OSError):
        if failure:
            send(RelayOutcome(failure=failure))


def _write_line(handle: int, message: object) -> None:
    with open(handle, "wb", closefd=False) as lines:
        lines.write(json.dumps(message).encode() + b"\n")
