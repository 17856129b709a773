"""One node's part of each phase. An agent is a process on the node, started by the transport.

It reads one JSON object from standard input and writes JSON lines to standard output::

    {"v": 1, "job": {...}, "node": "hpc07", "node_rank": 0, "nodes_here": 1, ...}

and, by phase: ``unpack`` needs ``root``, ``python`` and ``bundle``; ``probe`` needs ``root`` and
``head``; ``launch`` needs ``root`` and ``group``. Each answers with one event of its phase's name,
``{"v": 1, "event": ..., "node": ..., "ok": ..., "seconds": ..., "problems": [...]}`` and more;
``launch`` also sends ``output`` events with the lines of its ranks.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import IO, Any, cast

from . import fs, interpreter, launch, net, probe, process, ranks, unpack
from .archive import BundleFile
from .job import Job, parse
from .problem import NodeError, Problem
from .root import secure_root

PROBE_SECONDS = 300.0
STOP_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL for the ranks of a node."""
_TAIL = 200
_TOLD_TO_END = 128 + signal.SIGTERM
_CHUNK = 1 << 16
_PAUSE_SECONDS = 0.02
"""Between two reads of little: a rank that writes line by line makes few events, not thousands."""
_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 2.0
"""How long, after the launcher's end, what it had written is still read."""
_LONGEST_LINE = 1 << 20
"""Bytes after which a line is passed on in pieces: a progress bar may never end its line."""

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Emit = Callable[[Mapping[str, Any]], None]


class Stopped(BaseException):
    """A signal to end arrived. Not an Exception, so that nothing on the way swallows it."""


def main(phase: str) -> int:
    """Do one phase on this node; returns the exit status."""
    end_on_signals()
    try:
        return _answer(phase)
    except Stopped:
        return _TOLD_TO_END


def _answer(phase: str) -> int:
    request = json.loads(sys.stdin.readline())
    job, node = parse(request["job"]), str(request["node"])
    started = time.monotonic()

    def emit(event: Mapping[str, Any]) -> None:
        print(json.dumps({"v": 1, "node": node, **event}), flush=True)

    answer: dict[str, Any] = {"problems": []}
    try:
        answer.update(PHASES[phase](job, request, emit))
    except NodeError as exc:
        answer["problems"] = [exc.problem.to_json()]
    answer["seconds"] = round(time.monotonic() - started, 3)
    answer["ok"] = not answer["problems"] and answer.get("exit_code", 0) == 0
    emit({"event": phase, **answer})
    return 0 if answer["ok"] else 3


def end_on_signals() -> None:
    """From now on SIGTERM, SIGINT and SIGHUP raise :class:`Stopped`, once, in the main thread.

    SIGHUP stays ignored where it was, as under ``nohup``.
    """
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


def ignore_signals() -> None:
    """From now on the same signals do nothing: what is left to do is quick, and must be done."""
    for number in _ENDING:
        # A function, not SIG_IGN: for a signal that has come already and whose handler has not run
        # yet, Python would then print a traceback (see Modules/signalmodule.c, "race condition").
        signal.signal(number, _pass)


