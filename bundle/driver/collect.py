"""Collecting the outputs, where the nodes do not share the run directory."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO

from ..launch import program_variables
from ..protocol.counts import format_count, format_size
from ..protocol.enumerations import Allocation, PhaseName
from ..protocol.events import OutputsCollected
from ..protocol.job import Job
from ..protocol.messages import CollectRequest, LaunchAnswer, NodeRootFacts, TidyAnswer, TidyRequest
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..results import patterns
from ..results.receive import Received, receive_outputs
from ..results.selection import Selection, Sizes, measure_entries, select_outputs
from ..results.stream import send_selection
from .findings import Names, shorten_names
from .placement import make_scratch_dir, send_results
from .state import NodesFailed, State


@contextlib.contextmanager
def run_dir_marker(job: Job) -> Iterator[str]:
    """Keep a file by which a node sees that it has the same run directory; yield its name."""
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
    """Bring the outputs home, after a failure too; then remove them on the nodes.

    Where none are named, or a named one was not written, the ranks' files stay on the nodes.
    """
    if not state.separate_run_dirs:
        return
    job, node = state.job, _find_first_rank(state)
    if not (standing and os.path.isdir(job.run_dir)):
        why = f"{job.run_dir} is not here" if standing else "the allocation has ended"
        where = f"{node} in {_locate_work_dir(state, node)}"
        state.note(f"{why}; what the ranks wrote is on {where}")
        return
    note_unnamed(state)
    answers = _collect(state, node) if job.outputs else _remove_work_dirs(state, None)
    left = _list_left(answers)
    if left:
        state.note(
            f"what the ranks wrote is still on {shorten_names(left)} in "
            f"{_locate_work_dir(state, left[0])}; "
            "`stager clean` removes it once nothing has been written there for an hour"
        )


def _collect(state: State, node: str) -> dict[str, TidyAnswer]:
    """Collect from rank 0's node, then from others; return {} if some nodes still have outputs."""
    received, asked, pending = _fetch_outputs(state, node), [node], [node]
    answers: dict[str, TidyAnswer] = {}
    try:
        if _is_whole(received):
            answers = _remove_work_dirs(state, received)
            pending = [name for name, answer in answers.items() if answer.unsent]
        while pending and _is_whole(received):
            asked.append(pending[0])
            received = _fetch_outputs(state, pending[0], received)
            if _is_whole(received):
                del pending[0]
    finally:
        _emit_collected(state, asked, received)
    if pending:
        where, names = _locate_work_dir(state, pending[0]), shorten_names(pending)
        state.note(f"some outputs were not brought back; they are still on {names} in {where}")
        return {}
    left = _list_left(answers)
    return _remove_work_dirs(state, received, left) if left and asked[1:] else answers


def _is_whole(received: Received) -> bool:
    return received.complete and not received.gaps


def _locate_work_dir(state: State, node: str) -> str:
    return program_variables.locate_work_dir(state.job, state.facts[node].root)


def list_named_outputs(job: Job) -> set[str]:
    """Return the outputs that the user has named."""
    return {*job.outputs} - {*job.tracked}


def _remove_work_dirs(
    state: State, received: Received | None, nodes: Names = ()
) -> dict[str, TidyAnswer]:
    """Remove the working directories of nodes, of all by default, unless wanted files are left.

    ``received`` is None if no outputs were to be brought back.
    """
    named, brought = list_named_outputs(state.job), None
    keep_files = True
    if received is not None:
        keep_files = not named or not named.isdisjoint(received.missing)
        brought = tuple(sorted(received.names))
    with contextlib.suppress(NodeError):
        state.ask(
            PhaseName.TIDY,
            lambda node: TidyRequest(*state.place(node), keep_files=keep_files, brought=brought),
            nodes=nodes or (*state.job.nodes, *state.spares),
        )
    return state.get_answers(TidyAnswer)


def _list_left(answers: dict[str, TidyAnswer]) -> Names:
    return tuple(node for node, answer in answers.items() if answer.left)


def note_unnamed(state: State) -> None:
    """Report that no results are named, where the nodes do not share the run directory."""
    job = state.job
    if state.separate_run_dirs and not list_named_outputs(job):
        beside = f" but {', '.join(job.tracked)}" if job.tracked else ""
        state.note(
            f"the nodes do not see {job.run_dir}; nothing{beside} is brought back: name results "
            "with --outputs or in [project] outputs"
        )


def _find_first_rank(state: State) -> str:
    """Return rank 0's last node: ranks that are started again may change places."""
    began = {
        node: answer.first_rank
        for node, answer in state.get_answers(LaunchAnswer).items()
        if answer.first_rank is not None and node in state.facts
    }
    return max(began, key=lambda node: began[node], default=state.job.nodes[0])


