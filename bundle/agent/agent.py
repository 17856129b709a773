"""One node's part of each phase. An agent is a process on the node, started by the transport.

It is asked with one JSON object (:mod:`bundle.channel.agent_channel`) and answers with JSON lines::

    {"v": 1, "job": {...}, "node": "hpc07", "node_rank": 0, "nodes_here": 1, ...}

and, by phase: ``preflight`` takes ``marker``, ``heads`` and ``wheel``; ``unpack`` needs ``root``,
``python`` and ``bundle`` or ``incoming``; ``probe`` needs ``root`` and ``head``; ``launch`` needs
``root``, ``shared`` and ``group``, where the program is ours and not the user's ``own`` and
``limit``, seconds, and with ``hold`` it says ``ready`` and waits for a word before a rank begins;
``deep`` is told of in :mod:`bundle.checks.deep_node`. Each answers with one event of its phase's
name, ``{"v": 1, "event": ..., "node": ..., "ok": ..., "seconds": ..., "problems": [...]}`` and
more; ``launch`` also sends ``output`` events with what its ranks write
(:mod:`bundle.protocol.output`), and says at last how many bytes of each that were (``sent``).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..channel.agent_channel import GO, Hearing
from ..protocol.job import Job, parse
from ..protocol.problem import NodeError
from ..system import open_files, processes, signals

if TYPE_CHECKING:
    from ..launch.early_torchrun import EarlyLauncher

# What a phase needs besides is imported when it is asked for: most of it no single phase does.

PROBE_SECONDS = 300.0
EARLY = "early"
"""Asks for the launcher alone, before the first phase; there is no answer."""
COLLECT = "collect"
"""Asks for the job's outputs."""
SESSION = "session"
"""The word for phases that are asked for one after the other, each by its own request."""

Phase = Callable[[Job, Hearing], "dict[str, Any]"]
"""Does one phase; returns what it answers."""


def main(phase: str, handle: int | None = None) -> int:
    """Do one phase on this node, or one after the other; returns the exit status.

    Args:
        phase: one of :data:`PHASES`, or :data:`SESSION`.
        handle: an open file with the request, in a step of Slurm's; None for standard input.
    """
    signals.end_on_signals()
    open_files.raise_open_files()
    processes.adopt_orphans()
    try:
        hearing = Hearing(handle)
        if phase == SESSION:
            return _converse(hearing)
        answer = _result(phase, hearing, PHASES)
        hearing.conclude({"event": phase, **answer})
        return 0 if answer["ok"] else 3
    except signals.Stopped:
        return signals.TERMINATED


def command(argv: Sequence[str]) -> int:
    """Do what the bootstrap program asks: ``agent PHASE --request DESCRIPTOR``."""
    # What is imported and read here stays; there is little else to collect.
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
    # Where whoever started this ignores it, nobody could wait for a child: it passes through exec.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, phase, _, handle = argv
    try:
        return collect(int(handle)) if phase == COLLECT else main(phase, int(handle))
    except NodeError as exc:
        print(f"stager: {exc}", file=sys.stderr)
        return 1


def collect(handle: int | None) -> int:
    """Send the job's outputs from this node, as a stream of bytes on standard output."""
    from ..results import pack

    hearing = Hearing(handle, follow=False)
    job = parse(hearing.request["job"])
    try:
        pack.pack(str(hearing.request["place"]), job.outputs, sys.stdout.buffer)
    except NodeError as exc:
        print(f"stager: {exc}", file=sys.stderr)
        return 3
    return 0


def _converse(hearing: Hearing) -> int:
    """Do the phases that are asked for, until the driver has no more.

    As soon as the environment of a job that is to run is there, its launcher is started: it is
    ready then when the last check is done.
    """
    early: EarlyLauncher | None = None

    def run(job: Job, hearing: Hearing) -> dict[str, Any]:
        from ..launch.run_ranks import run_ranks

        return run_ranks(job, hearing, early)

    try:
        while True:
            _under_fitting_python(hearing)
            phase = str(hearing.request["phase"])
            if early is None and phase in (EARLY, "preflight", "probe"):
                early = _start_early(hearing.request)
            answer = _answer(phase, hearing, {**PHASES, "launch": run}) if phase != EARLY else {}
            if early is not None and "damage" in answer:
                early.close()  # it imports from what is damaged; another one is started later
                early = None
            if not hearing.following():
                return 0
    finally:
        if early is not None:
            early.close()


def _fits(request: Mapping[str, Any]) -> bool:
    """Whether what is compiled in the bundle is for this Python; a session begins under any."""
    version = "%d.%d" % sys.version_info[:2]
    own = (sys.implementation.name, version, "t" in sys.abiflags)
    return own == ("cpython", request["job"]["requires"]["python"], False)


