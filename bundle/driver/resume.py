"""Earlier results, which the nodes are sent that do not see the run directory."""

from __future__ import annotations

import os
from collections.abc import Collection

from ..protocol.counts import counted, sized
from ..protocol.enumerations import Allocation
from ..protocol.messages import NodeRootFacts
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..results import patterns
from ..results.selection import Selection, Sizes, measure, select
from ..results.stream import send
from .collect import named_outputs
from .own_disk import scratch
from .placement import send_results
from .state import NodesFailed, State

_TRIES = 2
"""Times that results are read which change meanwhile."""


def send_earlier_results(state: State) -> None:
    """Send what exists of the outputs, so that ranks find it where the job was started.

    The job says what is sent, or why it is not: a program that resumes then starts anew.

    Raises:
        NodesFailed: some nodes do not have it, and the job cannot go on without these.
    """
    job = state.job
    if not state.separate_run_dirs or state.sent_results is not None:
        return
    state.sent_results = {}
    named = sorted(named_outputs(job))
    if job.allocation is Allocation.LOCAL or not named:
        return
    if not os.path.isdir(job.run_dir):
        host = os.uname().nodename
        _note_not_sent(state, f"{host}, where the job's driver runs, does not see this directory")
        return
    # What stands for everything here would send the project, with its environment.
    outputs = [name for name in named if not {"*", "**"}.issuperset(patterns.split(name) or ())]
    selection = select(job.run_dir, outputs)
    size = measure(selection.entries)
    reasons = [f"{name}: {why}" for name, why in selection.left_out.items()]
    if reasons:
        more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        _note_not_sent(state, f"{reasons[0]}{more}")
    if not size.files:
        return
    what = f"{_some(selection.roots)} ({counted(size.files, 'file')}, {sized(size.bytes)})"
    refusal = _refusal(state, size)
    if refusal:
        _note_not_sent(state, f"{what}: {refusal}")
        return
    with scratch() as folder:
        path = os.path.join(folder, "results")
        try:
            selection = _write(state, selection, path)
        except NodeError as exc:
            _note_not_sent(state, f"{what}: {exc.problem.why or exc}")
            return
        state.note(f"sending earlier results to the nodes: {what} in {job.run_dir}")
        try:
            send_results(state, path)
        except NodesFailed:
            state.note(
                "earlier results did not reach every node; with project.resume-limit = 0 a job "
                "starts without them",
                warning=True,
            )
            raise
        state.sent_results = {entry.name: entry for entry in selection.entries}


def _note_not_sent(state: State, what: str) -> None:
    state.note(
        f"{state.job.run_dir}: not sent to the nodes: {what}; a program that resumes from earlier "
        "results starts anew",
        warning=True,
    )


def _refusal(state: State, size: Sizes) -> str:
    """Return why results are not sent; empty if they are."""
    limit = state.job.resume_limit
    if not limit:  # the agents' program then lacks what receives them
        return "project.resume-limit is 0"
    if size.bytes > limit:
        return f"more than project.resume-limit, {sized(limit)}"
    for node, facts in state.facts.items():
        place = facts.host.node_root if facts.host is not None else None
        environment = 0 if facts.ready else state.job.room[0]
        if isinstance(place, NodeRootFacts):
            free = max(0, place.free_bytes - environment)
            if 2 * size.bytes > free:  # as they come, and in the working directory
                return f"{node} has room for {sized(free // 2)} in {place.path}"
    return ""


def _write(state: State, selection: Selection, path: str) -> Selection:
    """Write the selected results; return what was written, read once more if they have changed."""
    directory = state.job.run_dir
    for _ in range(_TRIES):
        with open(path, "wb") as stream:
            end = send(selection, directory, stream)
        if not end.changed:
            return selection
        read, selection = selection, select(directory, selection.roots)
    if end.gaps > read.unread:
        values = {"why": f"{_some(end.changed)} changed while it was read"}
        raise NodeError(Problem(ProblemCode.OUTPUTS_NOT_SENT, directory, values))
    state.note(f"{_some(end.changed)}: written to while it was read for the nodes", warning=True)
    return read


def _some(names: Collection[str]) -> str:
    return ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")
