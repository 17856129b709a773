"""Staging the environment on one node: from the bundle where it lies, or as it is sent."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from ..channel.agent_channel import GO, AgentChannel
from ..environment import unpack
from ..environment.listing import own_python
from ..format import archive
from ..format.archive import Arrival, Excerpt
from ..node import machine, node_root, removal
from ..node.node_root import env_path
from ..protocol.digest import Digest
from ..protocol.messages import Incoming, Ready, UnpackAnswer, UnpackRequest
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files

_DAMAGED = (ProblemCode.BUNDLE_DAMAGED, ProblemCode.NO_RESULTS, ProblemCode.RESULTS_INCOMPLETE)
"""Problems of a file that may have been damaged on its way."""
_TRIES = 5
_TRY_SECONDS = 0.02


def stage(
    request: UnpackRequest,
    channel: AgentChannel,
    receiver_of: ReceiverOf | None = None,
    place: Place | None = None,
) -> UnpackAnswer:
    """Make the environment unless it is there already, from the bundle, or a file as it arrives.

    The file is removed in any case. For a damaged one the answer has the digest of what arrived: it
    tells the driver if that was damaged on its way.
    """
    if request.incoming is None:
        with channel.watch_progress():
            return _unpack(request, request.bundle, unpack.Source(checked=request.checked))
    with channel.watch_progress(), node_root.hold_root(request.root):
        receiver = receiver_of or BroadcastReceiver
        return _receive(request, request.incoming, channel, receiver, place)


def _receive(
    request: UnpackRequest,
    incoming: Incoming,
    channel: AgentChannel,
    receiver_of: ReceiverOf,
    place: Place | None,
) -> UnpackAnswer:
    """Unpack as it arrives, then remove the directory: ``sbcast`` may outlive this agent."""
    path = incoming.target
    folder = os.path.dirname(path)
    _remove(folder)  # of an earlier attempt: it must not be mistaken for this file
    excerpt = None
    if incoming.manifest is not None:
        excerpt = Excerpt(incoming.manifest.encode(), frozenset(incoming.members))
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, folder)
        with report_unwritable(folder):
            os.makedirs(folder, 0o700, exist_ok=True)
        receiver = undo.enter_context(contextlib.closing(receiver_of(incoming)))
        arrival = receiver.arrival
        listening = threading.Thread(target=receiver.follow, args=(channel,), daemon=True)
        channel.emit(receiver.ready())
        listening.start()
        try:
            if place is None:
                answer = _unpack(request, path, unpack.Source(excerpt, arrival))
            else:
                while arrival.may_grow(path):
                    arrival.pause()
                answer = place(request, path)
        except NodeError as exc:
            listening.join()
            if arrival.has_failed:
                raise NodeError(_describe_failed_broadcast(path, incoming.size)) from exc
            if exc.problem.code in _DAMAGED:
                arrived = Digest(archive.compute_file_digest(path))
                return UnpackAnswer(problems=(exc.problem,), arrived=arrived)
            raise
        listening.join()
        return answer


ReceiverOf = Callable[[Incoming], "BroadcastReceiver"]  # NodeError if it cannot begin
Place = Callable[[UnpackRequest, str], UnpackAnswer]  # puts what has arrived where it is needed


class BroadcastReceiver:
    """The way in which a file comes to this node: here ``sbcast`` writes it."""

    def __init__(self, incoming: Incoming) -> None:
        self.arrival = Arrival()  # the file's progress

    def ready(self) -> Ready:
        """Return the event that tells the driver that the file can come: the step to send to."""
        job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")
        return Ready(step=f"{job}.{step}")

    def follow(self, channel: AgentChannel) -> None:
        """Wait for the driver to report the end: ``go`` if the file is complete."""
        self.arrival.end(whole=channel.command() == GO)

    def close(self) -> None:
        """Give up what is left of the transfer; ``sbcast`` ends by itself."""


@contextlib.contextmanager
def report_unwritable(path: str) -> Iterator[None]:
    """Turn an OSError into the NodeError about what cannot be received."""
    try:
        yield
    except OSError as exc:
        full, unwritable = ProblemCode.INCOMING_DISK_FULL, ProblemCode.INCOMING_UNWRITABLE
        raise NodeError(files.disk_problem(exc, path, full, unwritable)) from exc


def _remove(folder: str) -> None:
    """Remove the directory, even while ``sbcast`` creates the file in it."""
    for _ in range(_TRIES):
        try:
            with contextlib.suppress(FileNotFoundError):
                removal.delete(folder)
            return
        except OSError:
            time.sleep(_TRY_SECONDS)  # filled meanwhile; or its file system became read-only


def _unpack(request: UnpackRequest, path: str, source: unpack.Source) -> UnpackAnswer:
    job, cpus = request.job, machine.host_facts().cpus
    version = job.requires.python
    try:
        made = unpack.unpack(
            path,
            root=request.root,
            expected=job.bundle_id,
            python=request.python or own_python(env_path(request.root, job.bundle_id), version),
            processes=max(1, cpus // request.nodes_here),
            source=source._replace(trusted=job.trusted_bundle),
        )
    except NodeError as exc:
        if exc.problem.code is not ProblemCode.LAYER_MISSING:
            raise
        return UnpackAnswer(problems=(exc.problem,), lacking=True)
    waited = source.arrival.average_wait_seconds if source.arrival is not None else 0.0
    return UnpackAnswer(
        path=made.path,
        reused=made.reused,
        files_linked=made.linked,
        files_written=made.written,
        unpack_seconds=None if made.reused else round(max(0.0, made.seconds - waited), 3),
        mended=made.mended,
    )


def _describe_failed_broadcast(path: str, size: int) -> Problem:
    """Describe a failed broadcast as this node sees it: Slurm hides a full disk."""
    arrived, free = 0, size
    with contextlib.suppress(OSError):
        space = os.statvfs(os.path.dirname(path))
        free = space.f_bavail * space.f_frsize
        arrived = os.stat(path).st_size
    values = {"arrived": str(arrived), "size": str(size)}
    if free < size - arrived:
        full = ProblemCode.BUNDLE_NOT_ARRIVED_NO_ROOM
        return Problem(full, path, {**values, "free": str(free)})
    return Problem(ProblemCode.BUNDLE_NOT_ARRIVED, path, values)
