"""One node's part of each phase. An agent is a process on the node, started by the transport.

It is asked with one JSON object and answers with JSON lines (:mod:`bundle.protocol.messages`). With
``hold`` a ``launch`` sends ``ready`` and waits for a command before a rank begins.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..channel.agent_channel import GO, AgentChannel
from ..protocol import messages
from ..protocol.enumerations import Action, Allocation, PhaseName
from ..protocol.messages import Answer, PreflightAnswer, TidyAnswer
from ..protocol.problem import NodeError
from ..system import processes, signals
from ..system.own_program import can_load_modules_for

if TYPE_CHECKING:
    from ..launch.commands import EarlyLauncher

# Each phase imports what it alone needs when it is asked for.

PROBE_SECONDS = 300.0

Phase = Callable[[Any, AgentChannel], Answer]
"""Does one phase, with a request of its own class; returns its answer."""


def main(phase: str, handle: int | None = None) -> int:
    """Run a phase of `PHASES`, ``session`` or ``collect``; the request is in the open file."""
    if phase == PhaseName.COLLECT:
        return collect(handle)
    signals.end_on_signals()
    signals.receive_user_signals()
    processes.raise_open_files()
    processes.adopt_orphans()
    try:
        if phase == PhaseName.SESSION:
            return _serve_session(AgentChannel(handle))
        channel = AgentChannel(handle)
        answer = _result(channel, PHASES)
        channel.send_last_answer(answer, channel.request.phase)
        return 0 if answer.ok else 3
    except signals.Stopped:
        return signals.TERMINATED


def command(argv: Sequence[str]) -> int:
    """Do what the bootstrap program asks: ``agent PHASE --request DESCRIPTOR``."""
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
    # If the starting process ignores it, no child could be waited for: that passes through exec.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, phase, _, handle = argv
    try:
        return main(phase, int(handle))
    except NodeError as exc:
        print(f"stager: {exc}", file=sys.stderr)
        return 1


def collect(handle: int | None) -> int:
    """Send the job's outputs from this node, as a stream of bytes on standard output."""
    from ..launch.compiled_code import select_code
    from ..launch.program_variables import locate_work_tree
    from ..launch.staged_files import remove_sent_files, remove_staged_files
    from ..node.node_root import code_path, env_path
    from ..results import stream

    request: Any = AgentChannel(handle, follow=False).request
    job, out = request.job, sys.stdout.buffer
    try:
        if request.code:
            folder = code_path(request.root, request.code)
            selection = select_code(folder, request.since, request.unchanged_seconds)
            stream.send_selection(selection, folder, out)
            return 0
        tree = locate_work_tree(job, request.root)
        remove_staged_files(tree, env_path(request.root, job.bundle_id))
        deleted = remove_sent_files(tree, request.directory)
        stream.send_outputs(request.directory, job.outputs, out, deleted, request.brought)
    except NodeError as exc:
        print(f"stager: {exc}", file=sys.stderr)
        return 3
    return 0


def _serve_session(channel: AgentChannel) -> int:
    """Run the requested phases; start the launcher early, so that it is ready at the last check."""
    early: EarlyLauncher | None = None

    def launch(request: messages.LaunchRequest, channel: AgentChannel) -> messages.LaunchAnswer:
        return _run_ranks(request, channel, early)

    phases = {**PHASES, PhaseName.LAUNCH: launch}
    try:
        while True:
            _switch_python(channel)
            request = channel.request
            if early is None:
                early = _start_early(request)
            if not isinstance(request, messages.EarlyRequest):
                answer = _result(channel, phases)
                channel.emit(answer, request.phase)
                is_damaged = isinstance(answer, PreflightAnswer) and answer.damage is not None
                if early is not None and is_damaged:
                    early.close()  # it imports from what is damaged; another one is started later
                    early = None
            if not channel.await_request():
                return 0
    finally:
        if early is not None:
            early.close()


def _switch_python(channel: AgentChannel) -> None:
    """Go on under the Python that the request names, where this one does not fit the bundle."""
    request = channel.request
    if not isinstance(request, messages.PlacedRequest) or not request.python:
        return
    if not channel.handed_over and not can_load_modules_for(request.job.requires.python):
        processes.restore_open_files()  # the other Python must not inherit the raised limit
        argv = [request.python, "-I", "-S", sys.argv[0], "agent", PhaseName.SESSION]
        os.execv(request.python, [*argv, "--request", str(channel.handover_file())])


def _start_early(request: messages.AgentRequest) -> EarlyLauncher | None:
    if not isinstance(
        request, (messages.ProbeRequest, messages.EarlyRequest, messages.PreflightRequest)
    ):
        return None
    is_probe = isinstance(request, messages.ProbeRequest)
    job = request.job
    own = job.requires.bundled_python or can_load_modules_for(job.requires.python)
    in_session = job.allocation is Allocation.LOCAL or job.can_launch_in_session_step
    # Nothing runs before a signed environment has been compared with its listing.
    if job.action is not Action.RUN or not (own and in_session) or (job.trust and not is_probe):
        return None
    from ..launch import commands

    root = request.root if isinstance(request, messages.PlacedRequest) else ""
    with contextlib.suppress(NodeError):  # the phase itself reports it
        _check_signature(request)
        return commands.start_early_launcher(job, root)
    return None


