"""The only place on the login side that starts processes.

Arguments are lists, never a shell's line. Each command is logged before it runs, has a time limit,
and on failure raises an error that carries the command, its exit code and the end of its output.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import StagerError

log = logging.getLogger(__name__)

TAIL_LINES = 15

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True)
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


class CommandError(StagerError):
    """A command ended with an exit status other than 0, or ran out of time."""

    def __init__(self, completed: Completed, *, reason: str) -> None:
        tail = (completed.stderr.strip() or completed.stdout.strip()).splitlines()[-TAIL_LINES:]
        super().__init__(f"{reason}: {shlex.join(completed.argv)}", context=tail)
        self.completed = completed


Runner = Callable[..., Completed]
"""The type of :func:`run`; functions that start processes take one, with ``run`` as default."""


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> Completed:
    """Run one command to its end and return what it wrote.

    Args:
        argv: the program and its arguments.
        timeout: seconds after which the command is killed.
        env: variables to add to this process's environment; None adds nothing.
        cwd: the directory to run in; None for this one.
        check: whether an exit status other than 0 raises.

    Raises:
        CommandError: the command failed (with ``check``), or took longer than ``timeout``.
        StagerError: the program does not exist or cannot be started.
    """
    log.debug("run: %s", shlex.join(argv))
    full_env = {**os.environ, **env} if env is not None else None
    try:
        process = subprocess.Popen(
            list(argv),
            env=full_env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent(),  # noqa: PLW1509 - two system calls, no lock is taken
        )
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc
    late = False
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        # The whole session: a resolver that outlives its time may have children of its own.
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if late:
        stdout, stderr = process.communicate()
    completed = Completed(
        argv=tuple(argv), returncode=process.returncode, stdout=stdout, stderr=stderr
    )
    if late:
        raise CommandError(completed, reason=f"the command took more than {timeout:g} s")
    if check and completed.returncode != 0:
        raise CommandError(completed, reason=f"exit status {completed.returncode}")
    return completed


def stream(argv: Sequence[str], on_line: Callable[[str], None]) -> int:
    """Run a command that reports line by line, and return its exit status.

    It shares this process's terminal: Ctrl-C reaches it directly, and it decides how to end; its
    last lines are still passed on. Its standard error is this process's own.

    Args:
        argv: the program and its arguments.
        on_line: called with each line of its standard output.

    Raises:
        StagerError: it cannot be started.
    """
    log.debug("stream: %s", shlex.join(argv))
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc
    lines = iter(process.stdout or ())
    told = False
    while True:
        try:
            for line in lines:
                on_line(line.rstrip("\n"))
            return process.wait()
        except KeyboardInterrupt:
            if not told:
                told = True
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
        except BaseException:  # nobody reads its lines any more: that ends it
            if process.stdout is not None:
                process.stdout.close()
            process.wait()
            raise


def become(argv: Sequence[str]) -> None:
    """Replace this process by a command; returns only by raising.

    Raises:
        StagerError: it cannot be started.
    """
    log.debug("become: %s", shlex.join(argv))
    try:
        os.execv(argv[0], list(argv))  # noqa: S606 - no shell is wanted
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc


def _end_with_parent() -> Callable[[], None]:
    """What a child runs first, so that it does not outlive a build that is killed.

    It gets a signal that a resolver may tidy up after; everything is looked up before the fork.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)

    return end_with_parent


def _cannot_start(argv: Sequence[str], exc: OSError) -> StagerError:
    return StagerError(
        f"cannot start {argv[0]}: {exc.strerror or exc}",
        hint="check that the program is installed and on PATH",
    )
