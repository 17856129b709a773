"""One node's part of each phase. An agent is a process on the node, started by the transport.

It is asked with one JSON object (:mod:`bundle.channel.agent_channel`) and answers with JSON lines::

    {"v": 1, "job": {...}, "node": "hpc07", "node_rank": 0, "nodes_here": 1, ...}

and, by phase: ``preflight`` takes ``marker``, ``heads`` and ``wheel``; ``unpack`` needs ``root``,
``python`` and ``bundle`` or ``incoming``; ``probe`` needs ``root`` and ``head``; ``launch`` needs
``root``, ``shared`` and ``group``, where the program is ours and not the user's ``own`` and
``limit``, seconds, and with ``hold`` it sends ``ready`` and waits for a command before a rank
begins; ``deep`` is described in :mod:`bundle.checks.deep_node`. Each answers with one event of its
phase's name, ``{"v": 1, "event": ..., "node": ..., "ok": ..., "seconds": ..., "problems": [...]}``
and more; ``launch`` also sends ``output`` events with what its ranks write
(:mod:`bundle.protocol.output`), and reports at last how many bytes of each that were (``sent``).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..channel.agent_channel import GO, AgentChannel
from ..protocol.job import Job, parse
from ..protocol.problem import NodeError
from ..system import open_files, processes, signals

if TYPE_CHECKING:
    from ..launch.early_torchrun import EarlyLauncher

# Each phase imports what it alone needs when it is asked for.

PROBE_SECONDS = 300.0
EARLY = "early"
"""The phase that only starts the launcher, before all others; there is no answer."""
COLLECT = "collect"
"""The command that sends the job's outputs."""
SESSION = "session"
"""The command for phases that are asked for one after the other, each by its own request."""

Answer = dict[str, Any]
"""The answer to a phase, an event without its name."""
Phase = Callable[[Job, AgentChannel], Answer]
"""Does one phase; returns its answer."""


def main(phase: str, handle: int | None = None) -> int:
    """Do one phase on this node, or one after the other; return the exit status.

    Args:
        phase: one of :data:`PHASES`, or :data:`SESSION`.
        handle: an open file with the request, in a step of Slurm's; None for standard input.
    """
    signals.end_on_signals()
    open_files.raise_open_files()
    processes.adopt_orphans()
    try:
        channel = AgentChannel(handle)
        if phase == SESSION:
            return _serve_session(channel)
        answer = _result(phase, channel, PHASES)
        channel.conclude({"event": phase, **answer})
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

    channel = AgentChannel(handle, follow=False)
    job = parse(channel.request["job"])
    try:
        pack.pack(str(channel.request["place"]), job.outputs, sys.stdout.buffer)
    except NodeError as exc:
        print(f"stager: {exc}", file=sys.stderr)
        return 3
    return 0


def _serve_session(channel: AgentChannel) -> int:
    """Do the phases that are asked for, until the driver has no more.

    As soon as the environment of a job that is to run exists, its launcher is started: it is ready
    then when the last check is done.
    """
    early: EarlyLauncher | None = None

    def launch(job: Job, channel: AgentChannel) -> Answer:
        from ..launch.run_ranks import run_ranks

        return run_ranks(job, channel, early)

    phases = {**PHASES, "launch": launch}
    try:
        while True:
            _switch_python(channel)
            phase = str(channel.request["phase"])
            if early is None and phase in (EARLY, "preflight", "probe"):
                early = _start_early(channel.request)
            answer = _answer(phase, channel, phases) if phase != EARLY else {}
            if early is not None and "damage" in answer:
                early.close()  # it imports from what is damaged; another one is started later
                early = None
            if not channel.following():
                return 0
    finally:
        if early is not None:
            early.close()


def _fits(request: Mapping[str, Any]) -> bool:
    """Return whether the bundle was compiled for this Python; a session begins under any."""
    version = "%d.%d" % sys.version_info[:2]
    own = (sys.implementation.name, version, "t" in sys.abiflags)
    return own == ("cpython", request["job"]["requires"]["python"], False)


def _switch_python(channel: AgentChannel) -> None:
    """Go on under the Python that the request names, where this one does not fit the bundle."""
    request = channel.request
    python = str(request.get("python") or "")
    if python and not request.get("again") and not _fits(request):
        open_files.restore_open_files()  # the other Python must not inherit the raised limit
        argv = [python, "-I", "-S", sys.argv[0], "agent", SESSION]
        os.execv(python, [*argv, "--request", str(channel.again())])


