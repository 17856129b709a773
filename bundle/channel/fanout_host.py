"""One host of a fan-out: its ``ssh``, what it is still to be sent, and how it ended."""

from __future__ import annotations

import json
import os
import shlex
import time
from typing import IO, cast

from ..protocol.problem import ProblemCode
from ..system import processes
from .login_reasons import reason

BEGUN = b"stager-begun\n"
"""The line that a host prints when it is logged in to; before it, a login's own output comes."""
REPORT_PREFIX = "stager-host "
"""The beginning of the line that reports a host which ended badly; JSON follows."""
LOGIN_SECONDS = 90.0
"""Time that a login may take, the connection included. A home on a file server that does not answer
would hold it for ever."""
SSH_OPTIONS = (
    "-T",
    "-x",
    "-oBatchMode=yes",
    "-oConnectTimeout=20",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=4",
    "-oClearAllForwardings=yes",
    "-oEscapeChar=none",
    "-oLogLevel=INFO",
)
"""Nobody is there to answer a question; a connection that has gone is noticed within a minute; and
the user's own forwardings would be in the way. All else is as the user has configured it."""
_KEPT_ERRORS = 1 << 14
_KEPT_LINES = 30
_MOST_NOISE = 1 << 16
"""Bytes that may come before a login is done."""
_CHUNK = 1 << 18


def ssh_argv(host: str, script: str) -> list[str]:
    """Return the command that runs a shell script on a host.

    The user's shell there may be any: it sees two words and one in quotes.

    Args:
        host: a name, with ``user@`` before it where it is another one.
        script: one line; ``STAGER_NODE`` is the host's name in it.
    """
    begun = f"echo {BEGUN.decode().strip()}"
    named = f"STAGER_NODE={shlex.quote(host)}; export STAGER_NODE; {begun}; {script}"
    return ["ssh", *SSH_OPTIONS, "--", host, f"exec /bin/sh -c {shlex.quote(named)}"]


class Host:
    """A host, from its login to its end.

    Attributes:
        name: its name.
        begun: True once it is logged in to.
        ended: True once its command has ended, or its login has failed.
        status: the exit status of its ``ssh``, which is that of its command, or 255.
        offset: bytes of the input that it has been sent.
    """

    def __init__(self, name: str, script: str) -> None:
        self.name = name
        self.begun = self.ended = False
        self.status = 0
        self.offset = 0
        self._until = time.monotonic() + LOGIN_SECONDS
        self._errors = self._held = b""
        self._slow = False
        self.process: processes.Process | None = None
        pipe = processes.PIPE
        try:
            self.process = processes.start(
                ssh_argv(name, script), stdin=pipe, stdout=pipe, stderr=pipe
            )
        except processes.ProcessError as exc:
            self._errors, self.status, self.ended = exc.reason.encode(), 127, True
            return
        for stream in self.streams():
            os.set_blocking(stream.fileno(), False)

    def streams(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        """Return its standard input, output and error."""
        process = cast("processes.Process", self.process)
        return tuple(  # type: ignore[return-value]
            cast("IO[bytes]", stream) for stream in (process.stdin, process.stdout, process.stderr)
        )

    def read(self, *, whole_lines: bool) -> bytes | None:
        """Return new output, only whole lines if asked for; None at the end."""
        chunk = _read(self.streams()[1])
        return None if chunk is None else self._take(chunk, whole_lines=whole_lines)

    def rest(self, *, whole_lines: bool) -> bytes:
        """Return the rest of what its command has written, once it has ended."""
        ready = b""
        while True:
            chunk = _read(self.streams()[1])
            if not chunk:
                break
            ready += self._take(chunk, whole_lines=whole_lines)
        rest, self._held = self._held, b""
        if rest and self.begun:
            return ready + rest + b"\n" * whole_lines
        self._errors += rest  # of a shell that refuses the login
        return ready

    def _take(self, chunk: bytes, *, whole_lines: bool) -> bytes:
        self._held += chunk
        if not self.begun:
            _, mark, behind = self._held.partition(BEGUN)
            if not mark:
                self._held = self._held[-_MOST_NOISE:]
                return b""
            self.begun, self._held = True, behind
        end = self._held.rfind(b"\n") + 1 if whole_lines else len(self._held)
        ready, self._held = self._held[:end], self._held[end:]
        return ready

    def read_errors(self) -> bytes | None:
        """Keep the end of what it writes to standard error; return None at its end."""
        chunk = _read(self.streams()[2])
        self._errors = (self._errors + (chunk or b""))[-_KEPT_ERRORS:]
        return chunk

    def is_late(self) -> bool:
        """Return whether its login takes too long."""
        return not (self.begun or self.ended) and time.monotonic() > self._until

    def end_late(self) -> None:
        """End a login that takes too long."""
        self._slow = True
        if self.process is not None:
            self.process.kill()

    def has_ended(self) -> bool:
        """Return whether its ``ssh`` has ended; take note of its exit status."""
        if self.process is None or self.process.poll() is None:
            return False
        self.status, self.ended = self.process.returncode, True
        return True

    def was_turned_away(self) -> bool:
        """Return whether its connection was closed before anybody was asked who is there."""
        away = reason(self._said()) is ProblemCode.SSH_TURNED_AWAY
        return away and not (self.begun or self._slow)

    def report(self, tries: int = 1) -> str:
        """Return the line that says how it ended; empty if it ended well."""
        if self.status == 0 and self.begun:
            return ""
        told = {
            "host": self.name,
            "status": self.status,
            "begun": self.begun,
            "slow": self._slow,
            "tries": tries,
            "said": self._said(),
        }
        return REPORT_PREFIX + json.dumps(told)

    def _said(self) -> list[str]:
        lines = self._errors.decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-_KEPT_LINES:]


def _read(stream: IO[bytes]) -> bytes | None:
    """Return what can be read now; None at the end of the stream."""
    try:
        return os.read(stream.fileno(), _CHUNK) or None
    except BlockingIOError:
        return b""
    except (OSError, ValueError):
        return None
