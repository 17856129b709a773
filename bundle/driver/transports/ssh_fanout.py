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
from collections import Counter
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple, cast

from ...protocol.problem import ProblemCode
from ...system import processes, signals

LOGINS = 16  # under way at once; sshd and what checks passwords take no more
PAUSES = (1.0, 2.0, 4.0, 8.0, 8.0)  # seconds before each further try of a host that was turned away


class LoginQueue:
    """Hosts that wait for their login.

    An sshd, also a jump host's, closes connections beyond ``MaxStartups`` at once. So a host that
    was turned away is tried again after a pause, and fewer logins are under way from then on.
    """

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most = LOGINS
        self._waiting = [(0.0, name) for name in names]  # with the time when each may be tried
        self.tries = Counter[str]()  # how often each was turned away

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def next(self, under_way: int) -> str:
        """Return the next host to log in to; empty if none may be now."""
        now = self._clock()
        ready = next((entry for entry in self._waiting if entry[0] <= now), None)
        if ready is None or under_way >= self._most:
            return ""
        self._waiting.remove(ready)
        return ready[1]

    def record_refusal(self, name: str, under_way: int) -> bool:
        """Record a refused login; the number of the others is the new limit; True to retry."""
        self.tries[name] += 1
        self._most = max(1, min(self._most, under_way))
        if self.tries[name] > len(PAUSES):
            return False
        self._waiting.append((self._clock() + PAUSES[self.tries[name] - 1], name))
        return True


_REASONS = (
    (ProblemCode.SSH_KEY_CHANGED, r"REMOTE HOST IDENTIFICATION HAS CHANGED"),
    (ProblemCode.SSH_KEY_UNKNOWN, r"Host key verification failed|No \S+ host key is known"),
    (ProblemCode.SSH_NAME_UNKNOWN, r"Could not resolve hostname"),
    (ProblemCode.SSH_NO_LOGIN, r"Permission denied|[Aa]uthentication fail(?:ures|ed)"),
    (
        ProblemCode.SSH_UNREACHED,
        r"connect to (?:host|address) |Connection (?:timed out|refused)|open failed",
    ),
    # What it says of a jump host comes before what it says of the host behind that one.
    (ProblemCode.SSH_TURNED_AWAY, r"^Connection (?:closed|reset) by (?!UNKNOWN)"),
    (ProblemCode.SSH_TURNED_AWAY, r"(?:kex|ssh)_exchange_identification: "),
)
"""The most telling ones first: behind a jump host that cannot go on, ``ssh`` also says that the
connection was closed."""


def find_reason(said: Sequence[str]) -> tuple[ProblemCode | None, str]:
    """Return why a login has failed, and the line that says so; None and empty if none does."""
    matches = [(code, [*filter(re.compile(words).search, said)]) for code, words in _REASONS]
    found = [(code, lines[-1]) for code, lines in matches if lines]
    # Of a key that has changed the last line says less than the problem itself does.
    telling = [line for code, line in found if code is not ProblemCode.SSH_KEY_CHANGED]
    line = telling[0].removeprefix("ssh: ").rstrip(".") if telling else ""
    return found[0][0] if found else None, line


BEGUN = b"stager-begun\n"  # after a login's own output
REPORT_PREFIX = "stager-host "  # before the JSON of a host that ended badly
LOGIN_SECONDS = 90.0  # for a login: a home on a file server may not answer
SSH_OPTIONS = (
    *("-T", "-x", "-oBatchMode=yes", "-oConnectTimeout=20", "-oServerAliveInterval=15"),
    *("-oServerAliveCountMax=4", "-oClearAllForwardings=yes", "-oEscapeChar=none"),
    "-oLogLevel=INFO",
)
"""A connection that has gone is noticed within a minute; all else is as the user configured it."""
_KEPT_ERRORS = 1 << 14
_KEPT_LINES = 30
_MOST_NOISE = 1 << 16  # bytes that may come before a login is done
_READ_BYTES = 1 << 18


def ssh_argv(host: str, script: str) -> list[str]:
    """Return the command that runs a line of shell on a host, whose login shell may be any."""
    begun = f"echo {BEGUN.decode().strip()}"
    named = f"STAGER_NODE={shlex.quote(host)}; export STAGER_NODE; {begun}; {script}"
    return ["ssh", *SSH_OPTIONS, "--", host, f"exec /bin/sh -c {shlex.quote(named)}"]


class HostEnd(NamedTuple):
    """The end of a host, as the fan-out reports it."""

    host: str
    status: int
    begun: bool
    slow: bool  # true if its login took too long, and was ended
    said: Sequence[str]
    tries: int = 1


class _Host:
    def __init__(self, name: str, script: str, *, whole_lines: bool) -> None:
        self.name = name
        self.begun = self.slow = False  # slow if its login took too long
        self.offset = 0
        self._whole_lines = whole_lines
        self._until = time.monotonic() + LOGIN_SECONDS
        self._errors = self._held = b""
        pipe = processes.PIPE
        self.process = processes.start(ssh_argv(name, script), stdin=pipe, stdout=pipe, stderr=pipe)
        self.streams = tuple(
            cast("IO[bytes]", stream)
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr)
        )
        self.stdin, self.stdout, self.stderr = self.streams
        for stream in self.streams:
            os.set_blocking(stream.fileno(), False)

    def read(self) -> bytes | None:
        """Return new output, only whole lines if asked for; None at the end."""
        chunk = _read(self.stdout)
        return None if chunk is None else self._take(chunk)

    def read_rest(self) -> bytes:
        """Return the rest of what its command has written, once it has ended; keep its errors."""
        ready = b""
        while chunk := _read(self.stdout):
            ready += self._take(chunk)
        rest, self._held = self._held, b""
        if rest and self.begun:
            ready += rest + b"\n" * self._whole_lines
        else:
            self._errors += rest  # of a shell that refuses the login
        while self.read_errors():
            pass
        return ready

    def _take(self, chunk: bytes) -> bytes:
        self._held += chunk
        if not self.begun:
            _, mark, behind = self._held.partition(BEGUN)
            if not mark:
                self._held = self._held[-_MOST_NOISE:]
                return b""
            self.begun, self._held = True, behind
        end = self._held.rfind(b"\n") + 1 if self._whole_lines else len(self._held)
        ready, self._held = self._held[:end], self._held[end:]
        return ready

    def read_errors(self) -> bytes | None:
        """Keep the end of what it writes to standard error; return None at its end."""
        chunk = _read(self.stderr)
        self._errors = (self._errors + (chunk or b""))[-_KEPT_ERRORS:]
        return chunk

    def end_if_late(self) -> None:
        if not self.begun and time.monotonic() > self._until:
            self.slow = True
            self.process.kill()

    def was_turned_away(self) -> bool:
        """Return whether its connection was closed before anybody was asked who is there."""
        code = find_reason(self.list_lines())[0]
        return code is ProblemCode.SSH_TURNED_AWAY and not (self.begun or self.slow)

    def list_lines(self) -> list[str]:
        lines = map(str.strip, self._errors.decode(errors="replace").splitlines())
        return [*filter(None, lines)][-_KEPT_LINES:]


def _read(stream: IO[bytes]) -> bytes | None:
    try:
        return os.read(stream.fileno(), _READ_BYTES) or None
    except BlockingIOError:
        return b""
    except (OSError, ValueError):
        return None


_MOST_UNSENT = 8 << 20  # bytes of input that wait for the slowest host before more is read
_WAIT_SECONDS = 1.0  # also between two looks at every host
_TICK_SECONDS = 0.02
_CHUNK = 1 << 18


