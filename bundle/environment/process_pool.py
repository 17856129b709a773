"""Sharing many small tasks among forked processes, with nothing but pipes.

No semaphores (some nodes have no usable /dev/shm), no threads before the fork, no pickling: a task
is a number, and what a child has to say is one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import traceback
from collections.abc import Callable

from ..protocol.problem import NodeError, Problem

_NUMBER = struct.Struct("<I")
_RUNS = 1024
"""Numbers that fit one page: the least that a pipe holds, for a user who has many (pipe(7)).

With more tasks than that, each number stands for a run of tasks."""
_LINE = 3072
"""Bytes of a child's line: the kernel keeps what is shorter than a page in one piece."""


def share(count: int, work: Callable[[int], None], processes: int) -> None:
    """Call ``work`` once for each number below ``count``, in up to ``processes`` children.

    Numbers are handed out in order, whoever is free takes the next. The first failure ends all.
    Where no process can be started, this one does the work.

    Args:
        count: how many tasks there are.
        work: does one task; raises NodeError when it cannot.
        processes: children to fork; with 1, or one task, the work is done in this process.

    Raises:
        NodeError: what the first failing task raised, or that a child was killed.
    """
    children: list[int] = []
    stride = -(-count // _RUNS)
    tasks_read, tasks_write = os.pipe()
    says_read, says_write = os.pipe()
    try:
        for start in range(0, count, max(stride, 1)):
            os.write(tasks_write, _NUMBER.pack(start))
        os.close(tasks_write)
        tasks_write = -1
        runs = _Runs(tasks_read, stride, count, os.getpid())
        if processes > 1 and count > 1:
            _fork_all(children, min(processes, count), runs, work, says_write)
        if not children:
            runs.work_off(work)
        os.set_blocking(says_read, False)
        _collect(children, says_read)
    finally:
        for descriptor in (tasks_read, tasks_write, says_read, says_write):
            if descriptor >= 0:
                os.close(descriptor)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


class _Runs:
    """The tasks that nobody has taken yet, in a pipe that all processes read from."""

    def __init__(self, tasks: int, stride: int, count: int, parent: int) -> None:
        self._tasks, self._stride, self._count, self._parent = tasks, stride, count, parent

    def work_off(self, work: Callable[[int], None]) -> None:
        """Take runs of tasks and do them until there are none left, or nobody waits for them."""
        while data := os.read(self._tasks, _NUMBER.size):
            start = _NUMBER.unpack(data)[0]
            for number in range(start, min(start + self._stride, self._count)):
                if self._parent not in (os.getpid(), os.getppid()):
                    return  # it was killed: what is written here will be swept away
                work(number)


def _fork_all(
    children: list[int], wanted: int, runs: _Runs, work: Callable[[int], None], says: int
) -> None:
    """Start the children, or as many as the limit on processes allows."""
    for _ in range(wanted):
        try:
            child = os.fork()
        except OSError:
            return
        if not child:
            _be_child(runs, work, says)
        children.append(child)


def _be_child(runs: _Runs, work: Callable[[int], None], says: int) -> None:
    status = 1
    try:
        runs.work_off(work)
        status = 0
    except NodeError as exc:
        _say(says, exc.problem)
    except Exception as exc:
        traceback.print_exc()
        why = f"{type(exc).__name__}: {exc}; see its traceback above"
        _say(says, Problem("an unpacking process failed", "", why, "report this with the log"))
    finally:
        # Without the parent's clean-up: that is the parent's to do.
        os._exit(status)


def _say(says: int, problem: Problem) -> None:
    line = json.dumps(problem.to_json()).encode() + b"\n"
    if len(line) > _LINE:
        brief = {key: text[:100] for key, text in problem.to_json().items()}
        line = json.dumps(brief).encode() + b"\n"
    os.write(says, line)


def _collect(children: list[int], says: int) -> None:
    """Wait for every child; raise what the first failing one said."""
    while children:
        child, status = os.wait()
        if child not in children:
            continue
        children.remove(child)
        if os.WIFSIGNALED(status):
            raise NodeError(
                Problem(
                    what="an unpacking process was killed",
                    where="",
                    why=f"signal {os.WTERMSIG(status)}",
                    fix="usually the node ran out of memory; a tmpfs counts as memory too",
                )
            )
        if status:
            try:
                line = os.read(says, 2 * _LINE).split(b"\n")[0]
                raise NodeError(Problem.from_json(json.loads(line)))
            except BlockingIOError:
                why = f"exit status {os.WEXITSTATUS(status)}"
                fix = "see what is above; usually it was told to end"
                raise NodeError(Problem("an unpacking process ended", "", why, fix)) from None
