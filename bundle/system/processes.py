"""The only place on the far side that starts processes.

Arguments are lists, never a shell's line. Each command is logged before it runs. Every process
leads a session of its own and gets SIGTERM when the thread that started it ends, so that a killed
agent leaves nothing behind.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Callable, Union

from ..redaction.secrets import masked
from . import open_files
from .descendants import MARK, members_of, waited_for
from .parent_death import end_with_parent

log = logging.getLogger(__name__)

TAIL_LINES = 15

_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0
_KILL_LOOKS = 20
"""Looks at what is to be killed, at least: a machine that stood still has killed nobody yet."""
_SERIAL_NUMBERS = itertools.count()

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL

Stream = Union[int, IO[bytes], None]
"""A stream as ``subprocess.Popen`` takes it."""


@dataclass(frozen=True)
class CompletedCommand:
    """The result of a finished command."""

    argv: tuple[str, ...]
    """The command as it was started."""
    returncode: int
    """Its exit status; negative for the signal that ended it."""
    stdout: str
    """All it wrote to standard output."""
    stderr: str
    """All it wrote to standard error."""


class ProcessError(Exception):
    """A command could not be started, failed, or took too long.

    Attributes:
        argv: the command.
        code: its exit status, negative for a signal; None where it never started.
        lines: the lines that it wrote to standard error, or else to standard output.
        tail: the last of them.
        reason: the event, in a few words.
        timed_out: True if it took too long, and was killed for that.
    """

    def __init__(
        self, argv: Sequence[str], code: int | None, output: str = "", *, reason: str = ""
    ) -> None:
        self.argv = tuple(argv)
        self.code = code
        self.lines = tuple(output.strip().splitlines())
        self.tail = self.lines[-TAIL_LINES:]
        self.reason = reason or describe_exit(code)
        self.timed_out = False
        shown = shlex.join(masked(self.argv))
        super().__init__(": ".join([self.reason, shown, *self.tail[-1:]]))


class Process(subprocess.Popen[bytes]):
    """A process started by :func:`start`; ``mark`` is what its descendants carry.

    It is waited for without the lock that ``Popen`` takes in ``poll`` and in a ``wait`` with a
    timeout: a signal whose handler raises just behind the taking leaves it closed for ever, and the
    next ``wait`` then never returns (seen with 3.11, under load).
    """

    mark: str = ""

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        return self._ended(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than ``timeout`` seconds.
        """
        if timeout is not None:
            return self._wait_until(time.monotonic() + timeout, timeout)
        while True:
            code = self._ended(0)
            if code is not None:
                return code

    def _wait_until(self, deadline: float, timeout: float) -> int:
        while True:
            code = self._ended(os.WNOHANG)
            if code is not None:
                return code
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(min(_POLL_SECONDS / 10, left))

    def _ended(self, flags: int) -> int | None:
        """Return the exit status; read it before the process is reaped."""
        if self.returncode is not None:
            return self.returncode
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | flags)
        except ChildProcessError:  # SIGCHLD is ignored, or another thread was quicker
            self.returncode = 0 if self.returncode is None else self.returncode
            waited_for.discard(self.pid)
            return self.returncode
        if ended is None:
            return None
        exited = ended.si_code == os.CLD_EXITED
        self.returncode = ended.si_status if exited else -ended.si_status
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        waited_for.discard(self.pid)
        return self.returncode


def open_end(pid: int) -> int | None:
    """Return a descriptor that is readable once a process has ended.

    None where there is none: Python may be built without it, the kernel may be older than 5.3, or a
    sandbox may forbid it.

    Raises:
        ProcessLookupError: there is no such process.
    """
    open_pidfd = getattr(os, "pidfd_open", None)
    if open_pidfd is None:
        return None
    try:
        return int(open_pidfd(pid))
    except ProcessLookupError:
        raise
    except OSError:
        return None


