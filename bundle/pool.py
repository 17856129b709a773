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
from collections.abc import Callable, Sequence

from .problem import NodeError, Problem

_NUMBER = struct.Struct("<I")
_PIPE_SAFE = 16384
"""Tasks that fit a pipe's 64 KiB at once; beyond, each number stands for a run of tasks."""


def share(count: int, work: Callable[[int], None], processes: int) -> None:
    """Call ``work`` once for each number below ``count``, in up to ``processes`` children.

    Numbers are handed out in order, whoever is free takes the next. The first failure ends all.

    Args:
        count: how many tasks there are.
        work: does one task; raises NodeError when it cannot.
        processes: children to fork; with 1, or one task, the work is done in this process.

    Raises:
        NodeError: what the first failing task raised, or that a child was killed.
    """
    if processes <= 1 or count <= 1:
        for number in range(count):
            work(number)
        return
    stride = -(-count // _PIPE_SAFE)
    tasks_read, tasks_write = os.pipe()
    for start in range(0, count, stride):
        os.write(tasks_write, _NUMBER.pack(start))
    os.close(tasks_write)
    says_read, says_write = os.pipe()
    children = []
    try:
        for _ in range(min(processes, count)):
            children.append(_fork(tasks_read, says_write, range(0, count, stride), count, work))
        os.close(says_write)
        says_write = -1
        _collect(children, says_read)
    finally:
        for descriptor in (tasks_read, says_read, says_write):
            if descriptor >= 0:
                os.close(descriptor)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(
    tasks: int, says: int, starts: Sequence[int], count: int, work: Callable[[int], None]
) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        stride = starts[1] - starts[0] if len(starts) > 1 else count
        while data := os.read(tasks, _NUMBER.size):
            start = _NUMBER.unpack(data)[0]
            for number in range(start, min(start + stride, count)):
                work(number)
        status = 0
    except NodeError as exc:
        os.write(says, json.dumps(exc.problem.to_json()).encode() + b"\n")
    except OSError as exc:
        problem = Problem(
            what="cannot write the environment",
            where=exc.filename or "",
            why=exc.strerror or str(exc),
            fix="see the free space and the permissions there",
        )
        os.write(says, json.dumps(problem.to_json()).encode() + b"\n")
    except Exception:
        traceback.print_exc()
    finally:
        # Without the parent's clean-up: that is the parent's to do.
        os._exit(status)


def _collect(children: list[int], says: int) -> None:
    """Wait for every child; raise what the first failing one said."""
    while children:
        child, status = os.wait()
        if child not in children:
            continue
        children.remove(child)
        if status == 0:
            continue
        if os.WIFSIGNALED(status):
            raise NodeError(
                Problem(
                    what="an unpacking process was killed",
                    where="",
                    why=f"signal {os.WTERMSIG(status)}",
                    fix="usually the node ran out of memory; a tmpfs counts as memory too",
                )
            )
        line = os.read(says, 65536).split(b"\n")[0]
        if line:
            raise NodeError(Problem.from_json(json.loads(line)))
        raise NodeError(
            Problem(
                what="an unpacking process failed",
                where="",
                why=f"exit status {os.WEXITSTATUS(status)}; see its traceback above",
                fix="report this together with the log",
            )
        )
