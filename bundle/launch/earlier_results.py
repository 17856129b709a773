"""Earlier results that a node is sent: they lie in the ranks' working directory before these start.

:func:`~bundle.launch.staged_files.remove_sent_files` then tells what a job has made of them.
"""

from __future__ import annotations

import os

from ..node import removal
from ..protocol.messages import UnpackAnswer, UnpackRequest
from ..protocol.problem import NodeError, ProblemCode
from ..results.receive import receive_outputs
from ..system.files import disk_problem
from .program_variables import locate_work_dir, locate_work_tree
from .staged_files import has_sent_files, lock_tree, record_sent_files


def place_earlier_results(request: UnpackRequest, path: str) -> UnpackAnswer:
    """Put results that have arrived into the working directory, once for each node root."""
    folder = locate_work_dir(request.job, request.root)
    try:
        _place(request, folder, path)
    except OSError as exc:
        full, unwritable = ProblemCode.INCOMING_DISK_FULL, ProblemCode.INCOMING_UNWRITABLE
        raise NodeError(disk_problem(exc, folder, full, unwritable)) from exc
    return UnpackAnswer()


def _place(request: UnpackRequest, folder: str, path: str) -> None:
    job = request.job
    tree = locate_work_tree(job, request.root)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with lock_tree(tree), open(path, "rb") as stream:
        if has_sent_files(tree):  # by another node that shares the node root
            return
        received = receive_outputs(stream, folder, job.outputs, request.node)
        for name in received.renamed.values():  # what an earlier attempt of the job has left stays
            removal.delete_as_far_as_possible(os.path.join(folder, name))
        if not received.complete:
            for name in received.placed:
                removal.delete_as_far_as_possible(os.path.join(folder, name))
            raise NodeError(received.problems[0])
        placed = [name for name in received.placed if name not in received.renamed.values()]
        record_sent_files(tree, folder, placed)
