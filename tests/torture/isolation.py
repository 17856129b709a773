"""A place, mounts and processes of its own for each round, all gone when it is over.

A round is played in a child process, which a deadline ends. Its worker adopts whatever the child
leaves running (``PR_SET_CHILD_SUBREAPER``), so nothing can hide. For root, each worker has a mount
namespace of its own: what a round mounts goes with it, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from .deadline import Deadline
from .rounds import BROKEN, Broken, Round

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MNT_DETACH = 2
_SUBREAPER = 36
_LEFT_SECONDS = 5.0  # in which processes that a round has started end by themselves after it


def adopt_orphans() -> None:
    _LIBC.prctl(_SUBREAPER, 1)


def own_mounts() -> bool:
    """Leave the machine's mount namespace; return whether that is allowed here."""
    if os.geteuid() != 0 or _LIBC.unshare(_CLONE_NEWNS):
        return False
    return _LIBC.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0


def mount_tmpfs(place: Path, options: str = "") -> None:
    """Mount an empty file system in memory; OSError if that is not allowed."""
    place.mkdir(parents=True, exist_ok=True)
    done = _LIBC.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, options.encode() or None)
    if done:
        raise OSError(ctypes.get_errno(), f"cannot mount a tmpfs ({options})", str(place))


def remove(place: Path) -> None:
    """Unmount a tree, whoever still uses it, and remove it, however deep and whatever its modes."""
    while os.path.ismount(place) and not _LIBC.umount2(os.fsencode(place), _MNT_DETACH):
        pass
    subprocess.run(["rm", "-rf", "--", str(place)], check=False, capture_output=True)


def play(
    attempt: Callable[[Round], str], round_: Round, *, seconds: float, own: bool
) -> dict[str, object]:
    """Play one round in a child; return its outcome, and what was broken."""
    folder = round_.folder
    folder.mkdir(parents=True)
    if own:
        mount_tmpfs(folder, "mode=0755")
    says_read, says_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(says_read)
        _child(attempt, round_, says_write, own=own)
    os.close(says_write)
    started = time.monotonic()
    lines, hangs = _listen(says_read, seconds)
    said = [json.loads(line) for line in lines.splitlines()]
    steps = [line for line in said if isinstance(line, str)]
    ended = next((line for line in said if isinstance(line, dict)), None)
    told = {"steps": steps, **(ended or _silent(child, seconds, hangs=hangs))}
    left = _end_descendants()
    if left and told["outcome"] != BROKEN:
        promise = "no process is left behind"
        told |= {"outcome": BROKEN, "promise": promise, "evidence": "\n".join(left)}
    return {"promise": "", **told, "seconds": time.monotonic() - started}


def _child(attempt: Callable[[Round], str], round_: Round, out: int, *, own: bool) -> None:
    code = 1
    try:
        os.setsid()
        # The workers ignore Ctrl-C, and so may who started them; a command must not inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        if own:
            own_mounts()
        round_.did = lambda what: _write_line(out, what)
        _write_line(out, _outcome(attempt, round_))
        code = 0
    finally:
        os._exit(code)


def _write_line(out: int, value: object) -> None:
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(out, data) :]


def _outcome(attempt: Callable[[Round], str], round_: Round) -> dict[str, object]:
    try:
        return {"outcome": attempt(round_), "counts": round_.counts}
    except Broken as exc:
        told = {"promise": exc.promise, "evidence": exc.evidence[-6000:]}
        return {"outcome": BROKEN, "counts": round_.counts, **told}
    except BaseException:  # our own mistake, or an exception of the product that nobody expects
        told = {"promise": "no exception but the product's own errors"}
        return {"outcome": BROKEN, **told, "evidence": traceback.format_exc()[-6000:]}


def _listen(handle: int, seconds: float) -> tuple[bytes, bool]:
    """Return what the round's process says, and whether its time was over before it ended."""
    said, piece, hangs, deadline = b"", b"", False, Deadline(seconds)
    while not hangs:
        ready, _, _ = select.select([handle], [], [], 0.2)
        piece = os.read(handle, 1 << 16) if ready else b""
        if ready and not piece:
            break
        said += piece
        hangs = deadline.passed()
    os.close(handle)
    return said, hangs


def _silent(child: int, seconds: float, *, hangs: bool) -> dict[str, object]:
    promise, evidence = "the process does not die", ""
    if hangs:
        promise = f"it ends within {seconds:.0f} seconds"
        evidence = "\n".join(_descendants().values())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    else:
        with contextlib.suppress(ChildProcessError):
            evidence = f"wait status {os.waitpid(child, 0)[1]}"
    return {"outcome": BROKEN, "promise": promise, "evidence": evidence}


def _descendants() -> dict[int, str]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for number in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                line = Path("/proc", number, "cmdline").read_bytes()
                found[int(number)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def _end_descendants() -> list[str]:
    """Wait for what is left of a round, then end it; return what had to be ended."""
    deadline = Deadline(_LEFT_SECONDS)
    while _reaped() and not deadline.passed():
        time.sleep(0.01)
    left = _descendants()
    while current := _descendants():
        for number in current:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        _reaped()
        time.sleep(0.005)
    return [line or "a process without a command line" for line in left.values()]


def _reaped() -> bool:
    """Collect children that have ended; return whether others are still running."""
    while True:
        try:
            number, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if number == 0:
            return True
