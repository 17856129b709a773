"""Making the environment on one node: from the bundle where it lies, or from what is sent."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..channel.agent_channel import GO, Hearing
from ..checks import probe
from ..environment import unpack
from ..format import archive
from ..format.archive import Excerpt
from ..format.arriving_file import Arrival
from ..node import locks, removal
from ..protocol.job import Job
from ..protocol.problem import NodeError, Problem

_TRIES = 5
_TRY_SECONDS = 0.02


def stage(job: Job, hearing: Hearing) -> dict[str, Any]:
    """Make sure that the environment is there.

    With ``incoming`` in the request, a file is sent: the agent says ``ready``, and unpacks what
    comes until it hears that all has come. Whatever happens then, the file does not stay. Of one
    that is damaged the answer has the digest of what arrived, as ``arrived``: by that the driver
    knows whether it was damaged on its way.
    """
    request = hearing.request
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
        return _receive(job, hearing, path)


def _receive(job: Job, hearing: Hearing, path: str) -> dict[str, Any]:
    """Unpack what is sent while it comes; its directory goes when that is over, however it ends.

    The directory is this agent's, and not only the file: where a job is cancelled, ``sbcast`` can
    outlive the agent for a moment, and would make the file anew.
    """
    request = hearing.request
    incoming = request["incoming"]
    folder = os.path.dirname(path)
    _remove(folder)  # of an earlier try: it must not be taken for what comes now
    arrival = Arrival()
    listening = threading.Thread(target=_follow, args=(hearing, arrival), daemon=True)
    excerpt = None
    if incoming["manifest"] is not None:
        manifest = str(incoming["manifest"]).encode()
        excerpt = Excerpt(manifest, frozenset(incoming["members"]))
    try:
        _make(folder)
        hearing.emit({"event": "ready", "step": _step_id()})
        listening.start()
        try:
            answer = _unpack(job, request, path, unpack.Source(excerpt, arrival))
        except NodeError as exc:
            listening.join()
            if arrival.failed:
                raise NodeError(_not_sent(path, int(incoming["size"]))) from exc
            if exc.problem.what == archive.DAMAGED:
                return {"problems": [exc.problem.to_json()], "arrived": archive.digest_of(path)}
            raise
        listening.join()
        return answer
    finally:
        _remove(folder)


def _make(folder: str) -> None:
    """Make the directory of what is sent.

    Raises:
        NodeError: it cannot be made.
    """
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
    except OSError as exc:
        fix = "see the space and the permissions there"
        raise NodeError(
            Problem("the bundle cannot be received", folder, str(exc.strerror), fix)
        ) from exc


def _remove(folder: str) -> None:
    """Remove the directory of what is sent, also while ``sbcast`` makes the file in it."""
    for _ in range(_TRIES):
        try:
            removal.delete(folder)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_TRY_SECONDS)  # filled meanwhile; or in a place that became read-only
        else:
            return


def _follow(hearing: Hearing, arrival: Arrival) -> None:
    """Wait for the driver's word about the sending: ``go`` when all has come."""
    arrival.end(whole=hearing.command() == GO)


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
    """What this node can say about a broadcast that failed: Slurm hides a full disk."""
    try:
        arrived = os.stat(path).st_size
    except OSError:
        arrived = 0
    why = f"{arrived} of {size} bytes had arrived"
    with contextlib.suppress(OSError):
        place = os.statvfs(os.path.dirname(path))
        free = place.f_bavail * place.f_frsize
        if free < size - arrived:
            why = f"{why}, {free} are free"
    return Problem("the bundle could not be sent", path, why, "see the problem named first")
