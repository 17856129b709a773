"""The preflight of one node, before anything is sent to it: everything that could stop the job."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

from ..environment import damage, hard_links
from ..format.archive import BundleFile
from ..node import interpreter, machine, node_root, removal
from ..node.machine import host_facts
from ..protocol.enumerations import Allocation, Stage
from ..protocol.job import Job
from ..protocol.messages import PreflightAnswer, PreflightRequest
from ..protocol.problem import NodeError, Problem
from ..system import files, hostlist, network
from . import probe

SAMPLE = 1 << 20  # bytes read at each of a few positions of a bundle, to measure the speed
_SAMPLES = 4
INCOMING_PREFIX = "job-"  # prefix of the directories for broadcast files in ``incoming/``
_OF_TASK = re.compile(r".+\.\d+\.\d+")  # directories in ``jobs/``: job, node and task
_STALE_SECONDS = 3600.0  # nobody writes for so long to a directory of a job that has gone


def choose_base_by_need(request: PreflightRequest) -> str:
    """Choose the directory for the node root; layers that are already here need no room again."""
    job = request.job
    first = node_root.choose_base(job.node_root, os.environ)
    root = os.path.join(first, node_root.node_root_name())
    if request.room is None or os.path.isdir(node_root.env_path(root, job.bundle_id)):
        return node_root.choose_base_for_bundle(job.node_root, job.bundle_id, job.room, os.environ)
    # A file that is sent takes room while it is unpacked.
    whole, heads = 0 if _is_read_in_place(job) else request.size, request.heads
    older = hard_links.find_older_layers(os.path.join(root, "envs"), heads)
    if older:
        missing = [room for head, room in zip(heads, request.room) if head not in older]
        sent = whole * len(missing) // len(heads)
        size, inodes = (sum(column) for column in zip(request.own_room, *missing))
        if not files.list_refusals(files.examine_directory(first), size + sent, inodes):
            return first
    size, inodes = job.room
    return node_root.choose_base(job.node_root, os.environ, (size + whole, inodes))


def _is_read_in_place(job: Job) -> bool:
    is_auto = job.stage is Stage.AUTO
    return _measure_reading_rate(job) is not None if is_auto else job.stage is Stage.NEVER


def preflight(request: PreflightRequest) -> PreflightAnswer:
    """Check everything; report all problems at once."""
    job = request.job
    problems: list[Problem] = []
    question = machine.Question(os.environ)  # the driver takes its time to answer
    root = python = ""
    with _collect_problem(problems):
        root = node_root.make_secure_root(choose_base_by_need(request))
        remove_stale_files(root, time.time())
    with _collect_problem(problems):
        if not job.requires.bundled_python:
            python = interpreter.find_base_python(job.requires.python, job.python_hints)
    host = host_facts(root)
    problems += probe.check_requires(job.requires, host)
    address, port, no_head = "", 0, None
    with _collect_problem(problems):
        address, port, no_head = _find_address(request)
    reached = hostlist.get_reached_address(os.environ)
    answer = PreflightAnswer(
        root=root,
        python=python,
        address=address,
        port=port,
        no_head=no_head,
        loopback=reached if network.is_loopback(reached) else "",
        proj=os.path.exists(os.path.join(job.run_dir, request.marker)),
        host=host,
    )
    with _collect_problem(problems):
        answer = _compare_with_bundle(answer, request, max(1, host.cpus // request.nodes_here))
    gpus, code = question.answer(), None
    if job.code_store is not None and request.code is not None and root:
        code = machine.describe_code(job.code_store.software, host, gpus, request.code, root)
    return replace(answer, gpus=gpus, code=code, problems=tuple(problems))


def _find_address(request: PreflightRequest) -> tuple[str, int, Problem | None]:
    """Return this node's address, its port as the head, and why it cannot be the head."""
    try:
        attempt = f".{request.attempt}" if request.attempt else ""  # no rank of one before it meets
        port = network.choose_port(f"{request.job.id}{attempt}")
        return _choose_address(request), network.find_free_port(port), None
    except NodeError as exc:
        if request.node_rank == 0:
            raise
        problem = exc.problem
    host, address = hostlist.get_driver_host(os.environ), ""
    with contextlib.suppress(NodeError):
        if host and not network.is_loopback(host):
            address = network.find_route(host, network.FIRST_PORT)
    return address, 0, problem


