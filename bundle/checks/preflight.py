"""The preflight of one node, before anything is sent to it: everything that could stop the job."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..environment import damage, hard_links
from ..format.archive import BundleFile
from ..node import interpreter, locks, removal
from ..node.location import base_for, env_of
from ..node.root import secure_root
from ..protocol.counts import sized
from ..protocol.job import Job
from ..protocol.problem import NodeError, Problem
from ..system import files, network
from . import probe

SAMPLE = 1 << 20
"""Bytes read at each of a few places of a bundle, to measure the speed."""
_PLACES = 4
BROADCAST = "job-"
"""Prefix of the directories for broadcast files in ``incoming/``."""
_OF_TASK = re.compile(r".+\.\d+\.\d+")
"""Names of directories in ``jobs/`` that an agent makes for its ranks: job, node and task."""
_STALE_SECONDS = 3600.0
"""A directory that nobody has written to for so long belongs to a job that has gone."""


def base_by_need(job: Job, request: Mapping[str, Any]) -> str:
    """Choose the directory for the node root; layers that are already here need no room again.

    The request's ``room`` holds bytes and inodes of each layer, ``size`` is the bundle's length.

    Raises:
        NodeError: no directory fits.
    """
    first = base_for(job, os.environ, copies=0)
    root = os.path.join(first, f"stager-{os.geteuid()}")
    if "room" not in request or os.path.isdir(env_of(job, root)):
        return base_for(job, os.environ)
    # A file that is sent takes room while it is unpacked.
    sent = 0 if _reads_in_place(job) else int(request["size"])
    heads: Sequence[str] = request["heads"]
    older = hard_links.older_layers(os.path.join(root, "envs"), heads)
    if older:
        missing = [room for head, room in zip(heads, request["room"]) if head not in older]
        sent = sent * len(missing) // len(heads)
        rooms = [request.get("own_room", (0, 0)), *missing]
        needed_bytes, needed_inodes = (sum(column) for column in zip(*rooms))
        chosen = files.choose_base(job.node_root, 0, 0, os.environ)
        refused = files.refusals(files.facts_of(chosen), needed_bytes + sent, needed_inodes)
        if chosen == first and not refused:
            return first
    return files.choose_base(job.node_root, job.room[0] + sent, job.room[1], os.environ)


def _reads_in_place(job: Job) -> bool:
    """Tell whether this node will read the bundle where it lies, as far as it can tell."""
    if job.stage == "never":
        return True
    return job.stage == "auto" and _reading_rate(job) is not None


def preflight(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """Check everything; report all problems at once.

    The request's ``marker`` is the name of a file in the run directory, which tells that a node
    sees the same one; ``heads`` are the head digests of the bundle's layers, and ``wheel`` its
    decompressor.
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
        answer.update(_head_address(job, request))
    marker = os.path.join(job.run_dir, str(request.get("marker", "")))
    answer["proj"] = os.path.exists(marker)
    processes = max(1, int(str(host["cpus"])) // int(request.get("nodes_here", 1)))
    with _collecting(problems):
        answer.update(_bundle_state(job, str(answer["root"]), request, processes))
    answer["host"] = host
    answer["problems"] = [problem.to_json() for problem in problems]
    return answer


def line(node: str, facts: Mapping[str, Any]) -> str:
    """Return the line people grep for, ``hpc07 proj=ok pkgs=ok``, and more facts about a node."""
    words = [node]
    words += [f"{key}={'ok' if facts.get(key) else 'missing'}" for key in ("proj", "pkgs")]
    host = facts.get("host") or {}
    space = host.get("node_root") or {}
    if "free_bytes" in space:
        free = sized(int(space["free_bytes"])).replace(" ", "")
        inodes = space["free_inodes"]
        words += [
            f"root={facts['root']}",
            f"free={free}",
            f"inodes={'any' if inodes is None else inodes}",
            f"exec={'no' if space['noexec'] else 'ok'}",
        ]
    if facts.get("python"):
        words.append(f"python={facts['python']}")
    return " ".join(words)


def _head_address(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the address and a free port that this node has as the head.

    The first node is the head; another one becomes it only if that one is left out, so its problems
    do not matter yet.
    """
    if request["node_rank"] == 0:
        return _address_and_port(job, request)
    with contextlib.suppress(NodeError):
        return _address_and_port(job, request)
    return {}


def _address_and_port(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    node = str(request["node"])
    if job.allocation == "local":
        address = "127.0.0.1"
    else:
        interface = network.interface_setting(job.launch.interface, node)
        address = "" if interface == "auto" else network.address_of(interface)
        address = address or network.advertised_address(os.uname().nodename)
    return {"address": address, "port": network.free_port(network.port_for(job.id))}


def _bundle_state(
    job: Job, root: str, request: Mapping[str, Any], processes: int
) -> dict[str, Any]:
    """Find which parts of the bundle are here, and how fast it can be read where it lies."""
    env, started = env_of(job, root), time.monotonic()
    faults = damage.look(env, processes) if root else None
    check_seconds = round(time.monotonic() - started, 3)
    ready = faults == []
    rate = None if ready else _reading_rate(job)
    answer: dict[str, Any] = {
        "ready": ready,
        "rate": rate,
        "pkgs": ready or rate is not None,
        "check_seconds": check_seconds,
    }
    if faults:
        answer["damage"] = damage.describe(env, faults, damage.REPAIRED).to_json()
    if request.get("heads") and not ready:
        envs = os.path.join(root, "envs")
        answer.update(_missing_layers(envs, request, processes, damaged=bool(faults)))
    return answer


def _missing_layers(
    envs: str, request: Mapping[str, Any], processes: int, *, damaged: bool
) -> dict[str, Any]:
    """Find the layers that no older environment has, by number, and whether one has the wheel."""
    heads: Sequence[str] = request["heads"]
    # Where there is damage, more is likely: environments are trusted only after a check.
    older: Collection[str]
    if damaged:
        older = hard_links.sound_layers(envs, processes)
    else:
        older = hard_links.older_layers(envs, heads)
    wheel = request.get("wheel")
    return {
        "lacks": [number for number, head in enumerate(heads) if head not in older],
        "has_wheel": wheel is None or hard_links.has_decompressor(envs, *wheel),
    }


def _reading_rate(job: Job) -> float | None:
    """Measure the bytes a second at which this node reads the bundle; None if it cannot read it."""
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
    """Remove the files that broadcasts and agents of killed jobs have left.

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
        if not files.mount_of(root).shared:  # else another node's lock may be invisible from here
            _sweep_jobs(os.path.join(root, "jobs"))


def _sweep_jobs(folder: str) -> None:
    """Remove the directories of tasks that nobody locks and no process uses.

    The ranks' working directory (``.work``) stays for ``stager clean``: results may be in it.
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
