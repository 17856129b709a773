"""Staging the environment on one node: from the bundle where it lies, or as it is sent."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace

from ..channel.agent_channel import GO, AgentChannel
from ..checks import probe
from ..environment import unpack
from ..format import archive
from ..format.archive import Excerpt
from ..format.arriving_file import Arrival
from ..node import locks, removal
from ..protocol.answers import Ready, UnpackAnswer
from ..protocol.digest import Digest
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..protocol.requests import Incoming, UnpackRequest
from ..system import files

_TRIES = 5
_TRY_SECONDS = 0.02


def stage(request: UnpackRequest, channel: AgentChannel) -> UnpackAnswer:
    """Make the environment unless it is there already.

    With ``incoming`` in the request, a file is sent: the agent reports ``ready``, and unpacks the
    file while it arrives, until the driver reports its end. The file is removed in any case. For a
    damaged file the answer has the digest of the bytes that arrived, as ``arrived``: it tells the
    driver if they were damaged on their way.
    """
    if request.incoming is None:
        return _unpack(request, request.bundle, unpack.Source(checked=request.checked))
    with locks.using_root(request.root):
        return _receive(request, request.incoming, channel)


def _receive(request: UnpackRequest, incoming: Incoming, channel: AgentChannel) -> UnpackAnswer:
    """Unpack a file while it arrives; its directory is removed in the end, however that is.

    The directory is this agent's, not only the file: when a job is cancelled, ``sbcast`` can
    outlive the agent for a moment, and would make the file anew.
    """
    path = incoming.target
    folder = os.path.dirname(path)
    _remove(folder)  # of an earlier attempt: it must not be mistaken for this file
    arrival = Arrival()
    listening = threading.Thread(target=_follow, args=(channel, arrival), daemon=True)
    excerpt = None
    if incoming.manifest is not None:
        excerpt = Excerpt(incoming.manifest.encode(), frozenset(incoming.members))
    try:
        _make(folder)
        channel.emit(Ready(step=_step_id()))
        listening.start()
        try:
            answer = _unpack(request, path, unpack.Source(excerpt, arrival))
        except NodeError as exc:
            listening.join()
            if arrival.failed:
                raise NodeError(_not_sent(path, incoming.size)) from exc
            if exc.problem.code is ProblemCode.BUNDLE_DAMAGED:
                arrived = Digest(archive.digest_of(path))
                return UnpackAnswer(problems=(exc.problem,), arrived=arrived)
            raise
        listening.join()
        return answer
    finally:
        _remove(folder)


def _make(folder: str) -> None:
    """Make the directory for the file that is sent.

    Raises:
        NodeError: it cannot be made.
    """
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
    except OSError as exc:
        full, unwritable = ProblemCode.INCOMING_DISK_FULL, ProblemCode.INCOMING_UNWRITABLE
        raise NodeError(files.disk_problem(exc, folder, full, unwritable)) from exc


def _remove(folder: str) -> None:
    """Remove the directory of the file that is sent, even while ``sbcast`` makes the file."""
    for _ in range(_TRIES):
        try:
            removal.delete(folder)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_TRY_SECONDS)  # filled meanwhile; or its file system became read-only
        else:
            return


def _follow(channel: AgentChannel, arrival: Arrival) -> None:
    """Wait for the driver to report the end of the transfer: ``go`` if it is complete."""
    arrival.end(whole=channel.command() == GO)


def _unpack(request: UnpackRequest, path: str, source: unpack.Source) -> UnpackAnswer:
    job, cpus = request.job, probe.host_facts().cpus
    try:
        made = unpack.unpack(
            path,
            root=request.root,
            expected=job.bundle_id,
            python=request.python,
            processes=max(1, cpus // request.nodes_here),
            source=replace(source, trusted=job.trusted_bundle),
        )
    except unpack.MissingLayer as exc:
        return UnpackAnswer(problems=(exc.problem,), lacking=True)
    waited = source.arrival.waited if source.arrival is not None else 0.0
    return UnpackAnswer(
        path=made.path,
        reused=made.reused,
        files_linked=made.linked,
        files_written=made.written,
        unpack_seconds=round(max(0.0, made.seconds - waited), 3),
        mended=made.mended,
    )


def _step_id() -> str:
    return f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"


def _not_sent(path: str, size: int) -> Problem:
    """Describe a failed broadcast as this node sees it: Slurm hides a full disk."""
    try:
        arrived = os.stat(path).st_size
    except OSError:
        arrived = 0
    values = {"arrived": str(arrived), "size": str(size)}
    with contextlib.suppress(OSError):
        space = os.statvfs(os.path.dirname(path))
        free = space.f_bavail * space.f_frsize
        if free < size - arrived:
            full = ProblemCode.BUNDLE_NOT_ARRIVED_NO_ROOM
            return Problem(full, path, {**values, "free": str(free)})
    return Problem(ProblemCode.BUNDLE_NOT_ARRIVED, path, values)