def _choose_address(request: PreflightRequest) -> str:
    """Return the address of the set interface, of this host's name, or that ``ssh`` has reached."""
    job = request.job
    if job.allocation is Allocation.LOCAL:
        return "127.0.0.1"
    interface = network.interface_setting(job.launch.interface, request.node)
    if interface != "auto":
        return network.find_address_on_interface(interface)
    try:
        return network.find_advertised_address(os.uname().nodename)
    except NodeError:
        reached = hostlist.get_reached_address(os.environ)
        if not reached or (network.is_loopback(reached) and len(job.nodes) > 1):
            raise
        return reached


def _compare_with_bundle(
    answer: PreflightAnswer, request: PreflightRequest, processes: int
) -> PreflightAnswer:
    job, root = request.job, answer.root
    env, started = node_root.env_path(root, job.bundle_id), time.monotonic()
    faults = damage.find_faults(env, processes) if root else None
    check_seconds = round(time.monotonic() - started, 3)
    ready = faults == []
    rate = None if ready else _measure_reading_rate(job)
    answer = replace(
        answer,
        ready=ready,
        rate=rate,
        pkgs=ready or rate is not None,
        check_seconds=check_seconds,
        damage=damage.describe(env, faults) if faults else None,
    )
    if ready or not request.heads:
        return answer
    envs = os.path.join(root, "envs")
    older = _find_layers(envs, request, processes, is_damaged=bool(faults))
    return replace(
        answer,
        lacks=tuple(number for number, head in enumerate(request.heads) if head not in older),
        has_wheel=request.wheel is None or hard_links.has_decompressor(envs, *request.wheel),
    )


def _find_layers(
    envs: str, request: PreflightRequest, processes: int, *, is_damaged: bool
) -> Collection[str]:
    if is_damaged:  # more damage is likely: environments are trusted only after a check
        return hard_links.find_sound_layers(envs, processes)
    return hard_links.find_older_layers(envs, request.heads)


def _measure_reading_rate(job: Job) -> float | None:
    """Measure how fast this node reads the bundle, in bytes/s; None if it cannot."""
    with contextlib.suppress(NodeError, OSError), BundleFile(job.bundle, job.bundle_id) as bundle:
        size = bundle.manifest.size
        count = min(SAMPLE, max(1, size // _SAMPLES))
        taken = []
        for number in range(_SAMPLES):
            begun = time.monotonic()
            bundle.read((size - count) * number // _SAMPLES, count)
            taken.append(time.monotonic() - begun)
        # The median: a wait for a processor during some reads must not count.
        return count / max(sorted(taken)[(_SAMPLES - 1) // 2], 1e-6)
    return None


def remove_stale_files(root: str, now: float) -> None:
    """Remove what broadcasts and agents of killed jobs have left, except what may hold results."""
    incoming = os.path.join(root, "incoming")
    for name in os.listdir(incoming):
        path = os.path.join(incoming, name)
        with contextlib.suppress(OSError):
            is_ours = name.startswith(INCOMING_PREFIX)
            if is_ours and now - removal.get_last_change(path) > _STALE_SECONDS:
                removal.delete(path)
    is_shared = True  # another node's lock may be invisible from here
    with contextlib.suppress(NodeError):
        is_shared = files.find_mount(root).is_shared
    if is_shared:
        return
    jobs = os.path.join(root, "jobs")
    for name in filter(_OF_TASK.fullmatch, os.listdir(jobs)):
        path = os.path.join(jobs, name)
        with contextlib.suppress(OSError), node_root.hold_directory_alone(path):
            if removal.find_user_process(path) is None:
                removal.delete(path)


@contextlib.contextmanager
def _collect_problem(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except NodeError as exc:
        problems.append(exc.problem)
