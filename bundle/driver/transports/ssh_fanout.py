"""The fan-out: starts one command on many hosts over ``ssh``, and sends all the same input."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shlex
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, cast

from ...protocol.problem import ProblemCode
from ...system import processes, signals

# --- The hosts that are still to be logged in to: which is next, and how many at a time ----------

# An sshd takes so many logins at a time and closes further connections at once (``MaxStartups``, of
# which ten are always taken); all logins through one jump host are logins to its sshd as well. So a
# host that was turned away is tried again after a pause, and fewer logins are under way from then
# on.

LOGINS = 16
"""Logins that are under way at once; sshd and what checks passwords take no more at a time."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 8.0)
"""Seconds before each further try of a host that was turned away."""


class LoginQueue:
    """Hosts that wait for their login."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most = LOGINS
        """Logins that may be under way at once."""
        self._new = deque(names)
        self._again: list[tuple[float, str]] = []
        """Hosts that were turned away, and the time from which they may be tried again."""
        self._tries: dict[str, int] = {}
        """How often each of them was."""

    def __bool__(self) -> bool:
        """Return whether some host is still to be logged in to."""
        return bool(self._new or self._again)

    def next(self, under_way: int) -> str:
        """Return the next host to log in to; empty if none may be now."""
        if under_way >= self._most:
            return ""
        now = self._clock()
        ready = next((entry for entry in self._again if entry[0] <= now), None)
        if ready is not None:
            self._again.remove(ready)
            return ready[1]
        return self._new.popleft() if self._new else ""

    def record_refusal(self, name: str, under_way: int) -> bool:
        """Record a refused login; the number of the others is the new limit; True to retry."""
        tries = self._tries[name] = self.tries(name) + 1
        self._most = max(1, min(self._most, under_way))
        if tries > len(PAUSES):
            return False
        self._again.append((self._clock() + PAUSES[tries - 1], name))
        return True

    def tries(self, name: str) -> int:
        """Return how often a host was turned away."""
        return self._tries.get(name, 0)


# --- The reasons for which a login over ``ssh`` fails, found in its own words. Pure functions ----

REASONS = (
    (ProblemCode.SSH_KEY_CHANGED, re.compile(r"REMOTE HOST IDENTIFICATION HAS CHANGED")),
    (
        ProblemCode.SSH_KEY_UNKNOWN,
        re.compile(r"Host key verification failed|No \S+ host key is known"),
    ),
    (ProblemCode.SSH_NAME_UNKNOWN, re.compile(r"Could not resolve hostname")),
    (
        ProblemCode.SSH_NO_LOGIN,
        re.compile(r"Permission denied|Too many authentication failures|Authentication failed"),
    ),
    (
        ProblemCode.SSH_UNREACHED,
        re.compile(
            r"connect to (?:host|address) .*|Connection timed out|Connection refused|open failed"
        ),
    ),
    # What it says of a jump host comes before what it says of the host behind that one.
    (ProblemCode.SSH_TURNED_AWAY, re.compile(r"^Connection (?:closed|reset) by (?!UNKNOWN)")),
    (ProblemCode.SSH_TURNED_AWAY, re.compile(r"(?:kex|ssh)_exchange_identification: ")),
)
"""The most telling ones first: behind a jump host that cannot go on, ``ssh`` also says that the
connection was closed."""


def find_reason(said: Sequence[str]) -> ProblemCode | None:
    """Return why a login has failed; None where the lines of ``ssh`` do not tell."""
    codes = (code for code, pattern in REASONS if any(map(pattern.search, said)))
    return next(codes, None)


def find_reason_line(said: Sequence[str]) -> str:
    """Return the line that says why a login has failed; empty if there is none.

    Of a key that has changed the last line says less than the problem itself does.
    """
    for code, pattern in REASONS:
        lines = [line for line in said if pattern.search(line)]
        if lines and code is not ProblemCode.SSH_KEY_CHANGED:
            return lines[-1].removeprefix("ssh: ").rstrip(".")
    return ""


# --- One host of a fan-out: its ``ssh``, what it is still to be sent, and how it ended -----------

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
_READ_BYTES = 1 << 18


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


class _Host:
    """A host, from its login to its end."""

    def __init__(self, name: str, script: str) -> None:
        self.name = name
        self.begun = self.ended = False
        """True once it is logged in to; once its command has ended, or its login has failed."""
        self.status = 0
        """The exit status of its ``ssh``, which is that of its command, or 255."""
        self.offset = 0
        """Bytes of the input that it has been sent."""
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
        for chunk in iter(lambda: _read(self.streams()[1]) or b"", b""):
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

    def end_if_late(self) -> None:
        if not (self.begun or self.ended) and time.monotonic() > self._until:
            self._slow = True
            if self.process is not None:
                self.process.kill()

    def give_up_login(self) -> None:
        if not self.begun and self.process is not None:
            with contextlib.suppress(OSError):
                self.process.terminate()

    def has_ended(self) -> bool:
        """Return whether its ``ssh`` has ended; take note of its exit status."""
        if self.process is None or self.process.poll() is None:
            return False
        self.status, self.ended = self.process.returncode, True
        return True

    def was_turned_away(self) -> bool:
        """Return whether its connection was closed before anybody was asked who is there."""
        away = find_reason(self._list_lines()) is ProblemCode.SSH_TURNED_AWAY
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
            "said": self._list_lines(),
        }
        return REPORT_PREFIX + json.dumps(told)

    def _list_lines(self) -> list[str]:
        lines = map(str.strip, self._errors.decode(errors="replace").splitlines())
        return [*filter(None, lines)][-_KEPT_LINES:]


def _read(stream: IO[bytes]) -> bytes | None:
    """Return what can be read now; None at the end of the stream."""
    try:
        return os.read(stream.fileno(), _READ_BYTES) or None
    except BlockingIOError:
        return b""
    except (OSError, ValueError):
        return None


# --- The fan-out: starts one command on many hosts, sends all the same input, passes on their lines

# It is to hosts without Slurm what ``srun`` is to an allocation, and is spoken to in the same way.
# What comes on standard input goes to each host; whole lines of what a host prints go to standard
# output, so that those of several hosts never mix; and for each host that ends badly a line goes to
# standard error. It ends when all hosts have. Of one host alone the bytes are passed on as they
# come.

_MOST_UNSENT = 8 << 20
"""Bytes of input that wait for the slowest host before more is read."""
_WAIT_SECONDS = 1.0
"""Longest wait for something to do; also the time between two looks at every host."""
_TICK_SECONDS = 0.02
_CHUNK = 1 << 18


def main(names: Sequence[str], script: str, *, attached: bool = False) -> int:
    """Run a script of one line on all hosts; return 0, or the exit status of one that ended badly.

    If ``attached``, nobody is logged in to any more once a pipe on standard input has ended:
    whoever has started this has gone, or wants the end.
    """
    signals.end_on_signals()
    processes.raise_open_files()  # three for each host
    fanout = _Fanout(names, script, attached=attached)
    try:
        while fanout.runs():
            fanout.run_once()
        return fanout.status
    except signals.Stopped:
        return signals.TERMINATED
    except BrokenPipeError:  # whoever has started this is gone
        return 1
    finally:
        fanout.close()


class _Fanout:
    """Hosts that run one command."""

    def __init__(self, names: Sequence[str], script: str, *, attached: bool = False) -> None:
        self.status = 0
        """0, or the exit status of a host that ended badly."""
        self._waiting, self._script = LoginQueue(names), script
        self._mixes = len(names) > 1
        self._hosts: list[_Host] = []
        """Those that have been started, and have not ended."""
        self._ending: list[_Host] = []
        """Those whose output has ended, so that their process is about to."""
        self._next_look = 0.0
        """The time at which all hosts are looked at."""
        self._selector = selectors.DefaultSelector()
        self._input = bytearray()
        self._passed = 0
        """Bytes of the input before those that are kept."""
        self._input_ended = False
        self._from_file = stat.S_ISREG(os.fstat(0).st_mode)
        """True if the input is a file: it can always be read, and no selector takes it."""
        self._attached = attached and not self._from_file
        self._listens = False
        os.set_blocking(0, self._from_file)

    def runs(self) -> bool:
        return bool(self._hosts or self._waiting)

    def run_once(self) -> None:
        self._start_more()
        self._take_input()
        for key, _ in self._selector.select(self._pause()):
            if key.data is None:
                self._read_input()
            else:
                self._serve(key)
        self._look()

    def close(self) -> None:
        """End what still runs; agents see their input end."""
        for host in self._hosts:
            if host.process is not None:
                with contextlib.suppress(OSError):
                    host.process.terminate()
        self._selector.close()

    def _pause(self) -> float:
        """Return how long to wait: a process that has ended wakes nobody."""
        if self._reads_file():
            return 0.0
        return _TICK_SECONDS if self._ending else _WAIT_SECONDS

    def _look(self) -> None:
        """Find ended hosts by closed output, now and then all: an ssh child may keep it open."""
        now, hosts = time.monotonic(), self._ending
        if now >= self._next_look:
            self._next_look = now + _WAIT_SECONDS
            hosts = self._hosts
            for host in hosts:
                host.end_if_late()
        for host in [host for host in hosts if host.has_ended()]:
            self._end(host)

    def _start_more(self) -> None:
        while self._waiting:
            name = self._waiting.next(self._count_logins())
            if not name:
                return
            host = _Host(name, self._script)
            if host.ended:
                self._report(host)
                continue
            self._hosts.append(host)
            _, output, errors = host.streams()
            self._selector.register(output, selectors.EVENT_READ, host)
            self._selector.register(errors, selectors.EVENT_READ, host)

    def _count_logins(self) -> int:
        return sum(not host.begun for host in self._hosts)

    def _serve(self, key: selectors.SelectorKey) -> None:
        host: _Host = key.data
        stdin, output, _ = host.streams()
        if key.fileobj is stdin:
            self._send(host)
        elif key.fileobj is output:
            begun, data = host.begun, host.read(whole_lines=self._mixes)
            if data is None:
                self._selector.unregister(key.fileobj)
                self._ending.append(host)
                return
            _write(data)
            if host.begun and not begun:
                self._send(host)
        elif host.read_errors() is None:
            self._selector.unregister(key.fileobj)

    def _send(self, host: _Host) -> None:
        stdin = host.streams()[0]
        if stdin.closed:
            return
        try:
            while host.offset < self._passed + len(self._input):
                start = host.offset - self._passed
                host.offset += os.write(stdin.fileno(), self._input[start : start + _CHUNK])
        except BlockingIOError:
            if stdin not in self._selector.get_map():
                self._selector.register(stdin, selectors.EVENT_WRITE, host)
            return
        except OSError:  # it has ended: that shows elsewhere
            host.offset = self._passed + len(self._input)
        if stdin in self._selector.get_map():
            self._selector.unregister(stdin)
        if self._input_ended:
            with contextlib.suppress(OSError):
                stdin.close()

    def _take_input(self) -> None:
        if self._input and not self._waiting:
            reached = min((host.offset for host in self._hosts), default=self._passed)
            del self._input[: reached - self._passed]
            self._passed = reached
        if self._reads_file():
            self._read_input()
        wanted = self._wants_input() and not self._from_file
        if wanted and not self._listens:
            self._selector.register(0, selectors.EVENT_READ)
        elif self._listens and not wanted:
            self._selector.unregister(0)
        self._listens = wanted

    def _wants_input(self) -> bool:
        return not self._input_ended and len(self._input) < _MOST_UNSENT

    def _reads_file(self) -> bool:
        return self._from_file and self._wants_input()

    def _read_input(self) -> None:
        try:
            chunk = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        self._input += chunk
        self._input_ended = not chunk
        if self._driver_has_ended():
            self._waiting = LoginQueue(())
        for host in self._hosts:
            if host.begun:
                self._send(host)
            elif self._driver_has_ended():
                host.give_up_login()

    def _end(self, host: _Host) -> None:
        _write(host.rest(whole_lines=self._mixes))
        while host.read_errors():
            pass
        for stream in host.streams():
            if not stream.closed and stream in self._selector.get_map():
                self._selector.unregister(stream)
            with contextlib.suppress(OSError):
                stream.close()
        self._hosts.remove(host)
        if host in self._ending:
            self._ending.remove(host)
        again = host.was_turned_away() and not self._driver_has_ended()
        if not (again and self._waiting.record_refusal(host.name, self._count_logins())):
            self._report(host)

    def _driver_has_ended(self) -> bool:
        return self._attached and self._input_ended

    def _report(self, host: _Host) -> None:
        line = host.report(max(1, self._waiting.tries(host.name)))
        if line:
            self.status = self.status or max(1, host.status)
            os.write(2, line.encode() + b"\n")


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