def _start_early(request: Mapping[str, Any]) -> EarlyLauncher | None:
    """Start the launcher of a job's ranks, if its environment exists already."""
    if request["job"]["action"] != "run" or not _fits(request):
        return None
    try:
        job = parse(request["job"])
        if job.allocation == "slurm" and not job.one_step:
            return None
        from ..launch import early_torchrun as early

        return early.start(job, str(request.get("root", "")))
    except NodeError:  # the phase itself reports it
        return None


def _answer(phase: str, channel: AgentChannel, phases: Mapping[str, Phase]) -> Answer:
    """Do one phase, send its answer, and return it."""
    answer = _result(phase, channel, phases)
    channel.emit({"event": phase, **answer})
    return answer


def _result(phase: str, channel: AgentChannel, phases: Mapping[str, Phase]) -> Answer:
    """Do one phase; return its answer, whether it went well or not."""
    job = parse(channel.request["job"])
    started = time.monotonic()
    answer: Answer = {"problems": []}
    try:
        answer.update(phases[phase](job, channel))
    except NodeError as exc:
        answer["problems"] = [exc.problem.to_json()]
    answer["seconds"] = round(time.monotonic() - started, 3)
    answer["ok"] = not answer["problems"] and answer.get("exit_code", 0) == 0
    return answer


def wrapper_source() -> bytes:
    """Return the source of the run wrapper, from the directory or zip that holds this package."""
    from ..environment import virtual_environment

    return virtual_environment.source_of("launch.wrapper")


def _preflight(job: Job, channel: AgentChannel) -> Answer:
    from ..checks.preflight import preflight

    return preflight(job, channel.request)


def _unpack(job: Job, channel: AgentChannel) -> Answer:
    from ..transfer.staging import stage

    return stage(job, channel)


def _probe(job: Job, channel: AgentChannel) -> Answer:
    """Ask the environment's own Python for its facts; it imports modules where the job says so."""
    from ..checks import probe
    from ..launch.directories import place_of
    from ..launch.variables import environment_variables
    from ..system import network

    request = channel.request
    place = place_of(job, request)
    variables = environment_variables(place, os.environ)
    deep = job.import_modules
    path = place.environment
    facts = probe.environment_facts(path, job.packages, job.imports, variables, deep, PROBE_SECONDS)
    link = network.choose_link(job.launch.interface, str(request["node"]), str(request["head"]))
    return {
        **facts,
        "line": probe.probe_line({**facts, "node": request["node"]}),
        "interface": link.interface,
        "address": link.address,
    }


def _deep(job: Job, channel: AgentChannel) -> Answer:
    from ..checks import deep_node

    return deep_node.check(job, channel)


def _launch(job: Job, channel: AgentChannel) -> Answer:
    from ..launch.run_ranks import run_ranks

    if channel.request.get("hold"):
        channel.emit({"event": "ready"})
        while channel.command() != GO:  # any other end comes as a signal
            pass
    return run_ranks(job, channel)


def _tidy(job: Job, channel: AgentChannel) -> Answer:
    """Remove what the job has left on this node."""
    from ..launch.directories import work_dir
    from ..node import removal

    removal.sweep(work_dir(job, str(channel.request["root"])))
    return {}


def _clean(job: Job, channel: AgentChannel) -> Answer:
    """Remove the environments on this node that nobody uses."""
    from ..environment import clean
    from ..protocol.codec import encode
    from ..system import files

    roots = clean.roots(job.node_root, os.environ)
    cleaned = [clean.clean(root, job.keep, job.dry_run) for root in roots]
    if job.allocation == "local" and channel.request["node"] == job.nodes[0]:
        # Below it lie the roots of all these nodes; in it what `stager exec` has unpacked.
        user_root = os.path.dirname(os.path.dirname(os.environ[files.ROOT_VARIABLE]))
        cleaned.append(clean.clean(user_root, job.keep, job.dry_run, nodes=False))
    problems = [problem.to_json() for root in cleaned for problem in root.problems]
    return {"roots": [encode(root) for root in cleaned], "problems": problems}


PHASES: dict[str, Phase] = {
    "preflight": _preflight,
    "unpack": _unpack,
    "probe": _probe,
    "deep": _deep,
    "launch": _launch,
    "tidy": _tidy,
    "clean": _clean,
}
