"""Commands of the real product, and what they say judged."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .deadline import Deadline
from .rounds import REFUSED, Round, require

REPO = Path(__file__).resolve().parents[2]
STAGER = [sys.executable, "-m", "stager"]
_SECONDS = 50.0
Limits = Sequence[tuple[int, int]]
BEFORE_OURS = "Fatal Python error: init_import_site"  # Ctrl-C before a line of the product


@dataclass(frozen=True, kw_only=True)
class Done:
    argv: tuple[str, ...]
    code: int  # negative where a signal ended it
    out: str
    err: str

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


class Running(NamedTuple):
    argv: tuple[str, ...]
    out: Path  # where what it says goes, in two files
    pid: int
    poll: Callable[[], int | None]  # returns how it ended; None while it runs


def start(
    round_: Round,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    folder: str = "project",
) -> Running:
    out = _prepared(round_, folder)
    with out.with_suffix(".out").open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
        process = subprocess.Popen(
            [*STAGER, *argv],
            cwd=round_.folder / folder,
            env=environment(round_, env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    return Running(tuple(argv), out, process.pid, process.poll)


def stager(
    round_: Round,
    *argv: str,
    env: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
    process: bool = False,
    folder: str = "project",
    limits: Limits = (),
) -> Done:
    """Run ``stager`` to its end, in the round's project; after ``seconds`` a promise is broken.

    With ``process`` in a Python of its own, where the start matters; else a fork of this process
    calls the program's entry point, which is the same and many times as quick. ``limits`` are
    resources and how much of them it may use.
    """
    if process:
        return finish(start(round_, argv, env=env, folder=folder), seconds)
    out = _prepared(round_, folder)
    child = os.fork()
    if child == 0:
        for which, most in limits:
            resource.setrlimit(which, (most, most))
        _become(argv, round_.folder / folder, environment(round_, env), out)
    return finish(Running(argv, out, child, partial(_poll, child)), seconds)


def finish(running: Running, seconds: float) -> Done:
    """Wait for a command that was started; one that goes on for too long breaks a promise."""
    deadline, pause, hangs = Deadline(seconds), 0.001, False
    while (code := running.poll()) is None:
        if deadline.passed() and not hangs:
            hangs = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    paths = map(running.out.with_suffix, (".out", ".err"))
    out, err = (path.read_text(errors="replace") for path in paths)
    done = Done(argv=("stager", *running.argv), code=code, out=out, err=err)
    require(not hangs, f"a command ends within {seconds:.0f} seconds", done)
    return done


def _poll(pid: int) -> int | None:
    number, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if number else None


def _prepared(round_: Round, folder: str) -> Path:
    """Make what a command finds; return where what it says goes."""
    for name in ("tmp", "home", "said", folder):
        (round_.folder / name).mkdir(exist_ok=True)
    said = round_.folder / "said"
    return said / f"stager-{len(list(said.iterdir()))}"


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


def sound(done: Done) -> Done:
    """Hold what every command promises: an exit code of its own, and no traceback."""
    if done.err.startswith(BEFORE_OURS):
        return done
    trace = "Traceback (most recent call last)"
    require(trace not in done.err + done.out, "no traceback", done)
    require(done.code in (0, 1, 2, 3), "the exit code is 0, 1, 2 or 3", done)
    return done


def succeeded(done: Done) -> Done:
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
