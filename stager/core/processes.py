"""The only place on the login side that starts processes.

Arguments are lists, never a shell's line. Each command is logged before it runs, has a time limit,
and on failure raises an error that carries the command, its exit code and the end of its output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from bundle.channel.frames import Lines
from bundle.redaction.secrets import masked
from bundle.system.processes import CompletedCommand, end_with_parent
from bundle.system.signals import USER_SIGNALS

from .errors import StagerError

log = logging.getLogger(__name__)

TAIL_LINES = 15

_CHUNK = 1 << 16


class CommandError(StagerError):
    """A command ended with an exit status other than 0, or ran out of time."""

    def __init__(self, completed: CompletedCommand, *, reason: str) -> None:
        tail = (completed.stderr.strip() or completed.stdout.strip()).splitlines()[-TAIL_LINES:]
        super().__init__(f"{reason}: {shlex.join(masked(completed.argv))}", context=tail)
        self.completed = completed


Runner = Callable[..., CompletedCommand]
"""The type of :func:`run`; functions that start processes take one, with ``run`` as default."""


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> CompletedCommand:
    """Run one command to its end and return its output.

    Raises:
        CommandError: the command failed (with ``check``), or took longer than ``timeout``.
        StagerError: the program does not exist or cannot be started.
    """
    full_env = {**os.environ, **env} if env is not None else None
    return _finish(argv, _Setting(environment=full_env, cwd=cwd), timeout=timeout, check=check)


def feed(
    argv: Sequence[str], text: str, *, environment: Mapping[str, str], timeout: float
) -> CompletedCommand:
    """Run one command that reads a text from its standard input.

    Raises:
        CommandError: the command failed, or took longer than ``timeout``.
        StagerError: the program does not exist or cannot be started.
    """
    setting = _Setting(environment=environment, text=text)
    return _finish(argv, setting, timeout=timeout, check=True)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    environment: Mapping[str, str] | None = None
    cwd: Path | None = None
    text: str | None = None


def _finish(
    argv: Sequence[str], setting: _Setting, *, timeout: float, check: bool
) -> CompletedCommand:
    log.debug("run: %s", shlex.join(masked(argv)))
    try:
        process = subprocess.Popen(
            list(argv),
            env=setting.environment,
            cwd=setting.cwd,
            stdin=subprocess.DEVNULL if setting.text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=end_with_parent(),  # noqa: PLW1509 - two system calls, no lock is taken
        )
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc
    timed_out = False
    try:
        stdout, stderr = process.communicate(setting.text, timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # The whole session: a resolver that outlives its time may have children of its own.
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if timed_out:
        stdout, stderr = process.communicate()
    completed = CompletedCommand(
        argv=tuple(argv), returncode=process.returncode, stdout=stdout, stderr=stderr
    )
    if timed_out:
        raise CommandError(completed, reason=f"the command took more than {timeout:g} s")
    if check and completed.returncode != 0:
        raise CommandError(completed, reason=f"exit status {completed.returncode}")
    return completed


def inform(argv: Sequence[str], text: str, *, timeout: float) -> None:
    """Run one command that reads a text from its standard input, and writes to standard error.

    What it starts in the background does not keep this process waiting.

    Raises:
        CommandError: the command failed, or took longer than ``timeout``.
        StagerError: the program does not exist or cannot be started.
    """
    log.debug("run: %s", shlex.join(masked(argv)))
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent(),  # noqa: PLW1509 - two system calls, no lock is taken
        )
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc
    reason = ""
    try:
        process.communicate(text, timeout=timeout)
    except subprocess.TimeoutExpired:
        reason = f"the command took more than {timeout:g} s"
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if code and not reason:
        reason = f"exit status {code}"
    if reason:
        completed = CompletedCommand(argv=tuple(argv), returncode=code, stdout="", stderr="")
        raise CommandError(completed, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Outcome of a followed command."""

    returncode: int
    """Its exit status; negative for the signal that ended it."""
    interrupted: bool
    """True if it was interrupted, by Ctrl-C or a signal to this process."""


