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
from collections.abc import Callable

from ..protocol.codec import decode, encode
from ..system import processes, signals
from ..system.processes import prctl, signal_at_parent_death
from .relay import Relay, RelayOutcome
from .relay_chunks import ChunkFile, UnwritableFile
from .relay_peers import Directory, RelayCandidates

STILL_SECONDS = 30
"""Time without a round of its loop after which a relay is given up: it was stopped, or its disk
takes nothing."""
_END_SECONDS = 5.0
"""Time for a process that is killed to end; a disk that does not answer may hold it for longer."""


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
        prctl()  # loads libc, which is unsafe after a fork
        control, self._control, self._report, report = _pipes()
        self._ending = threading.Lock()
        self._rounds = memoryview(mmap.mmap(-1, 8)).cast("Q")
        """One number, shared with the child: the rounds of its loop."""
        parent = os.getpid()
        with signals.held():  # else the child might do its parent's clean-up
            try:
                self._child = os.fork()
            except OSError:
                for handle in (control, self._control, self._report, report):
                    os.close(handle)
                raise
            if not self._child:
                os.close(self._control)
                os.close(self._report)
                make = functools.partial(Relay, file, token, listener, self._rounds, directory)
                _be_the_relay(make, control, report, parent)
        os.close(control)
        os.close(report)
        listener.close()

    def begin(self, candidates: RelayCandidates | None) -> None:
        """Tell it where its candidates are; None for the source, which only serves."""
        raw = None if candidates is None else encode(candidates)
        with self._ending, contextlib.suppress(BrokenPipeError):
            if self._child:  # where it has ended there is no outcome, either
                _write(self._control, json.dumps(raw).encode() + b"\n")

    def outcome(self) -> RelayOutcome:
        """Wait until the file is here, or cannot come; or until the relay stands still."""
        still, rounds = 0, -1
        coming = select.poll()
        coming.register(self._report, select.POLLIN)
        while not coming.poll(1000):
            # Counted, and not timed: where all of a job was stopped, it goes on together.
            still = still + 1 if self._rounds[0] == rounds else 0
            rounds = self._rounds[0]
            if still >= STILL_SECONDS:
                self.end()
                return RelayOutcome(failure=f"its relay stood still for {STILL_SECONDS} s")
        return self._last_word()

    def fileno(self) -> int:
        """Return a descriptor that can be read from once there is an outcome, or none can come."""
        return self._report

    @property
    def pid(self) -> int:
        """Its process id; 0 once it has ended."""
        return self._child

    @property
    def rounds(self) -> int:
        """The rounds that its loop has begun, 20 in a second at least."""
        return int(self._rounds[0])

    def source_failure(self) -> str:
        """Return why this process, a source, serves no longer; empty while it does."""
        coming = select.poll()
        coming.register(self._report, select.POLLIN)
        return self._last_word().failure if coming.poll(0) else ""

    def _last_word(self) -> RelayOutcome:
        line = _line(self._report)
        if line:
            return decode(RelayOutcome, json.loads(line))
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
        """End it, with all its connections; whoever waits for the outcome learns that it ended.

        Two threads may do so at the same time: one on the driver's word, one because of a signal.
        """
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


def _pipes() -> tuple[int, int, int, int]:
    first = os.pipe()
    try:
        return (*first, *os.pipe())
    except OSError:
        for handle in first:
            os.close(handle)
        raise


def _await_end(child: int) -> int | None:
    """Return a killed process's wait status; None if it does not end in time."""
    until = time.monotonic() + _END_SECONDS
    pause = 0.001
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return None


def _be_the_relay(make: Callable[[], Relay], control: int, report: int, parent: int) -> None:
    """Run the child; clean up whatever happens, and never return."""
    try:
        signals.end_as_usual()
        signal_at_parent_death(signal.SIGKILL)
        if os.getppid() == parent:
            raw = _line(control)
            if raw:
                _relay(make, control, report, json.loads(raw))
    except (OSError, UnwritableFile) as exc:
        with contextlib.suppress(OSError):
            _send(report, RelayOutcome(failure=str(exc)))
    except Exception as exc:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            _send(report, RelayOutcome(failure=f"{type(exc).__name__}: {exc}"))
    finally:
        os._exit(0)


def _relay(make: Callable[[], Relay], control: int, report: int, raw: object) -> None:
    candidates = None if raw is None else decode(RelayCandidates, raw)
    with contextlib.closing(make()) as relay:
        relay.run(candidates, control, lambda outcome: _send(report, outcome))


def _send(report: int, outcome: RelayOutcome) -> None:
    _write(report, json.dumps(encode(outcome)).encode() + b"\n")


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _line(handle: int) -> bytes:
    """Read the only line; empty if its writer ends first."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(handle, 1 << 16)
        if not piece:
            return b""
        line += piece
    return line
