"""Compiled code on a node: what a job has added, and what of earlier jobs is put there.

PyTorch and Triton find their own files by keys that hold the source, the inputs and their version.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections.abc import Iterator
from typing import IO

from ..node import node_root, removal
from ..protocol.messages import CodeAmount, UnpackAnswer, UnpackRequest
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..results.patterns import list_parents
from ..results.receive import receive_outputs
from ..results.selection import OutputEntry, Selection, select_outputs
from ..system.files import disk_problem

MOST_FILES = 20_000  # that are brought back
_MOST_COUNTED = 10 * MOST_FILES
_UNFINISHED = (".tmp", ".lock")  # endings of files that are of no use elsewhere
_ALL = ("*",)  # nothing else is in such a directory
_WRITING_SECONDS = 600.0  # a file that was not written to for so long is complete


def measure_code(folder: str, begun: float) -> CodeAmount:
    """Return how much compiled code there is, and how much of it was written since a time."""
    new = new_bytes = total = total_bytes = 0
    for _, state in _list_files(folder):
        total, total_bytes = total + 1, total_bytes + state.st_size
        if state.st_mtime >= begun:
            new, new_bytes = new + 1, new_bytes + state.st_size
        if new > MOST_FILES or total > _MOST_COUNTED:
            break
    with contextlib.suppress(OSError):  # nothing was compiled; else keep it from being cleaned
        os.utime(folder)
    return CodeAmount(begun, new, new_bytes, total, total_bytes)


def remove_new_code(folder: str, begun: float) -> None:
    """Remove what was written since a time, and lately, after a rank was killed.

    It may be incomplete: g++ writes a shared object under its final name, and one that is there is
    not compiled again (``CppBuilder.build`` and ``_worker_compile_cpp``, torch 2.13).
    """
    since = max(begun, time.time() - _WRITING_SECONDS)
    for path, state in _list_files(folder):
        if state.st_mtime >= since:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _list_files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):  # removed, or it cannot be read
                yield path, os.lstat(path)


def select_code(folder: str, since: float = 0.0, finished: float = 0.0) -> Selection:
    """Return the regular files that were written since a time, with their directories.

    Those that were written to in the last ``finished`` seconds are left out.

    Raises:
        NodeError: the directory cannot be read.
    """
    selection = select_outputs(folder, _ALL)
    until = time.time() - finished if finished else math.inf
    files = [
        entry._replace(mode=stat.S_IFREG | 0o700)
        for entry in selection.entries
        if _is_finished_file(entry) and since <= entry.mtime_ns / 1e9 <= until
    ]
    needed = {parent for file in files for parent in list_parents(file.name)}
    folders = [
        entry._replace(mode=stat.S_IFDIR | 0o700, mtime_ns=0)
        for entry in selection.entries
        if entry.name in needed
    ]
    entries = sorted((*folders, *files), key=lambda entry: entry.name.split("/"))
    roots = tuple(root for root in selection.roots if root in needed)
    return Selection(roots, tuple(entries), (), {}, selection.unread)


def _is_finished_file(entry: OutputEntry) -> bool:
    return stat.S_ISREG(entry.mode) and not entry.name.endswith(_UNFINISHED)


def place_code(request: UnpackRequest, path: str) -> UnpackAnswer:
    """Put compiled code that has arrived into its directory.

    Raises:
        NodeError: it is damaged, or cannot be written.
    """
    kind = request.incoming.code if request.incoming else ""
    with open(path, "rb") as stream:
        scratch = os.path.join(os.path.dirname(path), "code")
        receive_code(stream, scratch, node_root.code_path(request.root, kind), request.node)
    return UnpackAnswer()


def receive_code(stream: IO[bytes], scratch: str, folder: str, source: str) -> None:
    """Put compiled code into a directory, which is made if need be; what is there already stays.

    It gets no time, so that it is the same whoever has made it, and is never new. ``scratch`` is
    made for it, in the same file system, and removed again.

    Raises:
        NodeError: it is damaged, was changed while it was read, or cannot be written.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.mkdir(scratch, 0o700)
        received = receive_outputs(stream, scratch, _ALL, source)
        if not received.complete:
            raise NodeError(received.problems[0])
        if received.changed or received.left_out or received.gaps:
            why = {"why": "some of it was changed while it was read, or could not be read"}
            raise NodeError(Problem(ProblemCode.RESULTS_INCOMPLETE, source, why))
        _merge(scratch, folder)
    except OSError as exc:
        full, unwritable = ProblemCode.INCOMING_DISK_FULL, ProblemCode.INCOMING_UNWRITABLE
        raise NodeError(disk_problem(exc, folder, full, unwritable)) from exc
    finally:
        removal.delete_as_far_as_possible(scratch)


def _merge(source: str, target: str) -> None:
    for path, folders, names in os.walk(source):
        place = os.path.join(target, os.path.relpath(path, source))
        for name in folders:
            os.makedirs(os.path.join(place, name), mode=0o700, exist_ok=True)
        for name in names:
            new, final = os.path.join(path, name), os.path.join(place, name)
            if not os.path.lexists(final):
                os.utime(new, (0, 0))
                os.rename(new, final)