def _pass(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


def base_for(job: Job, env: Mapping[str, str], copies: int = 1) -> str:
    """The directory under which the node root goes: where the environment is, or has room.

    Args:
        job: the job.
        env: the node's variables.
        copies: how many environments are to be made there.

    Raises:
        NodeError: no directory fits.
    """
    base = fs.choose_base(job.node_root, 0, 0, env)
    if not copies:
        return base
    own = os.path.join(base, f"stager-{os.geteuid()}")
    if os.path.isdir(unpack.env_path(own, job.bundle_id)):
        return base
    return fs.choose_base(job.node_root, job.room[0] * copies, job.room[1] * copies, env)


def _preflight(job: Job, request: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    """Look at everything that could keep this node from doing its part; report all of it."""
    problems: list[Problem] = []
    answer: dict[str, Any] = {"root": "", "python": "", "address": "", "port": 0}
    with _collecting(problems):
        answer["root"] = secure_root(base_for(job, os.environ))
    with _collecting(problems):
        answer["python"] = interpreter.find(job.requires.python, job.python_hints)
    host = probe.host_facts(answer["root"])
    problems += probe.check_requires(job.requires, host)
    with _collecting(problems):
        answer.update(_reachable_at(job, request))
    answer["proj"] = os.path.isdir(job.run_dir)
    if not answer["proj"]:
        where = str(request["node"])
        why = f"{job.run_dir} is not there"
        fix = "start the job from a directory that every node sees"
        problems.append(Problem("the run directory is not visible", where, why, fix))
    answer["pkgs"] = _has_bundle(job, str(answer["root"]))
    answer["host"] = host
    answer["problems"] = [problem.to_json() for problem in problems]
    return answer


def _unpack(job: Job, request: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    """Make sure the environment is there."""
    cpus = int(str(probe.host_facts()["cpus"]))
    made = unpack.unpack(
        str(request["bundle"]),
        root=str(request["root"]),
        expected=job.bundle_id,
        python=str(request["python"]),
        processes=max(1, cpus // int(request["nodes_here"])),
    )
    return {
        "path": made.path,
        "reused": made.reused,
        "files_linked": made.linked,
        "files_written": made.written,
    }


def _probe(job: Job, request: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    """Ask the environment's own Python what it is; imports are really made when the job says so."""
    place = _place(job, request)
    variables = launch.environment_variables(place, os.environ)
    deep = job.import_modules
    path = place.environment
    facts = probe.environment_facts(path, job.packages, job.imports, variables, deep, PROBE_SECONDS)
    link = net.choose_link(job.launch.interface, str(request["node"]), str(request["head"]))
    named = {**facts, "node": request["node"]}
    return {
        **facts,
        "line": probe.probe_line(named),
        "interface": link.interface,
        "address": link.address,
    }


def _launch(job: Job, request: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    """Start this node's ranks and pass on what they write until they end."""
    place = _place(job, request)
    shared = request["group"]
    node = str(request["node"])
    link = net.choose_link(job.launch.interface, node, str(shared["address"]))
    cpus = int(str(probe.host_facts()["cpus"])) // int(request["nodes_here"])
    group = launch.Group(
        node=node,
        node_rank=int(request["node_rank"]),
        nnodes=len(job.nodes),
        nproc=int(shared["nproc"]),
        address=str(shared["address"]),
        port=int(shared["port"]),
        interface=link.interface,
        backend=str(shared["backend"]),
        max_restarts=job.launch.max_restarts,
        threads=launch.choose_threads(job.launch.omp_num_threads, cpus, int(shared["nproc"])),
    )
    program = launch.wrapper(place, job.launch.command)
    argv = launch.torchrun(place, group, job.id, program)
    variables = launch.rank_variables(place, group, os.environ)
    with unpack.using(place.root, job.bundle_id), _job_dir(place.job_dir):
        emit({"event": "started", "argv": argv, "interface": link.interface})
        code, tail = _attend(argv, variables, job.run_dir, emit)
        failed = ranks.failures(place.job_dir, node, tail, time.time()) if code else []
    return {"exit_code": code, "failures": failed, "tail": tail[-30:] if code else []}


def _attend(
    argv: list[str], variables: Mapping[str, str], cwd: str, emit: Emit
) -> tuple[int, list[str]]:
    """Run the launcher to its end, passing its output on; a signal to us ends it first."""
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
    try:
        running = process.start(
            argv, env=variables, cwd=cwd, stdout=process.PIPE, stderr=process.STDOUT
        )
    except process.ProcessError as exc:
        fix = "stage the environment again"
        raise NodeError(Problem("the launcher cannot start", argv[0], exc.reason, fix)) from exc
    try:
        for lines in _line_groups(running):
            tail.extend(lines)
            emit({"event": "output", "lines": lines})
        code = running.wait()
    except Stopped:
        process.stop(running, STOP_GRACE)
        return _TOLD_TO_END, list(tail)
    finally:
        # Whatever a rank left behind (data loaders, daemons of its own) ends with the job.
        process.stop(running, 0)
    return code if code >= 0 else 128 - code, list(tail)


def _line_groups(running: process.Process) -> Iterator[list[str]]:
    """Lines as they come, several at a time where several are there."""
    rest = b""
    for chunk in _chunks(running):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        if whole:
            yield [line.decode(errors="replace") for line in whole]
    if rest:
        yield [rest.decode(errors="replace")]


def _chunks(running: process.Process) -> Iterator[bytes]:
    """What a process writes until it ends.

    Its end counts, not the pipe's: a child that it left behind may keep that open for ever, and
    so would the ranks of a launcher that was killed. They are ended, then the rest is read.
    """
    stream = cast("IO[bytes]", running.stdout).fileno()
    until: float | None = None
    while until is None or time.monotonic() < until:
        if until is None and running.poll() is not None:
            process.stop(running, 0)
            until = time.monotonic() + _DRAIN_SECONDS
        if select.select([stream], [], [], _POLL_SECONDS)[0]:
            chunk = os.read(stream, _CHUNK)
            if not chunk:
                return
            yield chunk
            if len(chunk) < _CHUNK // 4:
                time.sleep(_PAUSE_SECONDS)
        elif until is not None:
            return


@contextlib.contextmanager
def _job_dir(path: str) -> Iterator[None]:
    """This job's private directory, with the wrapper in it; it goes when the job ends."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    try:
        with open(os.path.join(path, "run_wrapper.py"), "wb") as handle:
            handle.write(wrapper_source())
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


def wrapper_source() -> bytes:
    """The source of the run wrapper, from the directory or the zip this package came from."""
    return unpack.source_of("wrapper")


def _place(job: Job, request: Mapping[str, Any]) -> launch.Place:
    root = str(request["root"])
    return launch.Place(
        root=root,
        environment=unpack.env_path(root, job.bundle_id),
        job_dir=os.path.join(root, "jobs", f"{job.id}.{request['node_rank']}"),
    )


def _reachable_at(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """The head's address and a free port on it; other nodes need none."""
    if request["node_rank"] != 0:
        return {}
    local = job.allocation == "local"
    address = "127.0.0.1" if local else net.advertised_address(os.uname().nodename)
    return {"address": address, "port": net.free_port(net.port_for(job.id))}


def _has_bundle(job: Job, root: str) -> bool:
    """Whether the node has the environment already, or can read the bundle where it lies."""
    if root and os.path.isdir(unpack.env_path(root, job.bundle_id)):
        return True
    try:
        with BundleFile(job.bundle, job.bundle_id):
            return True
    except NodeError:
        return False


@contextlib.contextmanager
def _collecting(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except NodeError as exc:
        problems.append(exc.problem)


def _stop(number: int, frame: FrameType | None) -> None:
    # Once is enough: a second signal must not interrupt the cleaning up that the first one began.
    ignore_signals()
    raise Stopped


PHASES: dict[str, Callable[[Job, Mapping[str, Any], Emit], dict[str, Any]]] = {
    "preflight": _preflight,
    "unpack": _unpack,
    "probe": _probe,
    "launch": _launch,
}