def _under_fitting_python(hearing: Hearing) -> None:
    """Go on under the Python that the request names, where this one is another kind of Python."""
    request = hearing.request
    python = str(request.get("python") or "")
    if python and not request.get("again") and not _fits(request):
        open_files.restore_open_files()  # the other Python must not inherit the raised limit
        argv = [python, "-I", "-S", sys.argv[0], "agent", SESSION]
        os.execv(python, [*argv, "--request", str(hearing.again())])


def _start_early(request: Mapping[str, Any]) -> EarlyLauncher | None:
    """The launcher of a job's ranks, where its environment is there already."""
    if request["job"]["action"] != "run" or not _fits(request):
        return None
    try:
        job = parse(request["job"])
        if job.allocation == "slurm" and not job.one_step:
            return None
        from ..launch import early_torchrun as early

        return early.start(job, str(request.get("root", "")))
    except NodeError:  # the phase itself tells it
        return None


def _answer(phase: str, hearing: Hearing, phases: Mapping[str, Phase]) -> dict[str, Any]:
    """Do one phase and answer."""
    answer = _result(phase, hearing, phases)
    hearing.emit({"event": phase, **answer})
    return answer


def _result(phase: str, hearing: Hearing, phases: Mapping[str, Phase]) -> dict[str, Any]:
    """Do one phase; return what is to be answered, whatever has become of it."""
    job = parse(hearing.request["job"])
    started = time.monotonic()
    answer: dict[str, Any] = {"problems": []}
    try:
        answer.update(phases[phase](job, hearing))
    except NodeError as exc:
        answer["problems"] = [exc.problem.to_json()]
    answer["seconds"] = round(time.monotonic() - started, 3)
    answer["ok"] = not answer["problems"] and answer.get("exit_code", 0) == 0
    return answer


def wrapper_source() -> bytes:
    """The source of the run wrapper, from the directory or the zip this package came from."""
    from ..environment import virtual_environment

    return virtual_environment.source_of("launch.wrapper")


def _preflight(job: Job, hearing: Hearing) -> dict[str, Any]:
    from ..checks.preflight import preflight

    return preflight(job, hearing.request)


def _unpack(job: Job, hearing: Hearing) -> dict[str, Any]:
    from ..transfer.staging import stage

    return stage(job, hearing)


def _probe(job: Job, hearing: Hearing) -> dict[str, Any]:
    """Ask the environment's own Python what it is; imports are really made when the job says so."""
    from ..checks import probe
    from ..launch import commands
    from ..launch.directories import place_of
    from ..system import network

    request = hearing.request
    place = place_of(job, request)
    variables = commands.environment_variables(place, os.environ)
    deep = job.import_modules
    path = place.environment
    facts = probe.environment_facts(path, job.packages, job.imports, variables, deep, PROBE_SECONDS)
    link = network.choose_link(job.launch.interface, str(request["node"]), str(request["head"]))
    named = {**facts, "node": request["node"]}
    return {
        **facts,
        "line": probe.probe_line(named),
        "interface": link.interface,
        "address": link.address,
    }


def _deep(job: Job, hearing: Hearing) -> dict[str, Any]:
    from ..checks import deep_node

    return deep_node.check(job, hearing)


def _launch(job: Job, hearing: Hearing) -> dict[str, Any]:
    from ..launch.run_ranks import run_ranks

    if hearing.request.get("hold"):
        hearing.emit({"event": "ready"})
        while hearing.command() != GO:  # what ends it instead comes as a signal
            pass
    return run_ranks(job, hearing)


def _tidy(job: Job, hearing: Hearing) -> dict[str, Any]:
    """Remove what the job has left on this node."""
    from ..launch.directories import work_dir
    from ..node import removal

    removal.sweep(work_dir(job, str(hearing.request["root"])))
    return {}


def _clean(job: Job, hearing: Hearing) -> dict[str, Any]:
    """Remove the environments on this node that nobody uses."""
    from ..environment import clean
    from ..system import files

    roots = clean.roots(job.node_root, os.environ)
    cleaned = [clean.clean(root, job.keep, job.dry_run) for root in roots]
    if job.allocation == "local" and hearing.request["node"] == job.nodes[0]:
        # Below it lie the roots of all these nodes; in it what `stager exec` has unpacked.
        around = os.path.dirname(os.path.dirname(os.environ[files.ROOT_VARIABLE]))
        cleaned.append(clean.clean(around, job.keep, job.dry_run, nodes=False))
    problems = [problem.to_json() for one in cleaned for problem in one.problems]
    return {"roots": [one.to_json() for one in cleaned], "problems": problems}


PHASES: dict[str, Phase] = {
    "preflight": _preflight,
    "unpack": _unpack,
    "probe": _probe,
    "deep": _deep,
    "launch": _launch,
    "tidy": _tidy,
    "clean": _clean,
}
