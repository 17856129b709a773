"""Starting programs, and looking for what still runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

Done = subprocess.CompletedProcess[str]


def run(
    argv: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    given: str | None = None,
    seconds: float = 900,
) -> Done:
    """Run a program to its end, however it ends; what it says is kept."""
    words, said = list(map(str, argv)), subprocess.PIPE
    source = {"input": given} if given is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        words, cwd=cwd, env=env, text=True, stdout=said, stderr=said, check=False, timeout=seconds,
        **source,
    )  # fmt: skip


def start(
    argv: Sequence[object], *, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a program as a shell does: in a process group of its own, which Ctrl-C reaches."""
    words, said = list(map(str, argv)), subprocess.PIPE
    return subprocess.Popen(
        words, cwd=cwd, env=env, text=True, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        start_new_session=True,
    )  # fmt: skip


def living(*places: str | Path) -> list[str]:
    """Command lines of processes, zombies aside, that name one of these places."""
    wanted = [os.fsencode(place) for place in places]
    return [
        line.replace(b"\0", b" ").decode(errors="replace")
        for number, line in command_lines()
        if number != os.getpid() and any(place in line for place in wanted)
    ]


def command_lines() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield int(entry.name), (entry / "cmdline").read_bytes()


def stat_fields(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    return stat_fields(pid)[:1] not in ([], ["Z"])


def until(condition: Callable[[], bool], seconds: float = 600, *, pause: float = 0.1) -> bool:
    """Whether something comes true in that time, which is only a guard: a machine may be busy."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