def main(names: Sequence[str], script: str, *, attached: bool = False) -> int:
    """Run a script of one line on all hosts; return 0, or the exit status of one that ended badly.

    Each host gets standard input, and prints whole lines (one host alone any bytes); a line on
    standard error reports each that ended badly. If ``attached``, the end of input ends all logins.
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
    def __init__(self, names: Sequence[str], script: str, *, attached: bool = False) -> None:
        self.status = 0  # or the exit status of a host that ended badly
        self._waiting, self._script = LoginQueue(names), script
        self._mixes = len(names) > 1
        self._hosts: list[_Host] = []  # those that have been started, and have not ended
        self._ending: list[_Host] = []  # their output has ended
        self._next_round = 0.0  # the time at which all hosts are looked at
        self._selector = selectors.DefaultSelector()
        self._input = bytearray()
        self._passed = 0  # bytes of the input before those that are kept
        self._input_ended = False
        self._from_file = stat.S_ISREG(os.fstat(0).st_mode)  # which no selector takes
        self._attached = attached and not self._from_file
        os.set_blocking(0, self._from_file)

    def runs(self) -> bool:
        return bool(self._hosts or self._waiting)

    def run_once(self) -> None:
        self._start_more()
        reads_file = self._take_input() and self._from_file
        if reads_file:
            self._read_input()
        # A process that has ended wakes nobody.
        pause = _TICK_SECONDS if self._ending else _WAIT_SECONDS
        for key, _ in self._selector.select(0.0 if reads_file else pause):
            if key.data is None:
                self._read_input()
            else:
                self._serve(key)
        self._end_hosts()

    def close(self) -> None:
        for host in self._hosts:
            host.process.terminate()
        self._selector.close()

    def _end_hosts(self) -> None:
        """End hosts by closed output, now and then all: an ssh child may keep it open."""
        now, hosts = time.monotonic(), self._ending
        if now >= self._next_round:
            self._next_round = now + _WAIT_SECONDS
            hosts = self._hosts
            for host in hosts:
                host.end_if_late()
        for host in [host for host in hosts if host.process.poll() is not None]:
            self._end(host)

    def _start_more(self) -> None:
        while name := self._waiting.next(self._count_logins()):
            try:
                host = _Host(name, self._script, whole_lines=self._mixes)
            except processes.ProcessError as exc:
                self._report(HostEnd(name, 127, begun=False, slow=False, said=[exc.reason]))
                continue
            self._hosts.append(host)
            for stream in (host.stdout, host.stderr):
                self._selector.register(stream, selectors.EVENT_READ, host)

    def _count_logins(self) -> int:
        return sum(not host.begun for host in self._hosts)

    def _serve(self, key: selectors.SelectorKey) -> None:
        host: _Host = key.data
        if key.fileobj is host.stdin:
            self._send(host)
        elif key.fileobj is host.stdout:
            begun, data = host.begun, host.read()
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
        if host.stdin.closed:
            return
        try:
            while host.offset < self._passed + len(self._input):
                start = host.offset - self._passed
                host.offset += os.write(host.stdin.fileno(), self._input[start : start + _CHUNK])
        except BlockingIOError:
            if not self._listens_to(host.stdin):
                self._selector.register(host.stdin, selectors.EVENT_WRITE, host)
            return
        except OSError:  # it has ended: that shows elsewhere
            host.offset = self._passed + len(self._input)
        if self._listens_to(host.stdin):
            self._selector.unregister(host.stdin)
        if self._input_ended:
            with contextlib.suppress(OSError):
                host.stdin.close()

    def _listens_to(self, stream: IO[bytes] | int) -> bool:
        return stream in self._selector.get_map()

    def _take_input(self) -> bool:
        """Drop the input that all hosts have; return whether more is wanted, and listen for it."""
        if self._input and not self._waiting:
            reached = min((host.offset for host in self._hosts), default=self._passed)
            del self._input[: reached - self._passed]
            self._passed = reached
        wanted = not self._input_ended and len(self._input) < _MOST_UNSENT
        listens = self._listens_to(0)
        if wanted and not (listens or self._from_file):
            self._selector.register(0, selectors.EVENT_READ)
        elif listens and not wanted:
            self._selector.unregister(0)
        return wanted

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
                host.process.terminate()

    def _end(self, host: _Host) -> None:
        _write(host.read_rest())
        for stream in host.streams:
            if not stream.closed and self._listens_to(stream):
                self._selector.unregister(stream)
            with contextlib.suppress(OSError):
                stream.close()
        self._hosts.remove(host)
        if host in self._ending:
            self._ending.remove(host)
        again = host.was_turned_away() and not self._driver_has_ended()
        if not (again and self._waiting.record_refusal(host.name, self._count_logins())):
            status, tries = host.process.returncode, max(1, self._waiting.tries[host.name])
            said = host.list_lines()
            self._report(HostEnd(host.name, status, host.begun, host.slow, said, tries))

    def _driver_has_ended(self) -> bool:
        return self._attached and self._input_ended

    def _report(self, end: HostEnd) -> None:
        if end.status or not end.begun:
            self.status = self.status or max(1, end.status)
            os.write(2, f"{REPORT_PREFIX}{json.dumps(end._asdict())}\n".encode())


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