def _fetch_outputs(state: State, node: str, before: Received | None = None) -> Received:
    """Bring the outputs of a node into the run directory, and return all that has come."""
    job = state.job
    request = CollectRequest(
        *state.place(node),
        directory=_locate_work_dir(state, node),
        brought=tuple(sorted(before.names)) if before else None,
    )
    came: list[Received] = []
    joined = before.renamed if before else None

    def take(stream: IO[bytes]) -> None:
        came.append(
            receive_outputs(stream, job.run_dir, job.outputs, node, state.sent_results, joined)
        )

    try:
        state.transport.fetch(PhaseName.COLLECT, {node: request}, take)
    except NodeError as exc:
        known = before or Received(complete=False)
        return replace(known, complete=False, problems=(*known.problems, exc.problem))
    [more] = came
    if before is None:
        if more.removed:
            files = format_count(more.removed, "file")
            state.note(f"{job.run_dir}: {files} removed, which the job has deleted on {node}")
        return more
    return replace(
        more,
        files=before.files + more.files,
        bytes=before.bytes + more.bytes,
        names=before.names | more.names,
        renamed={**before.renamed, **more.renamed},
        missing=tuple(name for name in before.missing if name in more.missing),
        left_out={**before.left_out, **more.left_out},
        changed={**before.changed, **more.changed},
        removed=before.removed,
        problems=before.problems + more.problems,
    )


def _emit_collected(state: State, nodes: Sequence[str], received: Received) -> None:
    state.emit(
        OutputsCollected(
            node=nodes[0],
            others=tuple(nodes[1:]),
            source=_locate_work_dir(state, nodes[0]),
            target=state.job.run_dir,
            files=received.files,
            bytes=received.bytes,
            renamed=dict(received.renamed),
            missing=tuple(name for name in received.missing if name not in state.job.tracked),
            left_out=dict(received.left_out),
            changed=dict(received.changed),
            problems=received.problems,
        )
    )


_TRIES = 2  # times that results are read which change meanwhile


def send_earlier_results(state: State) -> None:
    """Send what exists of the outputs, so that ranks find it where the job was started."""
    job = state.job
    if not state.separate_run_dirs or state.sent_results is not None:
        return
    state.sent_results = {}
    named = sorted(list_named_outputs(job))
    if job.allocation is Allocation.LOCAL or not named:
        return
    if not os.path.isdir(job.run_dir):
        host = os.uname().nodename
        _note_not_sent(state, f"{host}, where the job's driver runs, does not see this directory")
        return
    selection = _select_earlier(state, named)
    size = measure_entries(selection.entries)
    if not size.files:
        return
    counted = f"{format_count(size.files, 'file')}, {format_size(size.bytes)}"
    what = f"{shorten_names(selection.roots)} ({counted})"
    refusal = _find_refusal(state, size)
    if refusal:
        _note_not_sent(state, f"{what}: {refusal}")
        return
    _send_selection(state, selection, what)


def _send_selection(state: State, selection: Selection, what: str) -> None:
    with make_scratch_dir() as folder:
        path = os.path.join(folder, "results")
        try:
            selection = _write(state, selection, path)
        except NodeError as exc:
            _note_not_sent(state, f"{what}: {exc.problem.why or exc}")
            return
        state.note(f"sending earlier results to the nodes: {what} in {state.job.run_dir}")
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


def _select_earlier(state: State, named: Sequence[str]) -> Selection:
    # What stands for everything here would send the project, with its environment.
    outputs = [
        name for name in named if not {"*", "**"}.issuperset(patterns.split_pattern(name) or ())
    ]
    selection = select_outputs(state.job.run_dir, outputs)
    reasons = [f"{name}: {why}" for name, why in selection.left_out.items()]
    if reasons:
        _note_not_sent(state, shorten_names(reasons))
    return selection


def _note_not_sent(state: State, what: str) -> None:
    state.note(
        f"{state.job.run_dir}: not sent to the nodes: {what}; a program that resumes from earlier "
        "results starts anew",
        warning=True,
    )


def _find_refusal(state: State, size: Sizes) -> str:
    limit = state.job.resume_limit
    if not limit:
        return "project.resume-limit is 0"
    if size.bytes > limit:
        return f"more than project.resume-limit, {format_size(limit)}"
    for node, facts in state.facts.items():
        place = facts.host.node_root if facts.host is not None else None
        environment = 0 if facts.ready else state.job.room[0]
        if isinstance(place, NodeRootFacts):
            free = max(0, place.free_bytes - environment)
            if 2 * size.bytes > free:  # as they come, and in the working directory
                return f"{node} has room for {format_size(free // 2)} in {place.path}"
    return ""


def _write(state: State, selection: Selection, path: str) -> Selection:
    directory = state.job.run_dir
    for _ in range(_TRIES):
        with open(path, "wb") as stream:
            end = send_selection(selection, directory, stream)
        if not end.changed:
            return selection
        read, selection = selection, select_outputs(directory, selection.roots)
    if end.gaps > read.unread:
        values = {"why": f"{shorten_names([*end.changed])} changed while it was read"}
        raise NodeError(Problem(ProblemCode.OUTPUTS_NOT_SENT, directory, values))
    state.note(
        f"{shorten_names([*end.changed])}: written to while it was read for the nodes", warning=True
    )
    return read
