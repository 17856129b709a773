"""The transport of steps: one command starts an agent on each node, and carries their lines.

The phases share one step over all nodes; only a launch may have its own. The agents get program
and request on standard input, so nothing has to be on a node beforehand; they answer in frames
(:mod:`bundle.channel.frames`). As long as standard input stays open they work; its end tells them
to stop, however the driver came to its own. What the command is, and what its errors mean, a
:class:`StepCluster` knows.
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
from typing import IO, NamedTuple, Protocol, cast

from ...channel import agent_channel
from ...channel.bootstrap import make_memory_file
from ...launch import output_reader
from ...protocol.enumerations import Launcher, PhaseName
from ...protocol.job import Job
from ...protocol.messages import LaunchRequest
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...system import processes, signals
from ...system.files import error_text
from . import relay_source
from .agent_program import AgentProgram, factor_requests, request_line
from .driver_channel import DriverChannel
from .liveness import Liveness, Look
from .phase_run import SECONDS, PhaseAnswers, PhaseLimit, PhaseRun
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
    Take,
    Transfer,
    Transport,
    list_root_places,
    make_saving_note,
)

# --- The output of a command on a node: read until it ends, until it stalls, or until a signal

# A disk or a network that hangs would otherwise hold the allocation, and the user, for ever.

SILENT_SECONDS = 300.0
"""Time without a byte after which no more is expected."""
_CHUNK = 1 << 20


class _FetchedOutput(io.RawIOBase):
    """A pipe from a command; ``given_up`` is True if its end was not waited for."""

    def __init__(self, pipe: IO[bytes], stopped: int, silent_seconds: float) -> None:
        """Read a pipe until ``stopped`` is readable, or no byte has come for some seconds."""
        super().__init__()
        self.given_up = False
        self._pipe, self._stopped, self._silent_seconds = pipe, stopped, silent_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)
        self._selector.register(stopped, selectors.EVENT_READ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
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
        self._selector.close()  # the pipe itself stays open
        super().close()


@contextlib.contextmanager
def read_until_signal(
    pipe: IO[bytes], silent_seconds: float = SILENT_SECONDS
) -> Iterator[_FetchedOutput]:
    """Read from a command while the block runs; signals that end a program end the reading."""
    stopped, stop = os.pipe()
    os.set_blocking(stop, False)

    def end() -> None:
        with contextlib.suppress(BlockingIOError):  # it has been told often enough
            os.write(stop, b"!")

    try:
        with signals.handle_signals(end), _FetchedOutput(pipe, stopped, silent_seconds) as output:
            yield output
    finally:
        os.close(stopped)
        os.close(stop)


# --- Sending a file with one command: the nodes work on what has arrived while the rest is coming -

_SEND_GRACE = 5.0
NOT_READY = "not every node was ready for it"
"""The reason why nothing was sent; those nodes' own answers say more."""
_POLL_SECONDS = 0.02


class SendCommand(NamedTuple):
    """A command that sends a file."""

    argv: list[str]
    find_faults: Callable[[str], dict[str, str]]
    """Finds in what it wrote to standard error the nodes that it failed on, and how."""
    source: str = os.devnull
    """The file that it reads from standard input."""


def send_file(
    transfer: Transfer,
    run: PhaseRun,
    may_retry: Retry,
    make_command: Callable[[Transfer, PhaseAnswers], SendCommand],
    env: Mapping[str, str],
) -> tuple[dict[str, str], float]:
    """Send a file once all agents are ready; then tell them that it is there, or will not come.

    Returns:
        The nodes that were not reached, with the reasons, and the seconds that it took. Nothing is
        sent where some agents have ended, or are lost, before all are ready.
    """
    step, answers = run.step, run.answers
    deadline = time.monotonic() + SECONDS[PhaseName.UNPACK]
    run.lose_late(run.await_ready(deadline))
    if step.has_ended or answers.answered or run.lost_nodes():
        step.tell(agent_channel.STOP)
        return {"": NOT_READY}, 0.0  # how those nodes' agents ended says why
    started = time.monotonic()
    while True:
        failed = _send_once(make_command(transfer, answers), env, run, deadline)
        if step.has_ended or not may_retry(failed.get("", "")):
            break
    step.tell(agent_channel.STOP if failed else agent_channel.GO)
    return failed, time.monotonic() - started