def stream(
    argv: Sequence[str],
    on_line: Callable[[str], None],
    *,
    on_talk: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
    end_it: Callable[[int], None] | None = None,
    pass_on: Callable[[int, int], None] | None = None,
) -> Streamed:
    """Run a command that reports line by line, and return its outcome.

    An interrupted command ends by itself; its last lines are still passed on, and so is the line
    being handled. Ctrl-C reaches it directly, unless ``end_it`` is given. It gets SIGTERM when this
    process ends.

    Args:
        argv: the program and its arguments.
        on_line: called with each line of its standard output.
        on_talk: called with each line of its standard error; None leaves that as it is.
        environment: all its variables; None for this process's own.
        end_it: called with its process id each time that this process is interrupted; the command
            then has a session of its own, without the terminal. None sends it SIGINT.
        pass_on: called with its process id and SIGUSR1 or SIGUSR2, when this process gets one.

    Raises:
        StagerError: it cannot be started.
    """
    process = _start_piped(argv, environment, talks=on_talk is not None, alone=end_it is not None)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        first, interrupted = not interrupted, True
        with contextlib.suppress(ProcessLookupError):
            if end_it is None and first:
                process.send_signal(signal.SIGINT)
            elif end_it is not None and process.returncode is None:  # else its id may be another's
                end_it(process.pid)

    def signal_it(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pass_on is not None and process.returncode is None:
                pass_on(process.pid, number)

    with _interrupts_call(interrupt), _user_signals_call(signal_it), _Lines() as lines:
        lines.add(process.stdout, on_line)
        lines.add(process.stderr, on_talk)
        try:
            lines.pass_on()
        except BaseException:  # closed pipes end it
            lines.close()
            process.wait()
            raise
        return Streamed(returncode=process.wait(), interrupted=interrupted)


def _start_piped(
    argv: Sequence[str], environment: Mapping[str, str] | None, *, talks: bool, alone: bool
) -> subprocess.Popen[bytes]:
    log.debug("stream: %s", shlex.join(masked(argv)))
    try:
        return subprocess.Popen(
            list(argv),
            env=dict(environment) if environment is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if talks else None,
            start_new_session=alone,
            preexec_fn=end_with_parent(),  # noqa: PLW1509 - two system calls, no lock is taken
        )
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc


@contextlib.contextmanager
def _interrupts_call(act: Callable[[], None]) -> Iterator[None]:
    """Call a function at each interrupt, instead of raising KeyboardInterrupt.

    The exception could be raised anywhere, and the line being handled would be lost. After the
    first interrupt the handlers stay, so that further ones cannot stop the report of what happened.
    Signals with another handler, and threads that get no signals, are left as they are.
    """
    numbers = _interrupting_signals()
    called = False

    def call(number: int, frame: FrameType | None) -> None:
        nonlocal called
        called = True
        act()

    for number in numbers:
        signal.signal(number, call)
    try:
        yield
    finally:
        if not called:
            for number in numbers:
                signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def _user_signals_call(act: Callable[[int], None]) -> Iterator[None]:
    """Call a function at SIGUSR1 and SIGUSR2 while the block runs; nothing in another thread."""
    own = threading.current_thread() is threading.main_thread()
    numbers = USER_SIGNALS if own else ()
    before = {number: signal.signal(number, lambda got, _: act(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupting_signals() -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    return [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.default_int_handler
    ]


class _Lines:
    """Several pipes read at the same time, line by line, in one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._pipes: list[IO[bytes]] = []
        self._ready: deque[tuple[Callable[[str], None], bytes]] = deque()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, pipe: IO[bytes] | None, on_line: Callable[[str], None] | None) -> None:
        if pipe is not None and on_line is not None:
            self._pipes.append(pipe)
            self._selector.register(pipe, selectors.EVENT_READ, (on_line, Lines()))

    def pass_on(self) -> None:
        while True:
            while self._ready:
                on_line, line = self._ready.popleft()
                on_line(line.decode(errors="replace"))
            if not self._selector.get_map():
                return
            for key, _ in self._selector.select():
                self._read(key)

    def _read(self, key: selectors.SelectorKey) -> None:
        on_line, lines = key.data
        chunk = os.read(key.fd, _CHUNK)
        self._ready.extend((on_line, line) for line in lines.feed(chunk))
        if chunk:
            return
        last = lines.last()
        if last:
            self._ready.append((on_line, last))
        self._selector.unregister(key.fileobj)

    def close(self) -> None:
        """Close the pipes; a process that writes to them then gets SIGPIPE."""
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()


def become(argv: Sequence[str]) -> None:
    """Replace this process by a command; returns only by raising.

    Raises:
        StagerError: it cannot be started.
    """
    log.debug("become: %s", shlex.join(masked(argv)))
    try:
        os.execv(argv[0], list(argv))  # noqa: S606 - no shell is wanted
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc


def _cannot_start(argv: Sequence[str], exc: OSError) -> StagerError:
    return StagerError(
        f"cannot start {argv[0]}: {exc.strerror or exc}",
        hint="check that the program is installed and on PATH",
    )
