"""Staging the environment on one node: from the bundle where it lies, or as it is sent."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..channel.agent_channel import GO, AgentChannel
from ..checks import probe
from ..environment import unpack
from ..format import archive
from ..format.archive import Excerpt
from ..format.arriving_file import Arrival
from ..node import locks, removal
from ..protocol.job import Job
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files

_TRIES = 5
_TRY_SECONDS = 0.02


def stage(job: Job, channel: AgentChannel) -> dict[str, Any]:
    """Make the environment unless it is there already.

    With ``incoming`` in the request, a file is sent: the agent reports ``ready``, and unpacks the
    file while it arrives, until the driver reports its end. The file is removed in any case. For a
    damaged file the answer has the digest of the bytes that arrived, as ``arrived``: it tells the
    driver if they were damaged on their way.
    """
    request = channel.request
    incoming = request.get("incoming")
    if incoming is None:
        return _unpack(
            job,
            request,
            str(request["bundle"]),
            unpack.Source(checked=bool(request.get("checked"))),
        )
    path = str(incoming["target"])
    with locks.using_root(str(request["root"])):
        return _receive(job, channel, path)


def _receive(job: Job, channel: AgentChannel, path: str) -> dict[str, Any]:
    """Unpack a file while it arrives; its directory is removed in the end, however that is.

    The directory is this agent's, not only the file: when a job is cancelled, ``sbcast`` can
    outlive the agent for a moment, and would make the file anew.
    """
    request = channel.request
    incoming = request["incoming"]
    folder = os.path.dirname(path)
    _remove(folder)  # of an earlier attempt: it must not be mistaken for this file
    arrival = Arrival()
    listening = threading.Thread(target=_follow, args=(channel, arrival), daemon=True)
    excerpt = None
    if incoming["manifest"] is not None:
        manifest = str(incoming["manifest"]).encode()
        excerpt = Excerpt(manifest, frozenset(incoming["members"]))
    try:
        _make(folder)
        channel.emit({"event": "ready", "step": _step_id()})
        listening.start()
        try:
            answer = _unpack(job, request, path, unpack.Source(excerpt, arrival))
        except NodeError as exc:
            listening.join()
            if arrival.failed:
                raise NodeError(_not_sent(path, int(incoming["size"]))) from exc
            if exc.problem.code is ProblemCode.BUNDLE_DAMAGED:
                return {"problems": [exc.problem.to_json()], "arrived": archive.digest_of(path)}
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


def _unpack(job: Job, request: Mapping[str, Any], path: str, sent: unpack.Source) -> dict[str, Any]:
    cpus = int(str(probe.host_facts()["cpus"]))
    answer: dict[str, Any] = {}
    try:
        made = unpack.unpack(
            path,
            root=str(request["root"]),
            expected=job.bundle_id,
            python=str(request["python"]),
            processes=max(1, cpus // int(request["nodes_here"])),
            source=replace(sent, trusted=job.trusted_bundle),
        )
    except unpack.MissingLayer as exc:
        return {"lacking": True, "problems": [exc.problem.to_json()]}
    answer["path"], answer["reused"] = made.path, made.reused
    if made.mended is not None:
        answer["mended"] = made.mended.to_json()
    waited = sent.arrival.waited if sent.arrival is not None else 0.0
    answer["unpack_seconds"] = round(max(0.0, made.seconds - waited), 3)
    return {**answer, "files_linked": made.linked, "files_written": made.written}


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