def _send_once(
    command: SendCommand, env: Mapping[str, str], run: PhaseRun, deadline: float
) -> dict[str, str]:
    # Nobody reads its errors while it runs, and a pipe could fill.
    with open(make_memory_file(b""), "w+b") as errors:
        try:
            with open(command.source, "rb") as source:
                process = processes.start(
                    command.argv, env=env, stdin=source, stdout=processes.DEVNULL, stderr=errors
                )
        except processes.ProcessError as exc:
            return {"": exc.reason}
        except OSError as exc:
            return {"": error_text(exc)}
        try:
            while process.poll() is None and not run.step.has_ended:
                if time.monotonic() > deadline:
                    return {"": "it did not finish in time"}
                run.step.pump(run.answers.take, _POLL_SECONDS)
            if not process.poll():
                return {}
        finally:
            processes.stop(process, _SEND_GRACE)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    lines = text.strip().splitlines() or ["it failed without an error message"]
    return command.find_faults(text) or {"": lines[-1]}


# --- All that differs between clusters on which one command starts an agent on each node ---------


class StepCluster(Protocol):
    """The nodes of a job, and the command that starts agents on them."""

    variables: Mapping[str, str]
    """All variables for commands of ours, and for agents that start no ranks."""
    rank_variables: Mapping[str, str]
    """All variables for agents that start ranks in a step of their own."""
    carries: bool = False
    """True if variables may carry the program of the agents."""
    cpus: int = 1
    """CPUs of each node's part."""
    patience: int
    """Seconds that nodes may go on after the first has ended well; 0 for any time."""
    errors: StepErrors
    """The reader of what the command writes to standard error."""
    not_started: ProblemCode
    """The problem of a command that cannot be started."""

    def make_argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        """Return the command that starts agents."""

    def make_send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        """Return the command that sends a file, without a relay, to agents that wait for it."""

    def sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        """Return the variables that are sent to agents, with those for ranks if they start some."""
        return {}

    def make_retry(self, on_event: OnEvent) -> Retry:
        """Return what decides whether to try again where nothing could start the agents."""
        return lambda errors: False

    def begin_look(self, nodes: Sequence[str]) -> Look | None:
        """Begin to look whether silent nodes can be reached; None where that shows by itself."""
        return None

    def find_down_nodes(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Return those of the nodes that were lost before anything ran on them."""
        return {}

    def find_relay_ports(self) -> range | None:
        """Return the ports of this host that nodes may connect to; None for any."""
        return None

    def find_ending(self, errors: str) -> str:
        """Return why the allocation ended; empty while it stands."""
        return ""

    def hurry(self) -> None:
        """Keep every further wait short: the user has asked for the end."""
        return


_LOST_SECONDS = 1.0
"""Time that a step gets to end by itself when all nodes but those that are lost have answered."""
_HOLD_SECONDS = 180.0
"""Time after which ranks that are held back begin although some nodes are still silent."""
_FOLLOWED = ProblemCode.NO_ANSWER_FOLLOWED


class StepTransport(Transport):
    """Reaches the nodes of a cluster."""

    def __init__(self, job: Job, cluster: StepCluster) -> None:
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
        launches = phase == PhaseName.LAUNCH
        joins = not launches or self._job.can_launch_in_session_step
        if not joins:
            self.close()
        try:
            run = self._run_until_begun(phase, requests, on_event, joins=joins)
            answers, lost = run.answers, run.liveness.lost
            failed = [*answers.failed, *sorted(answers.bad), *lost] if launches else []
            ended = {**describe_ends(requests, run.step, self._cluster, failed), **lost}
        except BaseException:
            self.close()
            raise
        if not joins or run.step.has_ended:
            self.close()
        return self._run_on_the_rest(run, requests, on_event, ended)

    def _run_until_begun(
        self, phase: str, requests: Requests, on_event: OnEvent, *, joins: bool
    ) -> PhaseRun:
        may_retry = self._cluster.make_retry(on_event)
        while True:
            run = self._run_once(phase, requests, on_event, joins=joins)
            refused = run.step.has_ended and not run.answers.answered
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
            return {**ended, **{node: ended[node]._replace(unreachable=True) for node in blocking}}
        known = {*blocking, *answers.answered}
        rest = {node: request for node, request in requests.items() if node not in known}
        if not blocking or not rest:
            return ended
        self.close()  # it may not have ended yet, but has told all tasks to
        return {**ended, **self.run(answers.phase, rest, on_event)}

    def _find_blocking_nodes(
        self, requests: Requests, answers: PhaseAnswers, ended: dict[str, Ended]
    ) -> set[str]:
        """Return nodes where nothing can start; add reasons of those down before to ``ended``."""
        silent = {node: ended[node].problem for node in requests.keys() - answers.answered.keys()}
        followed = {node for node, problem in silent.items() if problem is _FOLLOWED}
        if followed and answers.phase != PhaseName.LAUNCH:
            return requests.keys() - followed
        blocking = {node for node, problem in silent.items() if problem.row.is_unreachable}
        if blocking or answers.answered:
            return blocking
        down = self._cluster.find_down_nodes(requests)
        ended.update(down)
        return set(down)

    def _begin(self, phase: str, requests: Requests, *, joins: bool) -> tuple[DriverChannel, int]:
        if not joins:
            tasks = self._count_tasks(phase, requests)
            step = self._open_steps.enter_context(self._start(phase, requests, tasks))
            return step, tasks
        job, session = next(iter(requests.values())).job, self._session
        if session is None or session.has_ended or not requests.keys() <= self._session_nodes:
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
        liveness = Liveness(phase, requests, on_event, step.heartbeats, self._cluster.begin_look)
        answers = PhaseAnswers(requests, tasks, liveness.take, phase)
        answers.held = self._holds(phase)
        in_container = self._job.launch.container_image is not None
        return PhaseRun(step, answers, liveness, in_container=in_container)

    def _start(
        self, phase: str, requests: Requests, tasks: int, command: str = ""
    ) -> DriverChannel:
        described = self._describe_step(phase, requests, tasks, command)
        try:
            self._latest = DriverChannel(*described, self._cluster.errors)
        except processes.ProcessError as exc:
            raise self._refuse_start(exc) from exc
        return self._latest

    def _refuse_start(self, exc: processes.ProcessError) -> NodeError:
        return NodeError(Problem(self._cluster.not_started, "", {"why": exc.reason}))

    def _describe_step(
        self, phase: str, requests: Requests, tasks: int, command: str = ""
    ) -> tuple[list[str], dict[str, str], bytes]:
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
            mounts=self._list_mounts(),
        )
        if self._holds(phase):
            launches_of = cast("Mapping[str, LaunchRequest]", requests)
            requests = {node: replace(one, hold=True) for node, one in launches_of.items()}
        variables = dict(cluster.rank_variables if launches else cluster.variables)
        if cluster.carries:
            variables.update(self._program.variables())
        first = self._program.make_step_input(
            factor_requests(requests),
            carried=cluster.carries,
            variables=cluster.sent_variables(ranks=launches),
        )
        argv = cluster.make_argv(step, self._program.bootstrap, command or phase)
        return argv, variables, first

    def _list_mounts(self) -> tuple[str, ...]:
        """Return a container's mounts: the place of the node root, and those the user named."""
        places = list_root_places(self._job, ("/tmp",))  # noqa: S108 - its usual place
        return (*(f"{place}:{place}" for place in places), *self._job.launch.container_mounts)

    def _count_tasks(self, phase: str, requests: Requests) -> int:
        """Return the tasks of a node: one for each rank where Slurm starts the ranks, else one."""
        if phase != PhaseName.LAUNCH or self._job.launch.launcher is not Launcher.SRUN:
            return 1
        launches = cast("Mapping[str, LaunchRequest]", requests)
        return max(request.group.nproc for request in launches.values())

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
        while not step.has_ended:
            step.pump(answers.take)
            for number in signals.take_user_signals():
                step.tell(f"{agent_channel.SIGNAL}{number}")
            is_due = time.monotonic() > hold_until or answers.ready >= answers.nodes
            if answers.held and is_due:  # ranks that are held back
                answers.held = False
                step.tell(agent_channel.GO)
            if self._finish_if_done(run, limit):
                return

    def _finish_if_done(self, run: PhaseRun, limit: PhaseLimit) -> bool:
        """End a step that is done; return True where the session's has all answers and stays."""
        step, answers, lost = run.step, run.answers, run.lost_nodes()
        complete = answers.is_complete(lost)
        if limit.is_reached(run, lost, complete=complete):
            run.finish(self._grace)
        elif run.lost_nodes() is not lost:
            return False  # some were given up just now: look again who is left
        elif complete and step is self._session:
            return True
        elif complete and run.liveness.lost:  # the step would wait for the node that is lost
            step.finish(answers.take, _LOST_SECONDS)
        elif run.is_settled():  # agents of a step of its own stay until then
            run.finish(self._grace)
        return False

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Send the file to agents that wait for it, and unpack it while it comes.

        A step gets the file on all of its nodes; where only some of them are to get it, these have
        a step of their own.
        """
        joins, cluster = requests.keys() == self._session_nodes, self._cluster
        may_retry = cluster.make_retry(on_event)
        with contextlib.ExitStack() as open_here:
            while True:
                if joins:
                    step, _ = self._begin(PhaseName.UNPACK, requests, joins=True)
                else:
                    step = open_here.enter_context(self._start(PhaseName.UNPACK, requests, 1))
                run = self._make_phase_run(step, PhaseName.UNPACK, requests, 1, on_event)
                if transfer.token:
                    failed, seconds = relay_source.send(transfer, run, cluster.find_relay_ports())
                else:
                    command, env = cluster.make_send_command, cluster.variables
                    failed, seconds = send_file(transfer, run, may_retry, command, env)
                if not may_retry(step.errors if step.has_ended else ""):
                    break
            open_here.enter_context(contextlib.closing(run.liveness))
            self._listen(run)
            run.report_losses(on_event)
            if not (joins or step.has_ended):
                step.finish(run.answers.take, _LOST_SECONDS if run.liveness.lost else self._grace)
            ended = {**describe_ends(requests, step, cluster), **run.liveness.lost}
            settled = self._find_settled_nodes(run, failed, requests, ended)
            notes = relay_source.describe_transfer(run.answers, transfer.size)
            return Delivery(failed, ended, seconds, settled, notes)

    def _find_settled_nodes(
        self, run: PhaseRun, failed: dict[str, str], requests: Requests, ended: dict[str, Ended]
    ) -> frozenset[str]:
        """Return the nodes that kept others from having a file; notes that these do not have it."""
        answers = run.answers
        blocking = set(run.liveness.lost)
        if run.step.has_ended:
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

    def fetch(self, phase: str, requests: Requests, take: Take) -> None:
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
                    argv, env=variables, stdin=stdin, stdout=processes.PIPE, stderr=stderr
                )
            except processes.ProcessError as exc:
                raise self._refuse_start(exc) from exc
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

    def find_ending(self) -> str:
        """Return why the allocation ended; empty where that is not known."""
        return self._cluster.find_ending(self._latest.errors if self._latest else "")


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
