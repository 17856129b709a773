"""Where the nodes do not share the run directory: knowing it, and bringing results home."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

from ..protocol.job import Job
from ..protocol.problem import NodeError, Problem
from ..results.receive import Received
from .state import State


@contextlib.contextmanager
def marked(job: Job) -> Iterator[str]:
    """A file in the run directory for as long as the block runs; its name, empty if there is none.

    A node that sees it sees this directory, and not one of its own under the same name.
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


def come_home(state: State, *, standing: bool) -> None:
    """Bring the outputs from the head node, after a failure too; then remove them there.

    Args:
        state: the job; nothing happens where nodes share the run directory.
        standing: whether the allocation stands, so that nodes can be reached.
    """
    if not state.apart:
        return
    job, head = state.job, state.job.nodes[0]
    place = os.path.join(str(state.facts[head]["root"]), "jobs", f"{job.id}.work")
    if not standing:
        _note(state, f"the allocation has ended; what the ranks wrote is on {head} in {place}")
        return
    if not os.path.isdir(job.run_dir):
        text = f"{job.run_dir} is not here; what the ranks wrote stays on {head} in {place}"
        _note(state, text)
        return
    kept = True
    if job.outputs:
        kept = _bring(state, head, place)
    else:
        _note(
            state,
            f"the nodes do not see {job.run_dir}; nothing is brought back: name results in "
            "[project] outputs",
        )
    if kept:
        with contextlib.suppress(NodeError):
            state.ask("tidy", state.found)


def _bring(state: State, head: str, place: str) -> bool:
    """Whether all has arrived, so that it may go from the node."""
    job = state.job
    received: Received | None = None
    problems: list[Problem] = []
    try:
        received = state.fetch(head, place)
    except NodeError as exc:
        problems = [exc.problem]
    else:
        problems = list(received.problems)
    state.emit(
        {
            "event": "collected",
            "node": head,
            "from": place,
            "to": job.run_dir,
            "files": received.files if received else 0,
            "bytes": received.bytes if received else 0,
            "renamed": dict(received.renamed) if received else {},
            "missing": list(received.missing) if received else [],
            "left_out": dict(received.left_out) if received else {},
            "changed": dict(received.changed) if received else {},
            "problems": [problem.to_json() for problem in problems],
        }
    )
    whole = received is not None and received.complete and not _damaged(received)
    if not whole:
        _note(state, f"not everything came home; it is still on {head} in {place}")
    return whole


def _damaged(received: Received) -> bool:
    """Whether something that is worth keeping has not come, or not as it was."""
    cut = any(why.startswith(("not sent", "the last")) for why in received.changed.values())
    unread = ("this user may not read it", "Permission denied")
    return cut or any(why.startswith(unread) for why in received.left_out.values())


def _note(state: State, text: str) -> None:
    state.emit({"event": "note", "text": text})
