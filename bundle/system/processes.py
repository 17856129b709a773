"""The only place on the far side that starts processes.

Arguments are lists, never a shell's line. Each command is logged before it runs. Every process
leads a session of its own and is told to end when the thread that started it does, so that a
killed agent leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Callable, Union

from ..redaction.masking import masked
from . import open_files

log = logging.getLogger(__name__)

TAIL_LINES = 15
MARK = "STAGER_PROCESS"
"""The variable by which :func:`stop` finds descendants that left for a session of their own.

It holds one token for each :func:`start` on the way from the first process, joined by slashes. What
has lost it besides, as by ``env -i``, is found where :func:`adopt_orphans` was called.
"""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0
_STARTED = itertools.count()
_waited_for: set[int] = set()
"""Processes that :func:`start` has started and whose exit status nobody has taken yet."""
_adopting = [False]
"""Whether orphans become children of this process."""

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL

Stream = Union[int, IO[bytes], None]
"""What ``subprocess.Popen`` takes for a stream."""


@dataclass(frozen=True)
class Completed:
    """What a finished command left behind."""

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
        tail: the last lines it wrote to standard error, or else to standard output.
        reason: what happened, in a few words.
    """

    def __init__(
        self, argv: Sequence[str], code: int | None, output: str = "", *, reason: str = ""
    ) -> None:
        self.argv = tuple(argv)
        self.code = code
        self.tail = tuple(output.strip().splitlines()[-TAIL_LINES:])
        self.reason = reason or describe_exit(code)
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
        """Its exit status, negative for a signal; None while it runs."""
        return self._ended(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and give its exit status.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than ``timeout`` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            code = self._ended(0 if until is None else os.WNOHANG)
            if code is not None:
                return code
            if until is not None and timeout is not None:
                if time.monotonic() >= until:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(min(_POLL_SECONDS / 10, max(0.0, until - time.monotonic())))

    def _ended(self, flags: int) -> int | None:
        """The exit status: looked at, noted, and only then taken from the kernel."""
        if self.returncode is not None:
            return self.returncode
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | flags)
        except ChildProcessError:  # somebody ignores SIGCHLD, or another thread was quicker
            self.returncode = 0 if self.returncode is None else self.returncode
            _waited_for.discard(self.pid)
            return self.returncode
        if found is None:
            return None
        exited = found.si_code == os.CLD_EXITED
        self.returncode = found.si_status if exited else -found.si_status
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        _waited_for.discard(self.pid)
        return self.returncode


def describe_exit(code: int | None) -> str:
    """An exit status in words: ``exit status 3``, ``ended by SIGKILL``."""
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
) -> Completed:
    """Run one command to its end and return what it wrote.

    Args:
        argv: the program and its arguments.
        timeout: seconds after which it is killed, with all that it started.
        env: its whole environment; None for this process's.
        cwd: the directory to run in; None for this one.
        input: text for its standard input; None for an empty one.
        check: whether an exit status other than 0 raises.

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
        raise ProcessError(argv, process.returncode, _drain(process), reason=reason) from exc
    except BaseException:
        stop(process, 0)
        raise
    stdout, stderr = out.decode(errors="replace"), err.decode(errors="replace")
    if check and process.returncode != 0:
        raise ProcessError(argv, process.returncode, stderr.strip() or stdout)
    return Completed(tuple(argv), process.returncode, stdout, stderr)


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
    mark = f"{os.getpid()}-{time.time_ns()}-{next(_STARTED)}"
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
            preexec_fn=_die_with_parent(),  # a few system calls; libc is loaded before the fork
        )
    except (OSError, subprocess.SubprocessError) as exc:
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ProcessError(argv, None, reason=f"cannot be started ({why})") from exc
    process.mark = mark
    _waited_for.add(process.pid)
    return process


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended; :func:`stop` ends them, too.

    It is for a process that looks after the user's programs: these may start others in a session of
    their own and without our variable, and leave them behind. Whoever calls this must not start
    processes in one thread and stop others in another at the same time: what was started just now
    would pass for an orphan. A program that takes this one's place (``execve``) keeps the role.
    """
    with suppress(OSError, AttributeError):
        _adopting[0] = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def reap_orphans() -> None:
    """Let orphans go that have ended by themselves: an adopted zombie stays until it is waited for.

    It costs one system call where there are none.
    """
    while _adopting[0]:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or not _is_orphan(ended.si_pid):
                return  # its own waiter takes it soon, and those behind it come next time
        except (ChildProcessError, ProcessLookupError):
            return
        with suppress(ChildProcessError):  # another thread was quicker
            os.waitpid(ended.si_pid, os.WNOHANG)