def _result(channel: AgentChannel, phases: Mapping[str, Phase]) -> Answer:
    started = time.monotonic()
    try:
        _check_signature(channel.request)
        answer = phases[channel.request.phase](channel.request, channel)
    except NodeError as exc:
        answer = Answer(problems=(exc.problem,))
    return replace(
        answer,
        node=channel.node,
        seconds=round(time.monotonic() - started, 3),
        ok=not answer.problems and not answer.exit_code,
    )


def _check_signature(request: messages.AgentRequest) -> str:
    if request.job.trust is None:
        return ""
    from ..checks import signature

    return signature.check_signature(request.job)


def _preflight(request: messages.PreflightRequest, channel: AgentChannel) -> PreflightAnswer:
    from ..checks.preflight import preflight

    return replace(preflight(request), unchecked=_check_signature(request))


def _unpack(request: messages.UnpackRequest, channel: AgentChannel) -> messages.UnpackAnswer:
    from ..transfer.staging import stage

    incoming = request.incoming
    receiver_of = place = None
    if incoming is not None and incoming.relay is not None:
        from ..transfer.relay_receiver import RelayReceiver

        receiver_of = partial(RelayReceiver, task=incoming.relay)
    if incoming is not None and incoming.code:
        from ..launch.compiled_code import place_code

        place = place_code
    elif incoming is not None and incoming.results:
        from ..launch.staged_files import place_earlier_results

        place = place_earlier_results
    return stage(request, channel, receiver_of, place)


def _probe(request: messages.ProbeRequest, channel: AgentChannel) -> messages.ProbeAnswer:
    from ..checks import probe
    from ..launch.program_variables import locate_directories, make_environment_variables
    from ..system import network

    job, directories = request.job, locate_directories(request)
    facts = probe.probe_environment(
        directories.environment,
        job.packages,
        job.imports,
        make_environment_variables(directories, os.environ),
        job.import_modules,
        PROBE_SECONDS,
    )
    link = network.choose_link(job.launch.interface, request.node, request.head)
    return replace(facts, interface=link.interface, address=link.address)


def _deep(request: messages.DeepRequest, channel: AgentChannel) -> messages.DeepAnswer:
    from ..checks import deep

    return deep.check_deeply(request, channel)


def _launch(request: messages.LaunchRequest, channel: AgentChannel) -> messages.LaunchAnswer:
    if request.hold:
        channel.emit(messages.Ready())
        while channel.command() != GO:  # any other end comes as a signal
            pass
    return _run_ranks(request, channel)


def _run_ranks(
    request: messages.LaunchRequest, channel: AgentChannel, early: EarlyLauncher | None = None
) -> messages.LaunchAnswer:
    """Run this task's ranks; answer even if ended first, or the exit status seems the cause."""
    from ..launch.run_ranks import run_ranks

    try:
        return run_ranks(request, channel, early)
    except signals.Stopped:
        return messages.LaunchAnswer(exit_code=signals.TERMINATED, stopped=True)


def _tidy(request: messages.TidyRequest, channel: AgentChannel) -> TidyAnswer:
    from ..launch.program_variables import locate_work_dir, locate_work_tree
    from ..launch.staged_files import has_outputs_besides, remove_sent_files, remove_staged_files
    from ..node import removal
    from ..node.node_root import env_path

    job, brought = request.job, request.brought
    path, folder = locate_work_tree(job, request.root), locate_work_dir(job, request.root)
    if request.keep_files or brought is not None:
        remove_staged_files(path, env_path(request.root, job.bundle_id))
        remove_sent_files(path, folder)
        unsent = brought is not None and has_outputs_besides(folder, job.outputs, brought)
        if request.keep_files or unsent:
            return TidyAnswer(left=not removal.remove_if_empty(path), unsent=unsent)
    removal.delete_as_far_as_possible(path)
    return TidyAnswer()


def _clean(request: messages.CleanRequest, channel: AgentChannel) -> messages.CleanAnswer:
    from ..environment import clean
    from ..node.node_root import ROOT_VARIABLE

    job = request.job
    roots = clean.list_node_roots(job.node_root, os.environ)
    cleaned = [clean.clean(root, job.keep, job.dry_run) for root in roots]
    if job.allocation is Allocation.LOCAL and request.node == job.nodes[0]:
        # Below it lie the roots of all these nodes; in it what `stager exec` has unpacked.
        user_root = os.path.dirname(os.path.dirname(os.environ[ROOT_VARIABLE]))
        cleaned.append(clean.clean(user_root, job.keep, job.dry_run, nodes=False))
    problems = tuple(problem for root in cleaned for problem in root.problems)
    return messages.CleanAnswer(roots=tuple(cleaned), problems=problems)


PHASES: dict[str, Phase] = {
    PhaseName.PREFLIGHT: _preflight,
    PhaseName.UNPACK: _unpack,
    PhaseName.PROBE: _probe,
    PhaseName.DEEP: _deep,
    PhaseName.LAUNCH: _launch,
    PhaseName.TIDY: _tidy,
    PhaseName.CLEAN: _clean,
}
