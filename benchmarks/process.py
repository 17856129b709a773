"""Starting commands and taking their time; the only place here that starts processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BenchError
from .rounds import Value

PATIENCE = 1200.0
"""Seconds that any one command may take."""
_PR_SET_CHILD_SUBREAPER = 36
_ORPHANS_END = 3.0
"""Seconds that what a command leaves behind gets to end."""
_SHOWN = 15
"""Lines of a failed command's output that its error repeats."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command that ended well."""

    seconds: float
    """From its start to its end."""
    cpu: float
    """User and system seconds of it and of all that it started."""
    out: str
    """Its standard output."""
    first: float | None = None
    """Seconds until the line that was waited for; None where none was."""

    @property
    def value(self) -> Value:
        """Its time as a measured value."""
        return Value(value=self.seconds, cpu=self.cpu)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to measure."""

    argv: tuple[str, ...]
    """Program and arguments."""
    cwd: Path
    """Where."""
    env: Mapping[str, str]
    """All variables."""
    until: str = ""
    """A piece of a line of output whose coming is timed."""


def added(*ran: Ran) -> Value:
    """The time of commands that were run one after the other."""
    return Value(value=sum(one.seconds for one in ran), cpu=sum(one.cpu for one in ran))


def run(command: Command) -> Ran:
    """Run a command to its end and take the wall clock around it.

    Raises:
        BenchError: it cannot be started, fails, takes too long, or the line waited for never came.
    """
    before = _cpu()
    started = time.perf_counter()
    with _started(command) as process:
        out, err, first = _heard(process, command, started)
        code = process.wait()
        seconds = time.perf_counter() - started
        _reap(process.pid)
    if code != 0:
        raise BenchError(
            f"{Path(command.argv[0]).name} failed with exit status {code}",
            where=f"{_shown(command)} (in {command.cwd})",
            why="\n    ".join((err or out).strip().splitlines()[-_SHOWN:]),
            fix="run the command by hand; what a benchmark compares must work first",
        )
    if command.until and first is None:
        raise BenchError(
            f"no line with {command.until!r} came", where=_shown(command), why=out[-500:]
        )
    return Ran(seconds=seconds, cpu=_cpu() - before, out=out, first=first)


@contextlib.contextmanager
def _started(command: Command) -> Iterator[subprocess.Popen[bytes]]:
    """The process in a session of its own; all of the session ends with the block."""
    try:
        process = subprocess.Popen(
            command.argv,
            cwd=command.cwd,
            env=dict(command.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as exc:
        raise BenchError(
            f"{command.argv[0]} cannot be started",
            where=_shown(command),
            why=exc.strerror or str(exc),
        ) from exc
    try:
        yield process
    except BaseException:
        _end(process)
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command to end as Ctrl-C does, so that it tidies up; then insist."""
    for number, patience in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(patience)
            return


def _heard(
    process: subprocess.Popen[bytes], command: Command, started: float
) -> tuple[str, str, float | None]:
    """Both outputs, and when the line that is waited for came."""
    chunks: dict[int, list[bytes]] = {}
    first: float | None = None
    wanted = command.until.encode()
    with selectors.DefaultSelector() as waiting:
        for stream in filter(None, (process.stdout, process.stderr)):
            chunks[stream.fileno()] = []
            waiting.register(stream, selectors.EVENT_READ)
        order = list(chunks)
        while waiting.get_map():
            if time.perf_counter() - started > PATIENCE:
                raise BenchError(f"it takes over {PATIENCE:.0f} s", where=_shown(command))
            for key, _ in waiting.select(1.0):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    waiting.unregister(key.fileobj)
                    continue
                chunks[key.fd].append(chunk)
                if wanted and first is None and wanted in b"".join(chunks[key.fd][-2:]):
                    first = time.perf_counter() - started
    out, err = (b"".join(chunks[handle]).decode(errors="replace") for handle in order)
    return out, err, first


def adopt_orphans() -> None:
    """Become the parent of whatever a command leaves behind, so that its CPU time is counted.

    Python's fork server, for one, outlives the program that started it by a moment; its children
    have done most of the work.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap(group: int) -> None:
    """Wait for the orphans of a command's process group, if they end soon."""
    end = time.monotonic() + _ORPHANS_END
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def _shown(command: Command) -> str:
    text = " ".join(command.argv)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _cpu() -> float:
    """Seconds that all children that have been waited for have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def clean_environment(home: Path, path: Sequence[Path], **more: str) -> dict[str, str]:
    """The variables of a measured command: no one's settings but the benchmark's.

    Args:
        home: a home of its own.
        path: directories that come first on ``PATH``.
        more: further variables.
    """
    places = [*map(str, path), os.environ.get("PATH", os.defpath)]
    return {
        "PATH": os.pathsep.join(places),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_NO_CONFIG": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }
