"""A relay in a process of its own, so that neither it nor the unpacking waits for the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading

from ..protocol.codec import decode, encode
from ..system.parent_death import prctl, signal_at_parent_death
from .chunks import ChunkFile, UnwritableFile
from .relay import Relay, RelayAddresses, RelayOutcome


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
        parent = os.getpid()
        self._child = os.fork()
        if not self._child:
            os.close(self._control)
            os.close(self._report)
            _be_the_relay(file, token, listener, control, report, parent)
        os.close(control)
        os.close(report)
        listener.close()

    def begin(self, addresses: RelayAddresses | None) -> None:
        """Tell it where the others are; None for the source, which only serves."""
        raw = None if addresses is None else encode(addresses)
        with contextlib.suppress(BrokenPipeError):  # it has ended: then there is no outcome, either
            _write(self._control, json.dumps(raw).encode() + b"\n")

    def outcome(self) -> RelayOutcome:
        """Wait until the file is here, or cannot come."""
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
                os.kill(self._child, signal.SIGTERM)  # it may wait for a disk
                os.waitpid(self._child, 0)
            os.close(self._control)
            self._child = 0

    def close(self) -> None:
        """End it, and forget its outcome, for which nobody may wait any more."""
        self.end()
        os.close(self._report)


def _be_the_relay(
    file: ChunkFile, token: bytes, listener: socket.socket, control: int, report: int, parent: int
) -> None:
    """Be the child: it leaves nothing behind, whatever happens, and does not return."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal_at_parent_death(signal.SIGKILL)
        if os.getppid() == parent:
            raw = _line(control)
            if raw:
                _relay(file, token, listener, control, report, json.loads(raw))
    except (OSError, UnwritableFile) as exc:
        with contextlib.suppress(OSError):
            _send(report, RelayOutcome(failure=str(exc)))
    finally:
        os._exit(0)


def _relay(
    file: ChunkFile,
    token: bytes,
    listener: socket.socket,
    control: int,
    report: int,
    raw: object,
) -> None:
    addresses = None if raw is None else decode(RelayAddresses, raw)
    with contextlib.closing(Relay(file, token, listener)) as relay:
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
