"""Compiled code on a node: what a job has added, and what of earlier jobs is put there.

PyTorch and Triton find their own files by keys that hold the source, the inputs and their version,
so that code of several programs can be in one directory. They write each file under another name
first, and never change it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ..node import node_root, removal
from ..protocol.messages import CodeAmount, UnpackAnswer, UnpackRequest
from ..protocol.problem import NodeError, ProblemCode
from ..results.selection import Selection, select_outputs
from ..system.files import disk_problem
from .program_variables import CODE

MOST_FILES = 20_000  # that are brought back; of more, not all are counted


def make_code_dir(root: str, name: str) -> str:
    """Make the directory for compiled code of a kind, and return its path."""
    path = node_root.code_path(root, name)
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.utime(path)  # keep it from being cleaned
    return path


def measure_code(folder: str, begun: float) -> CodeAmount:
    """Return how much compiled code there is, and how much of it was written since a time."""
    new = new_bytes = total = 0
    for state in _list_states(folder):
        total += 1
        if state.st_mtime >= begun:
            new += 1
            new_bytes += state.st_size
        if total > MOST_FILES:
            break
    return CodeAmount(begun, new, new_bytes, total)


def _list_states(folder: str) -> Iterator[os.stat_result]:
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(path, name))
            except FileNotFoundError:  # PyTorch removes what it has renamed
                continue


def select_code(folder: str, since: float = 0.0) -> Selection:
    """Return the regular files that were written after a time, with their directories.

    They have no time of their own and are for this user alone, so that the same code is the same
    whichever node has made it.

    Raises:
        NodeError: the directory cannot be read.
    """
    selection = select_outputs(folder, tuple(CODE.values()))
    entries = tuple(
        entry._replace(mtime_ns=0, mode=stat.S_IFMT(entry.mode) | 0o700)
        for entry in selection.entries
        if stat.S_ISDIR(entry.mode) or (stat.S_ISREG(entry.mode) and entry.mtime_ns >= since * 1e9)
    )
    return selection._replace(entries=entries, missing=(), left_out={})


def place_code(request: UnpackRequest, path: str) -> UnpackAnswer:
    """Put compiled code that has arrived into its directory.

    Raises:
        NodeError: it is damaged, or cannot be written.
    """
    kind = request.incoming.code if request.incoming else ""
    folder = make_code_dir(request.root, kind)
    unpack_code(path, os.path.join(os.path.dirname(path), "code"), folder, request.node)
    return UnpackAnswer()


def unpack_code(path: str, scratch: str, folder: str, source: str) -> None:
    """Unpack a file of compiled code into a directory; what is there already stays.

    ``scratch`` is made for it, in the same file system, and removed again.

    Raises:
        NodeError: it is damaged, or cannot be written.
    """
    from ..results.receive import receive_outputs

    removal.delete_as_far_as_possible(scratch)  # of a driver that was killed
    try:
        os.mkdir(scratch, 0o700)
        with open(path, "rb") as stream:
            received = receive_outputs(stream, scratch, tuple(CODE.values()), source)
        if not received.complete:
            raise NodeError(received.problems[0])
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
            if not os.path.lexists(os.path.join(place, name)):
                os.rename(os.path.join(path, name), os.path.join(place, name))
