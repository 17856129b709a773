"""A pool of forked processes for many small tasks, with nothing but pipes.

No semaphores (some nodes have no usable /dev/shm), no threads before the fork, no pickling: a task
is a number, and the report of a failed child is one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import struct
import traceback
from collections.abc import Callable
from dataclasses import replace

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import signals
from ..system.processes import prctl, signal_at_parent_death

_NUMBER = struct.Struct("<I")
_RUNS = 1024
"""Numbers that fit one page: the least capacity of a pipe, for a user with many (pipe(7)).

With more tasks than that, each number stands for a run of tasks."""
_LINE = 3072
"""Bytes of a child's line: the kernel keeps a write in one piece if it is shorter than a page."""


def run_tasks(
    count: int, work: Callable[[int], None], processes: int, *, niceness: int = 0
) -> None:
    """Call ``work`` once for each number below ``count``, in up to ``processes`` children.

    Numbers are handed out in order, and a child that is free takes the next. The first failure ends
    all children. If no process can be started, this one does the work.

    Args:
        count: number of tasks.
        work: does one task; raises NodeError if it cannot.
        processes: children to fork; with 1, or one task, this process does the work, unless it is
            to have another niceness.
        niceness: what is added to the children's, so that others get the processors first; see
            nice(2). A process cannot take it back.
    """
    children: dict[int, int] = {}
    stride = max(-(-count // _RUNS), 1)
    prctl()  # loads libc, which is unsafe after a fork
    with contextlib.ExitStack() as opened:
        tasks, tasks_end = _open_pipe(opened)
        reports, reports_end = _open_pipe(opened)
        for start in range(0, count, stride):
            os.write(tasks_end, _NUMBER.pack(start))
        os.dup2(reports_end, tasks_end, inheritable=False)  # closes the pipe of tasks for writing
        parent = os.getpid()

        def run_remaining() -> None:
            """Do tasks until none is left, or the parent has ended."""
            while data := os.read(tasks, _NUMBER.size):
                start = _NUMBER.unpack(data)[0]
                for number in range(start, min(start + stride, count)):
                    if parent not in (os.getpid(), os.getppid()):
                        return  # it was killed: the next unpack removes what is written here
                    work(number)

        try:
            if count > 1 and (processes > 1 or niceness):
                _fork_all(children, min(processes, count), run_remaining, reports_end, niceness)
            if not children:
                run_remaining()
            os.set_blocking(reports, False)
            _collect(children, reports)
        finally:
            for end, child in children.items():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(end)


def _open_pipe(opened: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        opened.callback(os.close, end)
    return ends


def _fork_all(
    children: dict[int, int],
    wanted: int,
    run_remaining: Callable[[], None],
    reports: int,
    niceness: int,
) -> None:
    """Start the children, or as many as the limits on processes and open files allow."""
    for _ in range(wanted):
        # A signal in here would leave a child that nobody knows of, or a child that does what its
        # parent is to do in the end.
        with signals.defer_signals():
            try:
                end, alive = os.pipe()
            except OSError:
                return
            try:
                child = os.fork()
            except OSError:
                os.close(end)
                os.close(alive)
                return
            if not child:
                _run_child(run_remaining, reports, niceness)
            os.close(alive)  # before the next fork: each child holds its own only
            children[end] = child


def _run_child(run_remaining: Callable[[], None], reports: int, niceness: int) -> None:
    status = 1
    try:
        signals.restore_default_signals()
        # Between two tasks it looks for its parent; in one, it may wait for bytes that it brings.
        signal_at_parent_death(signal.SIGKILL)
        os.nice(niceness)
        run_remaining()
        status = 0
    except NodeError as exc:
        _report(reports, exc.problem)
    except Exception as exc:
        traceback.print_exc()
        values = {"why": f"{type(exc).__name__}: {exc}"}
        _report(reports, Problem(ProblemCode.UNPACKING_FAILED, "", values))
    finally:
        # Without the parent's clean-up: that is the parent's to do.
        os._exit(status)


def _report(reports: int, problem: Problem) -> None:
    line = _encode_line(problem)
    if len(line) > _LINE:
        brief = {key: text[:100] for key, text in problem.values.items()}
        line = _encode_line(replace(problem, where=problem.where[:100], values=brief))
    os.write(reports, line)


def _encode_line(problem: Problem) -> bytes:
    return json.dumps(problem.to_json()).encode() + b"\n"


def _collect(children: dict[int, int], reports: int) -> None:
    """Wait for the children, and only these; raise what the first failing one reported."""
    with selectors.DefaultSelector() as selector:
        for end in children:
            selector.register(end, selectors.EVENT_READ)
        while children:
            for key, _ in selector.select():
                selector.unregister(key.fd)
                _, status = os.waitpid(children.pop(key.fd), 0)
                os.close(key.fd)
                _raise_failure(status, reports)


def _raise_failure(status: int, reports: int) -> None:
    """Raise what a failed child reported; ``status`` is the kernel's wait status."""
    if os.WIFSIGNALED(status):
        values = {"signal": str(os.WTERMSIG(status))}
        raise NodeError(Problem(ProblemCode.UNPACKING_KILLED, "", values))
    if not status:
        return
    try:
        line = os.read(reports, 2 * _LINE).split(b"\n")[0]
    except BlockingIOError:
        values = {"status": str(os.WEXITSTATUS(status))}
        raise NodeError(Problem(ProblemCode.UNPACKING_ENDED, "", values)) from None
    raise NodeError(Problem.from_json(json.loads(line)))
