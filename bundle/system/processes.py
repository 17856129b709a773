"""The only place on the far side that starts processes.

Arguments are lists, never a shell's line. Each command is logged before it runs. Every process
leads a session of its own and gets SIGTERM when the thread that started it ends, so that a killed
agent leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import resource
import selectors
import shlex
import signal
import subprocess
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Callable, NamedTuple, Union

from ..redaction.secrets import mask_arguments
from . import signals

# --- The end of a process with its parent: the kernel sends it a signal then ---------------------

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def prctl() -> Callable[..., int]:
    """Load and return libc's function of this name; one that fails where there is none."""
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return lambda *_: -1
    return function


def signal_at_parent_death(number: int) -> None:
    """Ask for a signal when the thread that started this process ends."""
    prctl()(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def make_parent_death_hook(number: int = signal.SIGTERM) -> Callable[[], None]:
    """Return what a child does after its fork, to get a signal when its parent ends."""
    call, parent = prctl(), os.getpid()  # libc is loaded now: that is unsafe after a fork

    def request() -> None:
        call(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request was made
            os._exit(1)

    return request


def fork_child(run: Callable[[], object]) -> int:
    """Fork a process that calls a function, cleans nothing up, and is killed with this thread."""
    die_with_parent = make_parent_death_hook(signal.SIGKILL)
    with signals.defer_signals():  # else the child might do its parent's clean-up
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            signals.restore_default_signals()
            die_with_parent()
            run()
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)


# --- The descendants of a process: those with its mark, and orphans that are adopted -------------

MARK = "STAGER_PROCESS"
"""The variable by which descendants in other sessions are found: one token for each process of ours
on the way to them, joined by slashes. Where it is lost, :func:`adopt_orphans` helps."""
waited_for: set[int] = set()  # processes started by us whose exit status nobody has collected yet
_adopting = [False]  # true if orphans become children of this process; a list, as it changes


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended; they are stopped, too.

    Start no processes in one thread while another stops some: a new child could be mistaken for an
    orphan. The role survives ``execve``.
    """
    _adopting[0] = prctl()(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def reap_orphans() -> None:
    """Collect orphans that have ended, by one system call where there are none."""
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
    """Return whether a child was adopted: only forked ones share our session."""
    return child not in waited_for and os.getsid(child) != os.getsid(0)


def find_members(group: int, mark: str) -> set[int]:
    """Return the living processes of a group or session, those with the mark, and all orphans."""
    reap_orphans()
    members = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if pid != os.getpid() and _is_member(pid, group, mark):
                members.add(pid)
    return members


def _is_member(pid: int, group: int, mark: str) -> bool:
    line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # proc(5): the name, in parentheses, may hold anything; then state ppid pgrp session
    state, parent, process_group, session = line.rpartition(")")[2].split()[:4]
    if state in "ZX":
        return False
    if group in (int(process_group), int(session)):
        return True
    if _adopting[0] and int(parent) == os.getpid() and _is_orphan(pid):
        return True
    environ = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    marks = environ.partition(f"\0{MARK}=".encode())[2].partition(b"\0")[0]
    return bool(mark) and mark.encode() in marks.split(b"/")


# --- The limit on open files: its soft value is for programs that cannot handle many -------------

_FILES = resource.RLIMIT_NOFILE
_ENOUGH = 1 << 16  # higher limits are of no use: some programs close every number up to the limit
_previous: list[tuple[int, int]] = []


def raise_open_files() -> None:
    """Let this process open as many files as it may; what it starts keeps the limit it had."""
    soft, hard = resource.getrlimit(_FILES)
    wanted = min(_finite(hard), _ENOUGH)
    if _finite(soft) >= wanted:
        return
    with suppress(OSError, ValueError):  # forbidden: the limit stays
        resource.setrlimit(_FILES, (wanted, hard))
        _previous[:] = [(soft, hard)]


def restore_open_files() -> None:
    """Restore the former limit, in a child before it becomes another program."""
    for limit in _previous:
        resource.setrlimit(_FILES, limit)


def get_open_file_limit() -> int:
    """Return the number of files that this process may have open."""
    return _finite(resource.getrlimit(_FILES)[0])


def _finite(limit: int) -> int:
    return _ENOUGH if limit == resource.RLIM_INFINITY else limit


log = logging.getLogger(__name__)

TAIL_LINES = 15

_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0
_KILL_LOOKS = 20  # at what is to be killed, at least: a machine that stood still has killed nobody
_SERIAL_NUMBERS = itertools.count()

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
TimeoutExpired = subprocess.TimeoutExpired

Stream = Union[int, IO[bytes], None]  # a stream as ``subprocess.Popen`` takes it


class CompletedCommand(NamedTuple):
    """A finished command; ``returncode`` is negative for the signal that ended it."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


class ProcessError(Exception):
    """A command could not be started, failed, or was killed since it took too long."""

    def __init__(
        self, argv: Sequence[str], code: int | None, output: str = "", *, reason: str = ""
    ) -> None:
        self.argv = tuple(argv)
        self.code = code  # its exit status, negative for a signal; None where it never started
        self.lines = tuple(output.strip().splitlines())  # of standard error, else of output
        self.tail = self.lines[-TAIL_LINES:]
        self.reason = reason or describe_exit(code)
        self.timed_out = False
        shown = shlex.join(mask_arguments(self.argv))
        super().__init__(": ".join([self.reason, shown, *self.tail[-1:]]))


class Process(subprocess.Popen[bytes]):
    """A process started by :func:`start`; ``mark`` is what its descendants carry.

    It is waited for without ``Popen``'s lock: a signal whose handler raises just behind its taking
    leaves it closed for ever (seen with 3.11, under load).
    """

    mark: str = ""

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._collect(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit status."""
        until = time.monotonic() + (timeout or 0.0)
        while (code := self._collect(0 if timeout is None else os.WNOHANG)) is None:
            left = until - time.monotonic()
            if timeout is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(max(0.0, min(_POLL_SECONDS / 10, left)))
        return code

    def _collect(self, flags: int) -> int | None:
        if self.returncode is not None:
            return self.returncode
        try:  # read it before the process is reaped
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | flags)
            if ended is None:
                return None
            exited = ended.si_code == os.CLD_EXITED
            self.returncode = ended.si_status if exited else -ended.si_status
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # SIGCHLD is ignored, or another thread was quicker
            self.returncode = 0 if self.returncode is None else self.returncode
        waited_for.discard(self.pid)
        return self.returncode


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once a process has ended; None where there is none."""
    try:
        return int(os.pidfd_open(pid)) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        raise
    except OSError:
        return None


def describe_exit(code: int | None) -> str:
    """Return an exit status in words: ``exit status 3``, ``ended by SIGKILL``."""
    if code is None:
        return "did not start"
    if code >= 0:
        return f"exit status {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    input: str | None = None,
    check: bool = True,
) -> CompletedCommand:
    """Run a command, and return its output; ProcessError if it is late, or (``check``) fails."""
    stdin = DEVNULL if input is None else PIPE
    process = start(argv, env=env, cwd=cwd, stdin=stdin, stdout=PIPE, stderr=PIPE)
    data = None if input is None else input.encode()
    try:
        texts = _decode(process.communicate(data, timeout=timeout))
    except subprocess.TimeoutExpired as exc:
        stop(process, 0)
        texts = ["", ""]
        with suppress(subprocess.TimeoutExpired):
            texts = _decode(process.communicate(timeout=5))
        reason, said = f"took more than {timeout:g} s", texts[1].strip() or texts[0]
        error = ProcessError(argv, process.returncode, said, reason=reason)
        error.timed_out = True
        raise error from exc
    except BaseException:
        stop(process, 0)
        raise
    if check and process.returncode != 0:
        raise ProcessError(argv, process.returncode, texts[1].strip() or texts[0])
    return CompletedCommand(tuple(argv), process.returncode, *texts)


def _decode(outputs: Iterable[bytes]) -> list[str]:
    return [output.decode(errors="replace") for output in outputs]


def read_output(process: Process, timeout: float, limit: int = 1 << 20) -> bytes | None:
    """Return what a process writes; None if it is late. It is killed unless it has ended."""
    until = time.monotonic() + timeout
    output = read_pipe(process.stdout, until, limit)
    try:
        if output is not None and len(output) < limit:
            process.wait(max(0.0, until - time.monotonic()))
            return output
    except subprocess.TimeoutExpired:
        output = None
    _signal([-process.pid], signal.SIGKILL)
    return output


def read_pipe(pipe: IO[bytes] | None, until: float, limit: int) -> bytes | None:
    """Read a pipe to its end, or so many bytes, and close it; None if that takes too long."""
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


def start(  # noqa: PLR0913 - those of Popen
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: Stream = DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    new_session: bool = True,
) -> Process:
    """Start a command; it gets SIGTERM when the *thread* that called this ends."""
    log.debug("start: %s", shlex.join(mask_arguments(argv)))
    request_signal = make_parent_death_hook()

    def prepare() -> None:  # few system calls
        restore_open_files()
        request_signal()

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
            start_new_session=new_session,
            preexec_fn=prepare,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ProcessError(argv, None, reason=f"cannot be started ({why})") from exc
    process.mark = mark
    waited_for.add(process.pid)
    return process


def stop(process: Process, grace: float) -> int:
    """End a process and everything that it started; return its exit status.

    SIGTERM goes to its process group, and to every descendant that is left once the leader has
    ended. Whatever is alive ``grace`` seconds later gets SIGKILL.
    """
    if process.poll() is None:
        _signal([-process.pid], signal.SIGTERM)
    _end(process, grace)
    return process.wait()


def _end(process: Process, grace: float) -> None:
    mark, terminated, looks = process.mark, set[int](), 0
    term_until = time.monotonic() + grace
    kill_until = term_until + _KILL_SECONDS  # a process in uninterruptible sleep cannot be killed
    while time.monotonic() < kill_until or looks < _KILL_LOOKS:
        killing = time.monotonic() >= term_until
        looks += killing
        leader_ended = process.poll() is not None
        if leader_ended or killing:
            # A child that becomes an orphan during the search may be missed once.
            members = find_members(process.pid, mark) or find_members(process.pid, mark)
            if leader_ended and not members:
                return
            if leader_ended:
                _signal(sorted(members - terminated), signal.SIGTERM)
                terminated |= members
            if killing:  # parents first, as a rule: a shell would report the end of its children
                _signal(sorted(members), signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    members = find_members(process.pid, mark)
    log.warning("processes of group %d do not end: %s", process.pid, sorted(members))


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process; to its group, where the number is negative."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


# --- Processes that hang in the kernel, by /proc: a disk or file server that does not answer puts
# one to sleep (state D), and one that is merely slow wakes it again and again, which counts

_WORDS = {"D": "state D", "T": "stopped, state T", "t": "traced, state t"}


class TaskState(NamedTuple):
    """A process as it was at some moment: the letter of its state, and its context switches."""

    pid: int
    state: str
    switches: int

    @property
    def is_hanging(self) -> bool:
        """True if it cannot wake by itself: it waits in the kernel, or is stopped."""
        return self.state in _WORDS

    def __str__(self) -> str:
        """Return its command, its state and the kernel's function that it waits in."""
        wait = read_proc(f"/proc/{self.pid}/wchan").strip()
        place = "" if wait in ("", "0") else f" in {wait}"  # 0: it is not shown
        command = read_proc(f"/proc/{self.pid}/comm").strip() or "a process"
        return f"{command} (pid {self.pid}, {_WORDS.get(self.state, self.state)}{place})"


def list_own_tasks() -> tuple[TaskState, ...]:
    """Return this process by its first thread, and the children that it has forked."""
    own, session = os.getpid(), os.getsid(0)
    pids = [own]
    for thread in os.listdir(f"/proc/{own}/task"):
        for child in map(int, read_proc(f"/proc/{own}/task/{thread}/children").split()):
            with suppress(ProcessLookupError):
                if os.getsid(child) == session:  # not a program that it has started
                    pids.append(child)
    return tuple(filter(None, map(read_task_state, pids)))


def has_progress(before: tuple[TaskState, ...], now: tuple[TaskState, ...]) -> bool:
    """Return whether some of these processes works, or all of them wait for what may come."""
    is_working = before != now or any(task.state == "R" for task in now)
    return is_working or not any(task.is_hanging for task in now)


def read_task_state(pid: int) -> TaskState | None:
    """Return a process as it is; None for one that has ended."""
    lines = read_proc(f"/proc/{pid}/status").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    state = fields.get("State", "").split()
    if not state or state[0] in "ZX":
        return None
    kinds = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return TaskState(pid, state[0], sum(int(fields.get(kind, 0)) for kind in kinds))


def read_proc(path: str | Path) -> str:
    """Return a file of the kernel's; empty if the process has ended, or this kernel has none."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
