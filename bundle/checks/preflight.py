"""The look at one node before anything is sent to it: all that could keep it from its part."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..environment import damage, hard_links
from ..format.archive import BundleFile
from ..node import interpreter, locks, removal
from ..node.location import base_for, env_of
from ..node.root import secure_root
from ..protocol.job import Job
from ..protocol.problem import NodeError, Problem
from ..system import files, network
from . import probe

SAMPLE = 1 << 20
"""Bytes read at each of a few places of a bundle, to see how fast that goes."""
_PLACES = 4
BROADCAST = "job-"
"""How the names of directories for broadcast files in ``incoming/`` begin."""
_OF_TASK = re.compile(r".+\.\d+\.\d+")
"""Names of directories in ``jobs/`` that an agent makes for its ranks: job, node and task."""
_STALE_SECONDS = 3600.0
"""One that nobody has written to for so long belongs to a job that has gone."""


def base_by_need(job: Job, request: Mapping[str, Any]) -> str:
    """The same for one node that was told the bundle's layers: what is here takes no room again.

    The request's ``room`` holds bytes and inodes of each layer, ``size`` is the bundle's length.

    Raises:
        NodeError: no directory fits.
    """
    first = base_for(job, os.environ, copies=0)
    own = os.path.join(first, f"stager-{os.geteuid()}")
    if "room" not in request or os.path.isdir(env_of(job, own)):
        return base_for(job, os.environ)
    # A file that is sent lies there while it is unpacked.
    reads = job.stage == "never" or (job.stage == "auto" and _reading_rate(job) is not None)
    sent = 0 if reads else int(request["size"])
    older = hard_links.older_layers(os.path.join(own, "envs"), request["heads"])
    lacking = [room for head, room in zip(request["heads"], request["room"]) if head not in older]
    own_room = request.get("own_room", (0, 0))
    needed = [sum(column) for column in zip(own_room, *lacking)]
    if older:
        chosen = files.choose_base(job.node_root, 0, 0, os.environ)
        facts = files.facts_of(chosen)
        sent = sent * len(lacking) // len(request["heads"])
        if chosen == first and not files.refusals(facts, needed[0] + sent, needed[1]):
            return first
    return files.choose_base(job.node_root, job.room[0] + sent, job.room[1], os.environ)


def preflight(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """Look at everything; report all problems at once.

    The request's ``marker`` is a file's name in the run directory, by which it is known to be the
    same one; ``heads`` are the head digests of the bundle's layers, and ``wheel`` its decompressor.
    """
    problems: list[Problem] = []
    answer: dict[str, Any] = {"root": "", "python": "", "address": "", "port": 0}
    with _collecting(problems):
        answer["root"] = secure_root(base_by_need(job, request))
        sweep(str(answer["root"]), time.time())
    with _collecting(problems):
        answer["python"] = interpreter.find(job.requires.python, job.python_hints)
    host = probe.host_facts(str(answer["root"]))
    problems += probe.check_requires(job.requires, host)
    with _collecting(problems):
        answer.update(_reachable_at(job, request))
    marker = os.path.join(job.run_dir, str(request.get("marker", "")))
    answer["proj"] = os.path.exists(marker)
    processes = max(1, int(str(host["cpus"])) // int(request.get("nodes_here", 1)))
    with _collecting(problems):
        answer.update(_has(job, str(answer["root"]), request, processes))
    answer["host"] = host
    answer["problems"] = [problem.to_json() for problem in problems]
    return answer


def line(node: str, facts: Mapping[str, Any]) -> str:
    """The line people grep for, ``hpc07 proj=ok pkgs=ok``, and what else matters about a node."""
    words = [f"{key}={'ok' if facts.get(key) else 'missing'}" for key in ("proj", "pkgs")]
    place = (facts.get("host") or {}).get("node_root") or {}
    if "free_bytes" in place:
        inodes = place["free_inodes"]
        words += [
            f"root={facts['root']}",
            f"free={files.size(int(place['free_bytes'])).replace(' ', '')}",
            f"inodes={'any' if inodes is None else inodes}",
            f"exec={'no' if place['noexec'] else 'ok'}",
        ]
    if facts.get("python"):
        words.append(f"python={facts['python']}")
    return " ".join([node, *words])


def _reachable_at(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """This node's address for the others and a free port, in case that it is the head.

    The first node is; another one becomes it only where that one is left out, so what is wrong with
    others does not matter as yet.
    """
    if request["node_rank"] == 0:
        return _place_to_meet(job, request)
    with contextlib.suppress(NodeError):
        return _place_to_meet(job, request)
    return {}


def _place_to_meet(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    node = str(request["node"])
    if job.allocation == "local":
        address = "127.0.0.1"
    else:
        setting = network.interface_setting(job.launch.interface, node)
        named = "" if setting == "auto" else network.address_of(setting)
        address = named or network.advertised_address(os.uname().nodename)
    return {"address": address, "port": network.free_port(network.port_for(job.id))}


def _has(job: Job, root: str, request: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """What of the bundle is here already, and whether it can be read where it lies."""
    env, started = env_of(job, root), time.monotonic()
    found = damage.look(env, processes) if root else None
    check_seconds = round(time.monotonic() - started, 3)
    ready = found == []
    rate = None if ready else _reading_rate(job)
    answer: dict[str, Any] = {"ready": ready, "rate": rate, "pkgs": ready or rate is not None}
    answer["check_seconds"] = check_seconds
    if found:
        answer["damage"] = damage.describe(env, found, damage.REPAIRED).to_json()
    heads: Sequence[str] = request.get("heads", ())
    if heads and not ready:
        envs = os.path.join(root, "envs")
        # Where there is damage, more is likely: environments are believed only after a look.
        older = (
            hard_links.sound_layers(envs, processes)
            if found
            else hard_links.older_layers(envs, heads)
        )
        answer["lacks"] = [number for number, head in enumerate(heads) if head not in older]
        wheel = request.get("wheel")
        answer["has_wheel"] = wheel is None or hard_links.has_decompressor(envs, *wheel)
    return answer


def _reading_rate(job: Job) -> float | None:
    """Bytes a second that this node reads the bundle with, where it lies; None if it cannot."""
    try:
        with BundleFile(job.bundle, job.bundle_id) as bundle:
            size = os.path.getsize(job.bundle)
            count = min(SAMPLE, max(1, size // _PLACES))
            started = time.monotonic()
            for place in range(_PLACES):
                bundle.read((size - count) * place // _PLACES, count)
            return _PLACES * count / max(time.monotonic() - started, 1e-6)
    except (NodeError, OSError):
        return None


def sweep(root: str, now: float) -> None:
    """Remove what broadcasts and agents of jobs that were killed have left.

    Args:
        root: the node root.
        now: seconds since the epoch.
    """
    incoming = os.path.join(root, "incoming")
    for name in os.listdir(incoming):
        path = os.path.join(incoming, name)
        if name.startswith(BROADCAST):
            with contextlib.suppress(OSError):
                if now - removal.last_change(path) > _STALE_SECONDS:
                    removal.delete(path)
    with contextlib.suppress(NodeError):
        if not files.mount_of(root).shared:  # else another node's lock may not be seen from here
            _sweep_jobs(os.path.join(root, "jobs"))


def _sweep_jobs(folder: str) -> None:
    """Remove the directories of tasks that nobody locks and no process names.

    Where ranks worked (``.work``) stays for ``stager clean``: results may be in it.
    """
    for name in filter(_OF_TASK.fullmatch, os.listdir(folder)):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError), locks.alone(path):
            if removal.user_of(path) is None:
                removal.delete(path)


@contextlib.contextmanager
def _collecting(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except NodeError as exc:
        problems.append(exc.problem)
