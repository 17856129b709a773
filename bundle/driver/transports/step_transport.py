"""The transport of steps: one command starts an agent on each node, and carries their lines.

The phases share one step over all nodes; only a launch may have its own. The agents get program
and request on standard input, so nothing has to be on a node beforehand; they answer in frames
(:mod:`bundle.channel.frames`). As long as standard input stays open they work; its end tells them
to stop, however the driver came to its own. What the command is, and what its errors mean, the
cluster knows (:mod:`bundle.driver.transports.step_transport`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import selectors
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, Protocol, cast

from ...channel import agent_channel
from ...channel.bootstrap import make_memory_file
from ...launch import output_reader
from ...protocol.enumerations import Launcher, PhaseName
from ...protocol.job import Job
from ...protocol.messages import LaunchRequest
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...system import processes, signals
from . import relay_source
from .agent_program import AgentProgram, factor_requests, request_line
from .driver_channel import DriverChannel
from .file_sender import NOT_READY, SendCommand, send_file
from .liveness import Liveness, Look
from .phase_run import PhaseAnswers, PhaseLimit, PhaseRun
from .relay_source import describe_transfer
from .transport import (
    TOLD_TO_END,
    Delivery,
    Ended,
    OnEvent,
    Requests,
    Retry,
    Step,
    StepErrors,
    StepFault,
    Transfer,
    list_mounts,
    make_saving_note,
)

# --- The output of a command on a node: read until it ends, until it stalls, or until a signal

# A disk or a network that hangs would otherwise hold the allocation, and the user, for ever.

SILENT_SECONDS = 300.0
"""Time without a byte after which no more is expected."""
_CHUNK = 1 << 20


class FetchedOutput(io.RawIOBase):
    """A pipe from a command.

    Attributes:
        given_up: True if its end was not waited for.
    """

    def __init__(self, pipe: IO[bytes], stopped: int, silent_seconds: float) -> None:
        """Read a pipe until ``stopped`` is readable, or no byte has come for some seconds."""
        super().__init__()
        self.given_up = False
        self._pipe, self._stopped, self._silent_seconds = pipe, stopped, silent_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)
        self._selector.register(stopped, selectors.EVENT_READ)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read what has come; return the number of bytes, 0 at the end.

        Raises:
            OSError: nothing has come for too long, or the reading is to end.
        """
        ready = {key.fd for key, _ in self._selector.select(self._silent_seconds)}
        if self._stopped in ready:
            self.given_up = True
            raise OSError(errno.ECANCELED, "stager was told to end")  # EINTR would be tried again
        if not ready:
            self.given_up = True
            raise OSError(errno.ETIMEDOUT, f"nothing has come for {self._silent_seconds:g} s")
        data = os.read(self._pipe.fileno(), len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Let go of what watches the pipe; the pipe itself stays open."""
        self._selector.close()
        super().close()


@contextlib.contextmanager
def read_until_signal(
    pipe: IO[bytes], silent_seconds: float = SILENT_SECONDS
) -> Iterator[FetchedOutput]:
    """Read from a command while the block runs; signals that end a program end the reading."""
    stopped, stop = os.pipe()
    os.set_blocking(stop, False)

    def end() -> None:
        with contextlib.suppress(BlockingIOError):  # it has been told often enough
            os.write(stop, b"!")

    try:
        with signals.handle_signals(end), FetchedOutput(pipe, stopped, silent_seconds) as output:
            yield output
    finally:
        os.close(stopped)
        os.close(stop)


# --- All that differs between clusters on which one command starts an agent on each node ---------


class StepCluster(Protocol):
    """The nodes of a job, and the command that starts agents on them."""

    variables: Mapping[str, str]
    """All variables for commands of ours, and for agents that start no ranks."""
    rank_variables: Mapping[str, str]
    """All variables for agents that start ranks in a step of their own."""
    carries: bool
    """True if variables may carry the program of the agents."""
    cpus: int
    """CPUs of each node's part."""
    patience: int
    """Seconds that nodes may go on after the first has ended well; 0 for any time."""
    errors: StepErrors
    """The reader of what the command writes to standard error."""

    def argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        """Return the command that starts agents."""

    def sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        """Return the variables that are sent to agents, with those for ranks if they start some."""

    def retries(self, on_event: OnEvent) -> Retry:
        """Return what decides whether to try again where nothing could start the agents."""

    def look_at(self, nodes: Sequence[str]) -> Look | None:
        """Begin to look whether silent nodes can be reached; None where that shows by itself."""

    def down(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Return those of the nodes that were lost before anything ran on them."""

    def send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        """Return the command that sends a file, without a relay, to agents that wait for it."""

    def relay_ports(self) -> range | None:
        """Return the ports of this host that nodes may connect to; None for any."""

    def not_started(self, why: str) -> Problem:
        """Return the problem of a command that cannot be started."""

    def ended_by(self, errors: str) -> str:
        """Return why the allocation ended; empty while it stands."""

    def hurry(self) -> None:
        """Keep every further wait short: the user has asked for the end."""


_POLL_SECONDS = 0.02
_LOST_SECONDS = 1.0
"""Time that a step gets to end by itself when all nodes but those that are lost have answered."""
_HOLD_SECONDS = 180.0
"""Time after which ranks that are held back begin although some nodes are still silent."""
_FOLLOWED = ProblemCode.NO_ANSWER_FOLLOWED


class StepTransport:
    """Reaches the nodes of a cluster."""

    def __init__(self, job: Job, cluster: StepCluster) -> None:
        self.nodes_here, self.lost_node = 1, ""
        self._job, self._cluster = job, cluster
        with open(sys.argv[0], "rb") as handle:
            self._program = AgentProgram(handle.read())
        self._latest: DriverChannel | None = None
        """The step that was started last."""
        self._session: DriverChannel | None = None
        """The step that all phases share."""
        self._session_nodes: frozenset[str] = frozenset()
        self._session_job: Job | None = None
        """The job that the agents of that step know."""
        self._open_steps = contextlib.ExitStack()
        self._grace = job.launch.grace_seconds + output_reader.AGENT_SECONDS

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        """Run one phase on the given nodes: in the step that all phases share, if it may."""
        joins = phase != PhaseName.LAUNCH or self._job.can_launch_in_session_step
        if not joins:
            self.close()
        try:
            run = self._run_until_begun(phase, requests, on_event, joins=joins)
            answers = run.answers
            failed = [*answers.failed, *sorted(answers.bad), *run.liveness.lost]
            failed = failed if phase == PhaseName.LAUNCH else []
            ended = describe_ends(requests, run.step, self._cluster, failed)
            ended.update(run.liveness.lost)
        except BaseException:
            self.close()
            raise
        if not joins or run.step.ended:
            self.close()
        return self._run_on_the_rest(run, requests, on_event, ended)

    def _run_until_begun(
        self, phase: str, requests: Requests, on_event: OnEvent, *, joins: bool
    ) -> PhaseRun:
        """Run a phase; repeat while Slurm's controller does not answer."""
        may_retry = self._cluster.retries(on_event)
        while True:
            run = self._run_once(phase, requests, on_event, joins=joins)
            refused = run.step.ended and not run.answers.answered
            if not (refused and may_retry(run.step.errors)):
                return run
            self.close()

    def _run_once(
        self, phase: str, requests: Requests, on_event: OnEvent, *, joins: bool
    ) -> PhaseRun:
        step, tasks = self._begin(phase, requests, joins=joins)
        run = self._make_phase_run(step, phase, requests, tasks, on_event)
        try:
            with contextlib.closing(run.liveness):
                self._listen(run)
        except signals.Stopped:  # the last output of the ranks belongs in their logs
            self.lost_node = run.liveness.first_lost()
            if phase == PhaseName.LAUNCH:
                on_event(make_saving_note(self._job))
            run.finish(self._grace)
            raise
        finally:
            run.report_losses(on_event)
        return run

    def _run_on_the_rest(
        self, run: PhaseRun, requests: Requests, on_event: OnEvent, ended: dict[str, Ended]
    ) -> dict[str, Ended]:
        """Retry without blocking nodes: Slurm starts a step on all nodes or none, may end all."""
        answers = run.answers
        launch = answers.phase == PhaseName.LAUNCH
        if launch and not answers.held:
            return ended
        blocking = self._find_blocking_nodes(requests, answers, ended)
        if launch:  # the others must learn how many they are: the driver asks again
            for node in blocking:
                ended[node] = replace(ended[node], unreachable=True)
            return ended
        rest = {
            node: request
            for node, request in requests.items()
            if node not in blocking and node not in answers.answered
        }
        if not blocking or not rest:
            return ended
        self.close()  # it may not have ended yet, but has told all tasks to
        return {**ended, **self.run(answers.phase, rest, on_event)}

    def _find_blocking_nodes(
        self, requests: Requests, answers: PhaseAnswers, ended: dict[str, Ended]
    ) -> set[str]:
        """Return nodes where nothing can start; add reasons of those down before to ``ended``."""
        silent = {node: ended[node] for node in requests if node not in answers.answered}
        followed = {node for node, end in silent.items() if end.problem is _FOLLOWED}
        if followed and answers.phase != PhaseName.LAUNCH:
            return requests.keys() - followed
        blocking = {node for node, end in silent.items() if end.problem.row.is_unreachable}
        if blocking or answers.answered:
            return blocking
        down = self._cluster.down(requests)
        ended.update(down)
        return set(down)

    def _begin(self, phase: str, requests: Requests, *, joins: bool) -> tuple[DriverChannel, int]:
        """Ask the session's agents, or start a step; return it and its tasks per node."""
        if not joins:
            tasks = self._count_tasks(phase, requests)
            step = self._open_steps.enter_context(self._start(phase, requests, tasks))
            return step, tasks
        job, session = next(iter(requests.values())).job, self._session
        if session is None or session.ended or not requests.keys() <= self._session_nodes:
            self.close()
            session = self._start(phase, requests, 1, PhaseName.SESSION)
            self._session = self._open_steps.enter_context(session)
            self._session_nodes = frozenset(requests)
        else:
            message = factor_requests(requests, self._session_job)
            if requests.keys() != self._session_nodes:
                message = replace(message, nodes=tuple(requests))
            session.tell(request_line(message))
        self._session_job = job
        return session, 1

    def _make_phase_run(
        self, step: DriverChannel, phase: str, requests: Requests, tasks: int, on_event: OnEvent
    ) -> PhaseRun:
        """Begin to follow a phase that a step's agents have been asked for."""
        liveness = Liveness(phase, requests, on_event, step.heartbeats, self._cluster.look_at)
        answers = PhaseAnswers(requests, tasks, liveness.take, phase)
        answers.held = self._holds(phase)
        in_container = self._job.launch.container_image is not None
        return PhaseRun(step, answers, liveness, in_container=in_container)

    def _start(
        self, phase: str, requests: Requests, tasks: int, command: str = ""
    ) -> DriverChannel:
        described = self._describe_step(phase, requests, tasks, command)
        self._latest = DriverChannel(*described, self._cluster.errors)
        return self._latest

    def _describe_step(
        self, phase: str, requests: Requests, tasks: int, command: str = ""
    ) -> tuple[list[str], dict[str, str], bytes]:
        """Return a step's command, its variables, and what its tasks are sent at once."""
        launches = phase == PhaseName.LAUNCH
        settings, cluster = self._job.launch, self._cluster
        step = Step(
            phase=phase,
            nodes=tuple(requests),
            cpus=max(1, cluster.cpus // tasks),
            tasks_per_node=tasks,
            together=launches and settings.elastic is None,
            patience=cluster.patience if launches else 0,
            image=settings.container_image,
            mounts=list_mounts(self._job),
        )
        if self._holds(phase):
            requests = {
                node: replace(request, hold=True)
                for node, request in requests.items()
                if isinstance(request, LaunchRequest)
            }
        variables = dict(cluster.rank_variables if launches else cluster.variables)
        if cluster.carries:
            variables.update(self._program.variables())
        first = self._program.step_input(
            factor_requests(requests),
            carried=cluster.carries,
            variables=cluster.sent_variables(ranks=launches),
        )
        argv = cluster.argv(step, self._program.bootstrap, command or phase)
        return argv, variables, first

    def _count_tasks(self, phase: str, requests: Requests) -> int:
        """Return the tasks of a node: one for each rank where Slurm starts the ranks, else one."""
        if phase != PhaseName.LAUNCH or self._job.launch.launcher is not Launcher.SRUN:
            return 1
        launches = [request for request in requests.values() if isinstance(request, LaunchRequest)]
        return max(request.group.nproc for request in launches)

    def _holds(self, phase: str) -> bool:
        """Return whether ranks wait until all nodes are there: the job may go on with fewer."""
        job = self._job
        return (
            phase == PhaseName.LAUNCH
            and not job.can_launch_in_session_step
            and job.min_nodes is not None
        )

    def _listen(self, run: PhaseRun) -> None:
        step, answers = run.step, run.answers
        limit = PhaseLimit(answers.phase, self._job, len(answers.nodes), self._cluster.patience)
        hold_until = time.monotonic() + _HOLD_SECONDS
        while not step.ended:
            step.pump(answers.take)
            for number in signals.take_user_signals():
                step.tell(f"{agent_channel.SIGNAL}{number}")
            is_due = time.monotonic() > hold_until or answers.ready >= answers.nodes
            if answers.held and is_due:  # ranks that are held back
                answers.held = False
                step.tell(agent_channel.GO)
            lost = run.lost_nodes()
            complete = answers.complete(lost)
            if limit.is_reached(run, lost, complete=complete):
                run.finish(self._grace)
            elif run.lost_nodes() is not lost:
                continue  # some were given up just now: look again who is left
            elif complete and step is self._session:
                return
            elif complete and run.liveness.lost:  # the step would wait for the node that is lost
                step.finish(answers.take, _LOST_SECONDS)
            elif run.settled():  # agents of a step of its own stay until then
                run.finish(self._grace)

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Send the file to agents that wait for it, and unpack it while it comes.

        A step gets the file on all of its nodes; where only some of them are to get it, these have
        a step of their own.
        """
        joins = requests.keys() == self._session_nodes
        may_retry = self._cluster.retries(on_event)
        with contextlib.ExitStack() as open_here:
            while True:
                if joins:
                    step, _ = self._begin(PhaseName.UNPACK, requests, joins=True)
                else:
                    step = open_here.enter_context(self._start(PhaseName.UNPACK, requests, 1))
                run = self._make_phase_run(step, PhaseName.UNPACK, requests, 1, on_event)
                if transfer.token:
                    failed, seconds = relay_source.send(transfer, run, self._cluster.relay_ports())
                else:
                    command, env = self._cluster.send_command, self._cluster.variables
                    failed, seconds = send_file(transfer, run, may_retry, command, env)
                if not may_retry(step.errors if step.ended else ""):
                    break
            open_here.enter_context(contextlib.closing(run.liveness))
            self._listen(run)
            run.report_losses(on_event)
            if not (joins or step.ended):
                step.finish(run.answers.take, _LOST_SECONDS if run.liveness.lost else self._grace)
            ended = {**describe_ends(requests, step, self._cluster), **run.liveness.lost}
            settled = self._settled(run, failed, requests, ended)
            notes = describe_transfer(run.answers, transfer.size)
            return Delivery(failed, ended, seconds, settled, notes)

    def _settled(
        self,
        run: PhaseRun,
        failed: dict[str, str],
        requests: Requests,
        ended: dict[str, Ended],
    ) -> frozenset[str]:
        """Return the nodes that kept others from having a file; notes that these do not have it."""
        answers = run.answers
        blocking = set(run.liveness.lost)
        if run.step.ended:
            blocking |= self._find_blocking_nodes(requests, answers, ended)
            if blocking and not requests.keys() <= blocking | answers.answered.keys():
                failed.setdefault("", "its step ended with that of other nodes")
        if failed.get("") == NOT_READY:
            blocking |= answers.answered.keys() - answers.ready
            if not blocking:  # how each node's agent ended says why
                failed.clear()
        for node in blocking:
            failed.pop(node, None)
        return frozenset(blocking)

    def fetch(self, phase: str, requests: Requests, take: Callable[[IO[bytes]], None]) -> None:
        """Run a phase on one node whose agent answers with a stream of bytes.

        What the command writes besides is shown only where it has failed by itself: of a step that
        is ended from here Slurm reports an abort.
        """
        argv, variables, first = self._describe_step(phase, requests, 1)
        with (
            open(make_memory_file(first), "rb") as stdin,
            open(make_memory_file(b""), "rb") as stderr,
        ):
            try:
                running = processes.start(
                    argv,
                    env=variables,
                    stdin=stdin,
                    stdout=processes.PIPE,
                    stderr=stderr,
                )
            except processes.ProcessError as exc:
                raise NodeError(self._cluster.not_started(exc.reason)) from exc
            grace, until = _LOST_SECONDS, 0.0
            try:
                with read_until_signal(cast("IO[bytes]", running.stdout)) as output:
                    stream = io.BufferedReader(output, _CHUNK)
                    take(stream)
                    with contextlib.suppress(OSError):
                        if not stream.read(1):  # else more comes than was read
                            until = time.monotonic() + self._grace
                    grace = _LOST_SECONDS if output.given_up else self._grace
                while running.poll() is None and time.monotonic() < until:
                    time.sleep(_POLL_SECONDS)
            finally:
                failed = running.poll()
                processes.stop(running, grace)
                if failed:
                    stderr.seek(0)
                    sys.stderr.write(stderr.read().decode(errors="replace"))

    def hurry(self) -> None:
        """Keep every further wait short."""
        self._cluster.hurry()

    def close(self) -> None:
        """End all steps."""
        self._session = None
        self._open_steps.close()

    def ended_by(self) -> str:
        """Return why the allocation ended; empty where that is not known."""
        return self._cluster.ended_by(self._latest.errors if self._latest else "")


def describe_ends(
    requests: Requests, step: DriverChannel, cluster: StepCluster, failed: Iterable[str] = ()
) -> dict[str, Ended]:
    """Return how each node's part of a step has ended, for the case that it gave no answer."""
    general = cluster.errors.general_fault(step.code, step.errors)
    blamed = next(iter(failed), "")
    first = blamed or next(iter(step.faults), "")
    if step.stopped and first:  # the others were to end with that node, and took too long
        general = StepFault(_FOLLOWED, {"first": first}, general.status)
    ends = {}
    for node in requests:
        fault = step.faults.get(node, general)
        if blamed and fault.status in TOLD_TO_END:
            fault = StepFault(_FOLLOWED, {"first": blamed}, fault.status)
        code = fault.status
        if code is None:  # srun itself may have ended well
            code = step.code or int(fault.problem.row.is_unreachable)
        ends[node] = Ended(code, fault.problem, fault.values)
    return ends