def _is_orphan(child: int) -> bool:
    """Tell a child that was adopted from one that was started, or forked, by this process.

    Forked ones stay in our session, where none of those that are started here ever gets back.
    """
    return child not in _waited_for and os.getsid(child) != os.getsid(0)


def stop(process: subprocess.Popen[bytes], grace: float) -> int:
    """End a process and all that it started; nothing of it is left running.

    SIGTERM goes to its process group, and to every descendant that is there once the leader is
    gone; what still lives ``grace`` seconds later gets SIGKILL, also those in sessions of their
    own, as the workers of ``torchrun`` are.

    Returns:
        The exit status of the process, negative for a signal.
    """
    mark = process.mark if isinstance(process, Process) else ""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
    _end(process, mark, grace)
    return process.wait()


def _end(process: subprocess.Popen[bytes], mark: str, grace: float) -> None:
    """Wait ``grace`` seconds for all members to be gone, then kill until they are."""
    term_until = time.monotonic() + grace
    kill_until = term_until + _KILL_SECONDS  # a process in uninterruptible sleep cannot be killed
    told: set[int] = set()
    while time.monotonic() < kill_until:
        killing = time.monotonic() >= term_until
        gone = process.poll() is not None
        if gone or killing:
            # A child that becomes an orphan while we look may be missed once.
            members = set(_members(process.pid, mark)) or set(_members(process.pid, mark))
            if gone and not members:
                return
            if gone:
                _signal_each(sorted(members - told), signal.SIGTERM)
                told |= members
            if killing:  # parents first, as a rule: a shell would tell of what happened to others
                _signal_each(sorted(members), signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    members = set(_members(process.pid, mark))
    log.warning("processes of group %d do not end: %s", process.pid, sorted(members))


def _members(group: int, mark: str) -> Iterator[int]:
    """Living processes of a group or session, those that carry the mark, and orphans; no zombies.

    Of several processes that end their orphans belong to the one that is stopped first.
    """
    reap_orphans()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            # proc(5): the name, in parentheses, may hold anything; then state ppid pgrp session
            state, parent, pgrp, session = (
                (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            )
            pid = int(entry.name)
            if state in "ZX":
                continue
            if (
                group in (int(pgrp), int(session))
                or (_adopting[0] and int(parent) == os.getpid() and _is_orphan(pid))
                or (mark and mark in _marks((entry / "environ").read_bytes()))
            ):
                yield pid


def _marks(environ: bytes) -> list[str]:
    """The tokens in an environment as /proc shows it."""
    prefix = f"{MARK}=".encode()
    held = [item for item in environ.split(b"\0") if item.startswith(prefix)]
    return held[0][len(prefix) :].decode(errors="replace").split("/") if held else []


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _signal_each(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _drain(process: subprocess.Popen[bytes]) -> str:
    """What a stopped process had written; not waiting for pipes that someone else holds open."""
    try:
        out, err = process.communicate(timeout=1)
    except subprocess.TimeoutExpired:
        return ""
    text: str = (err.strip() or out).decode(errors="replace")
    return text


def _die_with_parent() -> Callable[[], None] | None:
    """What a child does between fork and exec; loads libc now, as that is unsafe after a fork."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    parent = os.getpid()

    def ask() -> None:
        open_files.restore_open_files()
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request was made
            os._exit(1)

    return ask
