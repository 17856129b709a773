"""Collecting the outputs, where the nodes do not share the run directory."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import IO

from ..checks.node_lines import few_names
from ..launch import directories
from ..protocol.answers import TidyAnswer
from ..protocol.counts import counted
from ..protocol.enumerations import PhaseName
from ..protocol.events import OutputsCollected
from ..protocol.job import Job
from ..protocol.launch_answers import LaunchAnswer
from ..protocol.problem import NodeError, Problem
from ..protocol.requests import CollectRequest, TidyRequest
from ..results.receive import Received, receive
from .state import State


@contextlib.contextmanager
def run_dir_marker(job: Job) -> Iterator[str]:
    """Keep a file in the run directory for as long as the block runs.

    A node that sees it sees this directory, and not one of its own under the same name.

    Yields:
        The name of the file; empty if there is none.
    """
    name = f".stager-{job.id}-{secrets.token_hex(4)}"
    path = os.path.join(job.run_dir, name)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:  # read-only, or not here: seeing the directory has to do
        yield ""
        return
    try:
        yield name
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def collect_outputs(state: State, *, standing: bool) -> None:
    """Bring the outputs from the node of rank 0, after a failure too; then remove them there.

    Where none are named, or one that is named was not written, the ranks' files stay on the nodes.

    Args:
        state: the job; nothing happens where nodes share the run directory.
        standing: True if the allocation stands, so that nodes can be reached.
    """
    if not state.separate_run_dirs:
        return
    job, node = state.job, _node_of_first_rank(state)
    work_dir = directories.work_dir(job, state.facts[node].root)
    if not standing:
        state.note(f"the allocation has ended; what the ranks wrote is on {node} in {work_dir}")
        return
    if not os.path.isdir(job.run_dir):
        state.note(f"{job.run_dir} is not here; what the ranks wrote stays on {node} in {work_dir}")
        return
    note_unnamed(state)
    received = _fetch_outputs(state, node, work_dir) if job.outputs else None
    if received is not None and (not received.complete or received.gaps):
        state.note(f"some outputs were not brought back; they are still on {node} in {work_dir}")
        return
    missing = received is not None and bool({*received.missing} - {*job.tracked})
    _remove_work_dirs(state, keep_files=missing or not named_outputs(job))


def named_outputs(job: Job) -> set[str]:
    """Return the outputs that the user has named."""
    return {*job.outputs} - {*job.tracked}


def _remove_work_dirs(state: State, *, keep_files: bool) -> None:
    """Remove the ranks' working directories; report where files are left in them.

    Args:
        state: the job.
        keep_files: True to remove only those without files.
    """
    with contextlib.suppress(NodeError):
        state.ask(
            PhaseName.TIDY, lambda name: TidyRequest(**state.placed(name), keep_files=keep_files)
        )
    left = [node for node, answer in state.answers_of(TidyAnswer).items() if answer.left]
    if left:
        where = directories.work_dir(state.job, state.facts[left[0]].root)
        state.note(
            f"what the ranks wrote is still on {few_names(left)} in {where}; "
            "`stager clean` removes it once nothing has been written there for an hour"
        )


def note_unnamed(state: State) -> None:
    """Report that no results are named, where the nodes do not share the run directory."""
    job = state.job
    if state.separate_run_dirs and not named_outputs(job):
        beside = f" but {', '.join(job.tracked)}" if job.tracked else ""
        state.note(
            f"the nodes do not see {job.run_dir}; nothing{beside} is brought back: name results "
            "with --outputs or in [project] outputs"
        )


def _node_of_first_rank(state: State) -> str:
    """Return the node where rank 0 began last: ranks that are started again may change places."""
    began = {
        node: answer.first_rank
        for node, answer in state.answers_of(LaunchAnswer).items()
        if answer.first_rank is not None and node in state.facts
    }
    return max(began, key=lambda node: began[node], default=state.job.nodes[0])


def _fetch_outputs(state: State, node: str, work_dir: str) -> Received:
    """Fetch the outputs, report what has come, and return it."""
    try:
        received = _received(state, node, work_dir)
    except NodeError as exc:
        _emit_collected(state, node, work_dir, _NOTHING, [exc.problem])
        return _NOTHING
    _emit_collected(state, node, work_dir, received, list(received.problems))
    if received.removed:
        files = counted(received.removed, "file")
        state.note(f"{state.job.run_dir}: {files} removed, which the job has deleted on {node}")
    return received


def _received(state: State, node: str, work_dir: str) -> Received:
    """Bring the outputs from a directory of one node into the run directory.

    Raises:
        NodeError: they cannot be put there, or did not come at all.
    """
    job = state.job
    request = CollectRequest(**state.placed(node), directory=work_dir)
    came: list[Received] = []

    def take(stream: IO[bytes]) -> None:
        came.append(receive(stream, job.run_dir, job.outputs, node, state.sent_results))

    state.transport.fetch(PhaseName.COLLECT, {node: request}, take)
    return came[0]


_NOTHING = Received(
    complete=False,
    files=0,
    bytes=0,
    placed=(),
    renamed={},
    missing=(),
    left_out={},
    changed={},
    gaps=0,
    removed=0,
    problems=(),
)


def _emit_collected(
    state: State, node: str, work_dir: str, received: Received, problems: list[Problem]
) -> None:
    state.emit(
        OutputsCollected(
            node=node,
            source=work_dir,
            target=state.job.run_dir,
            files=received.files,
            bytes=received.bytes,
            renamed=dict(received.renamed),
            missing=tuple(name for name in received.missing if name not in state.job.tracked),
            left_out=dict(received.left_out),
            changed=dict(received.changed),
            problems=tuple(problems),
        )
    )
