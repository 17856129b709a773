"""A pool of forked processes for many small tasks, with nothing but pipes.

No semaphores (some nodes have no usable /dev/shm), no threads before the fork, no pickling: a task
is a number, and a child that fails writes its problem to a pipe of its own.
"""

from __future__ import annotations

import functools
import io
import json
import os
import selectors
import signal
import traceback
from array import array
from collections.abc import Callable

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import signals
from ..system.processes import fork_child

_RUNS = 1024  # numbers that fit the least capacity of a pipe (pipe(7)); each is a run of tasks
_SHOWN = 1000  # characters of an unexpected error that are shown


def run_tasks(
    count: int, work: Callable[[int], None], processes: int, *, niceness: int = 0
) -> None:
    """Call ``work`` for each number below ``count``, in order, in up to ``processes`` children.

    The first failure ends all children. If no process can be started, this one does the work; with
    one process or task, too, unless that is to have another niceness (nice(2)).
    """
    children: dict[int, io.FileIO] = {}
    stride = max(-(-count // _RUNS), 1)
    tasks, tasks_end = os.pipe()
    try:
        with open(tasks_end, "wb") as queue:
            queue.write(array("I", range(0, count, stride)).tobytes())

        def run_remaining() -> None:
            numbers = array("I")
            while data := os.read(tasks, numbers.itemsize):
                numbers.frombytes(data)
                start = numbers.pop()
                for number in range(start, min(start + stride, count)):
                    work(number)

        if count > 1 and (processes > 1 or niceness):
            _fork_all(children, min(processes, count), run_remaining, niceness)
        if not children:
            run_remaining()
        _collect(children)
    finally:
        os.close(tasks)
        for child, report in children.items():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            report.close()


def _fork_all(
    children: dict[int, io.FileIO], wanted: int, run: Callable[[], None], niceness: int
) -> None:
    """Start the children, or as many as the limits on processes and open files allow."""
    for _ in range(wanted):
        # A signal in here would leave a child that nobody knows of.
        with signals.defer_signals():
            try:
                readable, writable = os.pipe()
            except OSError:
                return
            report = io.FileIO(readable)
            try:
                child = fork_child(functools.partial(_run_child, run, writable, niceness))
                children[child] = report
            except OSError:
                report.close()
                return
            finally:
                os.close(writable)  # before the next fork: each child holds its own only


def _run_child(run: Callable[[], None], report: int, niceness: int) -> None:
    try:
        os.nice(niceness)
        run()
        return
    except NodeError as exc:
        problem = exc.problem
    except Exception as exc:
        traceback.print_exc()
        values = {"why": f"{type(exc).__name__}: {exc}"[:_SHOWN]}
        problem = Problem(ProblemCode.UNPACKING_FAILED, "", values)
    with open(report, "w", encoding="utf-8") as file:
        json.dump(problem.to_json(), file)


def _collect(children: dict[int, io.FileIO]) -> None:
    """Wait for the children, and only these; raise what the first failing one reported."""
    with selectors.DefaultSelector() as selector:
        for child, report in children.items():
            selector.register(report, selectors.EVENT_READ, child)
        while children:
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                text = children[key.data].read()  # until the child ends
                children.pop(key.data).close()
                _raise_failure(text, os.waitpid(key.data, 0)[1])


def _raise_failure(report: bytes, status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        raise NodeError(Problem(ProblemCode.UNPACKING_KILLED, "", {"signal": str(-code)}))
    if report:
        raise NodeError(Problem.from_json(json.loads(report)))
    if code:
        raise NodeError(Problem(ProblemCode.UNPACKING_ENDED, "", {"status": str(code)}))
