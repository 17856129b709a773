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
from ..system import signals
from ..system.parent_death import prctl, signal_at_parent_death
from .chunks import ChunkFile, UnwritableFile
from .relay import Relay, RelayAddresses, RelayOutcome

STILL_SECONDS = 30
"""Time without a round of its loop after which a relay is given up: it was stopped, or its disk
takes nothing."""
_END_SECONDS = 5.0
"""Time for a process that is killed to end; a disk that does not answer may hold it for longer."""


class RelayProcess:
    """A forked process that takes a file and passes it on, or is the source of it."""

    def __init__(self, file: ChunkFile, token: bytes, listener: socket.socket) -> None:
        """Start it; it waits for the addresses of the others.

        Args:
            file: the file.
            token: the transfer's token.
            listener: the socket that others connect to; this process's copy is closed.

        Raises:
            OSError: there can be no further process.
        """
        prctl()  # loads libc, which is unsafe after a fork
        control, self._control = os.pipe()
        self._report, report = os.pipe()
        self._ending = threading.Lock()
        self._rounds = memoryview(mmap.mmap(-1, 8)).cast("Q")
        """One number, shared with the child: the rounds of its loop."""
        parent = os.getpid()
        with signals.held():  # else the child might do its parent's clean-up
            self._child = os.fork()
            if not self._child:
                os.close(self._control)
                os.close(self._report)
                make = functools.partial(Relay, file, token, listener, self._rounds)
                _be_the_relay(make, control, report, parent)
        os.close(control)
        os.close(report)
        listener.close()

    def begin(self, addresses: RelayAddresses | None) -> None:
        """Tell it where the others are; None for the source, which only serves."""
        raw = None if addresses is None else encode(addresses)
        with contextlib.suppress(BrokenPipeError):  # it has ended: then there is no outcome, either
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
        line = _line(self._report)
        if not line:
            return RelayOutcome(failure="its relay ended")
        return decode(RelayOutcome, json.loads(line))

    def end(self) -> None:
        """End it, with all its connections; whoever waits for the outcome learns that it ended.

        Two threads may do so at the same time: one on the driver's word, one because of a signal.
        """
        with self._ending:
            if not self._child:
                return
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # reaped elsewhere
                os.kill(self._child, signal.SIGKILL)  # it may be stopped, or wait for a disk
                _await_end(self._child)
            os.close(self._control)
            self._child = 0

    def close(self) -> None:
        """End it, and forget its outcome, for which nobody may wait any more."""
        self.end()
        os.close(self._report)


def _await_end(child: int) -> None:
    """Wait until a process that was killed has ended, or holds out for too long.

    Raises:
        ChildProcessError: somebody else has waited for it.
    """
    until = time.monotonic() + _END_SECONDS
    pause = 0.001
    while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _be_the_relay(make: Callable[[], Relay], control: int, report: int, parent: int) -> None:
    """Be the child: it leaves nothing behind, whatever happens, and does not return."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
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
    addresses = None if raw is None else decode(RelayAddresses, raw)
    with contextlib.closing(make()) as relay:
        relay.run(addresses, control, lambda outcome: _send(report, outcome))


def _send(report: int, outcome: RelayOutcome) -> None:
    _write(report, json.dumps(encode(outcome)).encode() + b"\n")


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _line(handle: int) -> bytes:
    """Read a line, the only one that comes; nothing if its writer ends before."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(handle, 1 << 16)
        if not piece:
            return b""
        line += piece
    return line
