"""The only place on the login side that starts processes.

Arguments are lists, never a shell's line. Each command is logged before it runs, has a time limit,
and on failure raises an error that carries the command, its exit code and the end of its output.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import StagerError

log = logging.getLogger(__name__)

TAIL_LINES = 15


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
        done = subprocess.run(
            list(argv),
            env=full_env,
            cwd=cwd,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired as exc:
        partial = Completed(
            argv=tuple(argv), returncode=-9, stdout=_text(exc.stdout), stderr=_text(exc.stderr)
        )
        raise CommandError(partial, reason=f"the command took more than {timeout:g} s") from exc
    except OSError as exc:
        raise StagerError(
            f"cannot start {argv[0]}: {exc.strerror or exc}",
            hint="check that the program is installed and on PATH",
        ) from exc
    completed = Completed(
        argv=tuple(argv), returncode=done.returncode, stdout=done.stdout, stderr=done.stderr
    )
    if check and done.returncode != 0:
        raise CommandError(completed, reason=f"exit status {done.returncode}")
    return completed


def _text(data: str | bytes | None) -> str:
    if isinstance(data, bytes):
        return data.decode(errors="replace")
    return data or ""
