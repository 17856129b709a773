"""Compiled code on a node: what a job has added, and what of earlier jobs is put there.

PyTorch and Triton find their own files by keys that hold the source, the inputs and their version.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import struct
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
_UNFINISHED_FOLDER = "tmp.pid_"  # of Triton
_ALL = ("*",)  # but not what stays on its node: names that begin with a dot, see ``patches``
_OBJECTS = (".so", ".o")
_ELF_64_LITTLE = b"\x02\x01"


def measure_code(folder: str, begun: float) -> CodeAmount:
    """Return how much compiled code there is, and how much of it was written since a time."""
    new = new_bytes = total = total_bytes = 0
    for path, state in _list_files(folder):
        if path.startswith(os.path.join(folder, ".")):
            continue
        total, total_bytes = total + 1, total_bytes + state.st_size
        if state.st_mtime >= begun:
            new, new_bytes = new + 1, new_bytes + state.st_size
        if new > MOST_FILES or total > _MOST_COUNTED:
            break
    with contextlib.suppress(OSError):  # nothing was compiled; else keep it from being cleaned
        os.utime(folder)
    return CodeAmount(begun, new, new_bytes, total, total_bytes)


def remove_incomplete_code(folder: str, begun: float) -> None:
    """Remove object files written since a time without their end: none is compiled again."""
    for path, state in _list_files(folder):
        # Nothing shows where a precompiled header ends.
        is_bad = path.endswith(".gch") or (path.endswith(_OBJECTS) and _is_incomplete(path))
        if is_bad and state.st_mtime >= begun:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _is_incomplete(path: str) -> bool:
    """Return whether an object file is not one, or its end, the table of sections, is missing."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        header, size = file.read(64), os.fstat(file.fileno()).st_size
        if len(header) == 64 and header.startswith(b"\x7fELF"):
            table, length, count = struct.unpack("<40xQ10xHHxx", header)
            return header[4:6] == _ELF_64_LITTLE and not 0 < table <= size - length * count
    return True


def _list_files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):  # removed, or it cannot be read
                yield path, os.lstat(path)


def select_code(folder: str, since: float = 0.0, unchanged_seconds: float = 0.0) -> Selection:
    """Return the complete files that were written since a time, with their directories.

    Those that were written to in the last ``unchanged_seconds`` are left out.
    """
    if not os.path.isdir(folder):
        return Selection((), (), (), {}, 0)
    selection = select_outputs(folder, _ALL)
    until = time.time() - unchanged_seconds if unchanged_seconds else math.inf
    files = [
        entry._replace(mode=stat.S_IFREG | 0o700)
        for entry in selection.entries
        if since <= entry.mtime_ns / 1e9 <= until and _is_finished(folder, entry)
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


def _is_finished(folder: str, entry: OutputEntry) -> bool:
    name = entry.name
    if not stat.S_ISREG(entry.mode) or name.endswith(_UNFINISHED) or _UNFINISHED_FOLDER in name:
        return False
    return not name.endswith(_OBJECTS) or not _is_incomplete(os.path.join(folder, name))


def place_code(request: UnpackRequest, path: str) -> UnpackAnswer:
    """Put compiled code that has arrived into its directory."""
    kind = request.incoming.code if request.incoming else ""
    with open(path, "rb") as stream:
        scratch = os.path.join(os.path.dirname(path), "code")
        receive_code(stream, scratch, node_root.code_path(request.root, kind), request.node)
    return UnpackAnswer()


def receive_code(stream: IO[bytes], scratch: str, folder: str, source: str) -> None:
    """Put compiled code into a directory; what is there stays. ``scratch`` is made and removed."""
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
                os.utime(new, (0, 0))  # so that they never count as new
                os.rename(new, final)