@contextmanager
def end_of(pid: int) -> Iterator[int | None]:
    """Hold a descriptor that is readable once a child that nobody has waited for has ended.

    Yields:
        The descriptor; None where there is none.
    """
    try:
        handle = open_end(pid)
    except ProcessLookupError:  # somebody has waited for it
        handle = None
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def describe_exit(code: int | None) -> str:
    """Return an exit status in words: ``exit status 3``, ``ended by SIGKILL``."""
    if code is None:
        return "did not start"
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    input: str | None = None,
    check: bool = True,
) -> CompletedCommand:
    """Run one command to its end and return its output.

    Raises:
        ProcessError: it cannot be started, took too long, or (with ``check``) failed.
    """
    process = start(
        argv,
        env=env,
        cwd=cwd,
        stdin=DEVNULL if input is None else PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    data = None if input is None else input.encode()
    try:
        out, err = process.communicate(data, timeout=timeout)
    except subprocess.TimeoutExpired as exc:
        stop(process, 0)
        reason = f"took more than {timeout:g} s"
        error = ProcessError(argv, process.returncode, _drain(process), reason=reason)
        error.timed_out = True
        raise error from exc
    except BaseException:
        stop(process, 0)
        raise
    stdout, stderr = out.decode(errors="replace"), err.decode(errors="replace")
    if check and process.returncode != 0:
        raise ProcessError(argv, process.returncode, stderr.strip() or stdout)
    return CompletedCommand(tuple(argv), process.returncode, stdout, stderr)


def output_of(process: Process, timeout: float, limit: int = 1 << 20) -> bytes | None:
    """Return what a process writes until it ends; None where it takes too long, and is killed then.

    So is one that writes ``limit`` bytes, which are returned. The end of what is killed is not
    waited for: a driver of the kernel may hold it.
    """
    until = time.monotonic() + timeout
    output = _read(process.stdout, until, limit)
    try:
        if output is not None and len(output) < limit:
            process.wait(max(0.0, until - time.monotonic()))
            return output
    except subprocess.TimeoutExpired:
        output = None
    _signal_group(process.pid, signal.SIGKILL)
    return output


def _read(pipe: IO[bytes] | None, until: float, limit: int) -> bytes | None:
    """Read a pipe to its end, at most ``limit`` bytes; None after the time limit."""
    output = b""
    if pipe is None:
        return output
    with pipe, selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while len(output) < limit:
            if not ready.select(max(0.0, until - time.monotonic())):
                return None
            chunk = os.read(pipe.fileno(), limit - len(output))
            if not chunk:
                break
            output += chunk
    return output


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: Stream = DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
) -> Process:
    """Start a command as the leader of a new session and return at once.

    The kernel sends it SIGTERM when the *thread* that called this ends: start from a thread that
    lives as long as the process should.

    Raises:
        ProcessError: it cannot be started.
    """
    log.debug("start: %s", shlex.join(masked(argv)))
    mark = f"{os.getpid()}-{time.time_ns()}-{next(_SERIAL_NUMBERS)}"
    marks = "/".join(filter(None, (os.environ.get(MARK), mark)))
    full_env = {**(os.environ if env is None else env), MARK: marks}
    try:
        process = Process(
            list(argv),
            env=full_env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_before_exec(),  # few system calls; libc is loaded before the fork
        )
    except (OSError, subprocess.SubprocessError) as exc:
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ProcessError(argv, None, reason=f"cannot be started ({why})") from exc
    process.mark = mark
    waited_for.add(process.pid)
    return process


def stop(process: subprocess.Popen[bytes], grace: float) -> int:
    """End a process and everything that it started; nothing of it is left running.

    SIGTERM goes to its process group, and to every descendant that is left once the leader has
    ended. Whatever is alive ``grace`` seconds later gets SIGKILL, also processes in sessions of
    their own, such as the workers of ``torchrun``.

    Returns:
        The exit status of the process, negative for a signal.
    """
    mark = process.mark if isinstance(process, Process) else ""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
    _end(process, mark, grace)
    return process.wait()


def _end(process: subprocess.Popen[bytes], mark: str, grace: float) -> None:
    """Wait ``grace`` seconds for all members to end, then kill until they have."""
    term_until = time.monotonic() + grace
    kill_until = term_until + _KILL_SECONDS  # a process in uninterruptible sleep cannot be killed
    terminated: set[int] = set()
    looks = 0
    while time.monotonic() < kill_until or looks < _KILL_LOOKS:
        killing = time.monotonic() >= term_until
        looks += killing
        leader_ended = process.poll() is not None
        if leader_ended or killing:
            # A child that becomes an orphan during the search may be missed once.
            members = members_of(process.pid, mark) or members_of(process.pid, mark)
            if leader_ended and not members:
                return
            if leader_ended:
                _signal_each(sorted(members - terminated), signal.SIGTERM)
                terminated |= members
            if killing:  # parents first, as a rule: a shell would report the end of its children
                _signal_each(sorted(members), signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    members = members_of(process.pid, mark)
    log.warning("processes of group %d do not end: %s", process.pid, sorted(members))


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _signal_each(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _drain(process: subprocess.Popen[bytes]) -> str:
    """Return the output of a stopped process without waiting for pipes that others hold."""
    try:
        out, err = process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    text: str = (err.strip() or out).decode(errors="replace")
    return text


def _before_exec() -> Callable[[], None]:
    ask = end_with_parent()

    def prepare() -> None:
        open_files.restore_open_files()
        ask()

    return prepare
