"""Commands of the real product, and what they say judged."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .deadline import Deadline
from .rounds import REFUSED, Round, require

REPO = Path(__file__).resolve().parents[2]
STAGER = [sys.executable, "-m", "stager"]
_SECONDS = 50.0
Limits = Sequence[tuple[int, int]]
_TRACE = "Traceback (most recent call last)"
_BEFORE_OURS = "Fatal Python error: init_import_site"
"""Ctrl-C while Python looks for its packages: no line of the product has run by then."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    argv: tuple[str, ...]
    """What was run."""
    code: int
    """Its exit code; negative where a signal ended it."""
    out: str
    """Standard output."""
    err: str
    """Standard error."""

    def __str__(self) -> str:
        return f"$ {' '.join(self.argv)}\nexit {self.code}\n{self.out[-2000:]}{self.err[-3000:]}"


def environment(round_: Round, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables a round's commands see: nothing of the caller's but the search path."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(round_.folder / "home"),
        "TMPDIR": str(round_.folder / "tmp"),
        "OFFLINE_ROOT": str(round_.offline),
        "STAGER_NODE_ROOT": str(round_.nodes),
        "UV_CACHE_DIR": str(round_.world.place / "uv-cache"),
        "UV_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(round_.world.wheels),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": str(REPO),
        "PYTHONDONTWRITEBYTECODE": "1",
        **(more or {}),
    }


def start(
    round_: Round,
    argv: Sequence[str],
    *,
    out: Path,
    env: Mapping[str, str] | None = None,
    folder: str = "project",
) -> subprocess.Popen[bytes]:
    """Start ``stager`` in a session of its own; what it says goes to two files beside ``out``."""
    for name in ("tmp", "home", folder):
        (round_.folder / name).mkdir(exist_ok=True)
    with out.with_suffix(".out").open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
        return subprocess.Popen(
            [*STAGER, *argv],
            cwd=round_.folder / folder,
            env=environment(round_, env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def stager(
    round_: Round,
    *argv: str,
    env: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
    process: bool = False,
    folder: str = "project",
    limits: Limits = (),
) -> Done:
    """Run ``stager`` to its end, in the round's project.

    Args:
        round_: the round.
        *argv: the command line.
        env: further variables.
        seconds: after which it is a broken promise.
        process: start a Python for it, where the start matters; else a fork of this process calls
            the program's own entry point, which is the same and many times as quick.
        folder: where it is run, in the round's folder.
        limits: resources and how much of them it may use.
    """
    out = _fresh(round_.folder / "said", "stager")
    if process:
        return finish(start(round_, argv, out=out, env=env, folder=folder), argv, out, seconds)
    for name in ("tmp", "home", folder):
        (round_.folder / name).mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        for which, most in limits:
            resource.setrlimit(which, (most, most))
        _become(argv, round_.folder / folder, environment(round_, env), out)
    return finish(_Forked(child), argv, out, seconds)


def finish(
    process: subprocess.Popen[bytes] | _Forked, argv: Sequence[str], out: Path, seconds: float
) -> Done:
    """Wait for a command that was started; one that goes on for too long breaks a promise."""
    deadline = Deadline(seconds)
    pause = 0.001
    while (code := process.poll()) is None:
        if deadline.passed():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            done = said(argv, -9, out)
            require(False, f"a command ends within {seconds:.0f} seconds", done)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return said(argv, code, out)


def said(argv: Sequence[str], code: int, out: Path) -> Done:
    """Return how a command ended, with what it said."""
    texts = [out.with_suffix(kind).read_text(errors="replace") for kind in (".out", ".err")]
    return Done(argv=("stager", *argv), code=code, out=texts[0], err=texts[1])


class _Forked:
    """A child of ours that is no ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            number, status = os.waitpid(self.pid, os.WNOHANG)
            if number:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _become(argv: Sequence[str], folder: Path, env: Mapping[str, str], out: Path) -> None:
    """Call the program's entry point in this process, and end as a Python that ran it would."""
    code = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        os.chdir(folder)
        for number, kind in ((1, ".out"), (2, ".err")):
            handle = os.open(out.with_suffix(kind), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, number)
            os.close(handle)
        from stager.cli import main

        code = main(list(argv))
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)


def _fresh(folder: Path, stem: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{stem}-{len(list(folder.iterdir()))}"


def sound(done: Done) -> Done:
    """Hold what every command promises: an exit code of its own, and no traceback."""
    if done.err.startswith(_BEFORE_OURS):
        return done
    require(_TRACE not in done.err + done.out, "no traceback", done)
    require(done.code in (0, 1, 2, 3), "the exit code is 0, 1, 2 or 3", done)
    return done


def succeeded(done: Done) -> Done:
    """Hold that a command has done what it was asked for."""
    sound(done)
    require(done.code == 0, "the command succeeds", done)
    return done


def refused(done: Done) -> str:
    """Hold that a command refused: an exit code that says so, and one error message."""
    sound(done)
    require(done.code != 0, "it is refused", done)
    errors = re.findall(r"^(?:error: |stager: |Error: )(.*)$", done.err, re.MULTILINE)
    if done.code in (1, 2):
        require(len(errors) == 1, "there is one error message", done)
    require(any(errors) or done.code == 3, "the message says something", done)
    return REFUSED
