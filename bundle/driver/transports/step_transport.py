"""The transport of steps: one command starts an agent on each node, and carries their lines.

The phases share one step over all nodes; only a launch may have its own. The end of the agents'
standard input tells them to stop.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import selectors
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, NamedTuple, Optional, cast

from ...channel import agent_channel
from ...channel.bootstrap import make_memory_file
from ...launch import output_reader
from ...protocol.enumerations import Launcher, PhaseName
from ...protocol.job import Job
from ...protocol.messages import LaunchRequest
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...system import processes, signals
from ...system.files import error_text
from . import relay_source, transport
from .agent_program import AgentProgram, factor_requests, request_line
from .driver_channel import DriverChannel
from .liveness import Liveness, SilenceCheck
from .phase_run import SECONDS, PhaseAnswers, PhaseLimit, PhaseRun
from .transport import Delivery, Ended, OnEvent, Requests, Retry, Step, Take, Transfer

SILENT_SECONDS = 300.0  # time without a byte of a fetched stream after which no more is expected
_CHUNK = 1 << 20


class _FetchedOutput(io.RawIOBase):
    """A pipe from a command; ``given_up`` is True if its end was not waited for."""

    def __init__(self, pipe: IO[bytes], silent_seconds: float) -> None:
        super().__init__()
        self.given_up = False
        self._pipe, self._silent_seconds = pipe, silent_seconds
        self._stopped, self._stop = os.pipe()
        os.set_blocking(self._stop, False)
        self._selector = selectors.DefaultSelector()
        for file in (pipe, self._stopped):
            self._selector.register(file, selectors.EVENT_READ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        ready = {key.fd for key, _ in self._selector.select(self._silent_seconds)}
        if not ready or self._stopped in ready:
            self.given_up = True
            if ready:  # EINTR would be tried again
                raise OSError(errno.ECANCELED, "stager was told to end")
            raise OSError(errno.ETIMEDOUT, f"nothing has come for {self._silent_seconds:g} s")
        data = os.read(self._pipe.fileno(), len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def stop(self) -> None:
        """Let the reading end; to be called from a signal handler."""
        if not self.closed:
            with contextlib.suppress(BlockingIOError):  # it has been told often enough
                os.write(self._stop, b"!")

    def close(self) -> None:
        if not self.closed:  # a reader on top of it closes it as well
            super().close()
            self._selector.close()  # the pipe itself stays open
            os.close(self._stopped)
            os.close(self._stop)


@contextlib.contextmanager
def read_until_signal(
    pipe: IO[bytes], silent_seconds: float = SILENT_SECONDS
) -> Iterator[_FetchedOutput]:
    """Read from a command while the block runs; signals that end a program end the reading."""
    with _FetchedOutput(pipe, silent_seconds) as output, signals.handle_signals(output.stop):
        yield output


_SEND_GRACE = 5.0
NOT_READY = "not every node was ready for it"
STEP_ENDED = "the step of its agents ended meanwhile"
"""The reasons why it was not sent, or not all of it; the ends of the nodes' agents say more."""
_POLL_SECONDS = 0.02


class SendCommand(NamedTuple):
    """A command that sends a file."""

    argv: list[str]
    find_faults: Callable[[str], dict[str, str]]  # by node, in its standard error
    source: str = os.devnull  # the file that it reads from standard input


def send_file(
    transfer: Transfer,
    run: PhaseRun,
    may_retry: Retry,
    make_command: Callable[[Transfer, PhaseAnswers], SendCommand],
    env: Mapping[str, str],
) -> tuple[dict[str, str], float | None]:
    """Send a file, unless an agent ends or is lost before all are ready; tell them the outcome.

    Returns the nodes that were not reached, with the reasons, and the seconds that it took.
    """
    step, answers = run.step, run.answers
    deadline = time.monotonic() + SECONDS[PhaseName.UNPACK]
    run.give_up_late(run.await_ready(deadline))
    if step.has_ended or answers.answered or run.lost_nodes():
        step.send_line(agent_channel.STOP)
        return {"": NOT_READY}, None
    started = time.monotonic()
    while True:
        failed = _send_once(make_command(transfer, answers), env, run, deadline)
        if step.has_ended or not may_retry(failed.get("", "")):
            break
    step.send_line(agent_channel.STOP if failed else agent_channel.GO)
    return failed, None if failed.get("") == STEP_ENDED else time.monotonic() - started


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
            while process.poll() is None:
                if run.step.has_ended:
                    return {"": STEP_ENDED}
                if time.monotonic() > deadline:
                    return {"": "it did not finish in time"}
                run.step.pump(run.answers.take, _POLL_SECONDS)
        finally:
            processes.stop(process, _SEND_GRACE)
        if process.returncode == 0:
            return {}
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    lines = text.strip().splitlines() or ["it failed without an error message"]
    return command.find_faults(text) or {"": lines[-1]}


Stack = Optional[contextlib.ExitStack]  # closes a step of its own
_LOST_SECONDS = 1.0  # to end by itself when only lost nodes have not answered
_HOLD_SECONDS = 180.0  # after that, ranks that are held back begin without silent nodes
_FOLLOWED = ProblemCode.NO_ANSWER_FOLLOWED


class StepTransport(transport.Transport):
    """Reaches the nodes of a cluster."""

    variables: Mapping[str, str]  # of our commands, and of agents that start no ranks
    rank_variables: Mapping[str, str]  # of agents that start ranks in a step of their own
    carries: bool = False  # true if variables may carry the program of the agents
    cpus: int = 1
    patience: int  # seconds that nodes may go on after the first has ended well; 0: no limit
    errors: transport.StepErrors
    not_started: ProblemCode

    def __init__(self, job: Job) -> None:
        self._job = job
        with open(sys.argv[0], "rb") as handle:
            self._program = AgentProgram(handle.read())
        self._latest: DriverChannel | None = None  # the step of the phase that was begun last
        self._session: DriverChannel | None = None
        self._session_nodes: frozenset[str] = frozenset()
        self._session_job: Job | None = None  # the job that the agents of that step know
        self._open_steps = contextlib.ExitStack()
        self._grace = job.launch.grace_seconds + output_reader.AGENT_SECONDS

    @abstractmethod
    def _make_argv(self, step: Step, bootstrap: str, command: str) -> list[str]: ...

    @abstractmethod
    def _make_send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand: ...

    def _sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        return {}

    def _make_retry(self, on_event: OnEvent) -> Retry:
        return lambda errors: False

    def _begin_check(self, nodes: Sequence[str]) -> SilenceCheck | None:
        return None

    def _find_down_nodes(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Return those of the nodes that were lost before anything ran on them."""
        return {}

    def _find_relay_ports(self) -> range | None:
        return None  # any

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        """Run one phase on the given nodes: in the step that all phases share, if it may."""
        launches = phase == PhaseName.LAUNCH
        joins = not launches or self._job.can_launch_in_session_step
        if not joins:
            self.close()
        try:
            run = self._run_step(phase, requests, on_event, None if joins else self._open_steps)
            answers, lost = run.answers, run.liveness.lost
            failed = [*answers.failed, *sorted(answers.bad), *lost] if launches else []
            ended = {**describe_ends(requests, run.step, self.errors, failed), **lost}
        except BaseException:
            self.close()
            raise
        if not joins or run.step.has_ended:
            self.close()
        return self._run_on_the_rest(run, on_event, ended)

    def _run_step(
        self, phase: str, requests: Requests, on_event: OnEvent, stack: Stack
    ) -> PhaseRun:
        may_retry = self._make_retry(on_event)
        while True:
            run = self._begin(phase, requests, on_event, stack)
            with self._supervise(run, on_event, finish=True):
                self._listen(run)
            refused = run.step.has_ended and not run.answers.answered
            if not (refused and may_retry(run.step.errors)):
                return run
            self.close()

    @contextlib.contextmanager
    def _supervise(self, run: PhaseRun, on_event: OnEvent, *, finish: bool) -> Iterator[None]:
        """Note what is lost while a phase runs; finish the step where the job is told to end."""
        try:
            yield
        except (signals.Stopped, transport.LaunchStopped):
            self.lost_node = run.liveness.first_lost()
            if finish:  # the last output of the ranks belongs in their logs
                if run.answers.phase == PhaseName.LAUNCH:
                    on_event(transport.make_saving_note(self._job))
                run.finish(self._grace)
            raise
        finally:
            run.liveness.close()
            run.report_losses()

    def _run_on_the_rest(
        self, run: PhaseRun, on_event: OnEvent, ended: dict[str, Ended]
    ) -> dict[str, Ended]:
        """Retry without blocking nodes: Slurm starts a step on all nodes or none, may end all."""
        answers = run.answers
        launches = answers.phase == PhaseName.LAUNCH
        if launches and not answers.held:
            return ended
        blocking = self._find_blocking_nodes(answers, ended)
        if launches:  # the others must learn how many they are: the driver asks again
            return {**ended, **{node: ended[node]._replace(unreachable=True) for node in blocking}}
        known = {*blocking, *answers.answered}
        rest = {node: one for node, one in answers.requests.items() if node not in known}
        if not blocking or not rest:
            return ended
        self.close()  # it may not have ended yet, but has told all tasks to
        return {**ended, **self.run(answers.phase, rest, on_event)}

    def _find_blocking_nodes(self, answers: PhaseAnswers, ended: dict[str, Ended]) -> set[str]:
        """Return nodes where nothing can start; add reasons of those down before to ``ended``."""
        silent = {node: ended[node].problem for node in answers.nodes - answers.answered.keys()}
        followed = {node for node, problem in silent.items() if problem is _FOLLOWED}
        if followed and answers.phase != PhaseName.LAUNCH:
            return answers.nodes - followed
        blocking = {node for node, problem in silent.items() if problem.row.is_unreachable}
        if blocking or answers.answered:
            return blocking
        down = self._find_down_nodes(answers.nodes)
        ended.update(down)
        return set(down)

    def _begin(self, phase: str, requests: Requests, on_event: OnEvent, stack: Stack) -> PhaseRun:
        """Begin a phase: in the step that all share, or in one of its own, which a stack closes."""
        tasks = 1
        if stack is None:
            step = self._join_session(phase, requests)
        else:
            first = next(iter(requests.values()))
            if isinstance(first, LaunchRequest) and self._job.launch.launcher is Launcher.SRUN:
                tasks = first.group.nproc  # each rank is a task
            step = stack.enter_context(self._start(phase, requests, tasks))
        self._latest = step
        liveness = Liveness(phase, requests, on_event, step.heartbeats, self._begin_check)
        answers = PhaseAnswers(requests, tasks, liveness.take, phase)
        answers.held = self._holds(phase)
        in_container = self._job.launch.container_image is not None
        return PhaseRun(step, answers, liveness, in_container=in_container)

    def _join_session(self, phase: str, requests: Requests) -> DriverChannel:
        session = self._session
        if session is None or session.has_ended or not requests.keys() <= self._session_nodes:
            self.close()
            session = self._start(phase, requests, 1, PhaseName.SESSION)
            self._session = self._open_steps.enter_context(session)
            self._session_nodes = frozenset(requests)
        else:
            message = factor_requests(requests, self._session_job)
            if requests.keys() != self._session_nodes:
                message = replace(message, nodes=tuple(requests))
            session.send_line(request_line(message))
        self._session_job = next(iter(requests.values())).job
        return session

    def _start(
        self, phase: str, requests: Requests, tasks: int, command: str = ""
    ) -> DriverChannel:
        described = self._describe_step(phase, requests, tasks, command)
        with self._convert_errors():
            return DriverChannel(*described, self.errors)

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except processes.ProcessError as exc:
            raise NodeError(Problem(self.not_started, "", {"why": exc.reason})) from exc

    def _describe_step(
        self, phase: str, requests: Requests, tasks: int, command: str = ""
    ) -> tuple[list[str], dict[str, str], bytes]:
        launches = phase == PhaseName.LAUNCH
        settings = self._job.launch
        # A container sees the place of the node root, and what the user named.
        places = transport.list_root_places(self._job, ("/tmp",))  # noqa: S108 - its usual place
        step = Step(
            phase=phase,
            nodes=tuple(requests),
            cpus=max(1, self.cpus // tasks),
            tasks_per_node=tasks,
            together=launches and settings.elastic is None,
            patience=self.patience if launches else 0,
            image=settings.container_image,
            mounts=(*(f"{place}:{place}" for place in places), *settings.container_mounts),
        )
        if self._holds(phase):
            launches_of = cast("Mapping[str, LaunchRequest]", requests)
            requests = {node: replace(one, hold=True) for node, one in launches_of.items()}
        variables = dict(self.rank_variables if launches else self.variables)
        if self.carries:
            variables.update(self._program.variables())
        first = self._program.make_step_input(
            factor_requests(requests),
            carried=self.carries,
            variables=self._sent_variables(ranks=launches),
        )
        argv = self._make_argv(step, self._program.bootstrap, command or phase)
        return argv, variables, first

    def _holds(self, phase: str) -> bool:
        """Return whether ranks wait until all nodes are there: the job may go on with fewer."""
        own_step = phase == PhaseName.LAUNCH and not self._job.can_launch_in_session_step
        return own_step and self._job.min_nodes is not None

    def _listen(self, run: PhaseRun) -> None:
        step, answers = run.step, run.answers
        limit = PhaseLimit(answers.phase, self._job, len(answers.nodes), self.patience)
        hold_until = time.monotonic() + _HOLD_SECONDS
        while not step.has_ended:
            step.pump(answers.take)
            self.tick()
            for number in signals.take_user_signals():
                step.send_line(f"{agent_channel.SIGNAL}{number}")
            is_due = time.monotonic() > hold_until or answers.ready.keys() >= answers.nodes
            if answers.held and is_due:  # ranks that are held back
                answers.held = False
                step.send_line(agent_channel.GO)
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

    def send_to_ranks(self, line: str) -> None:
        """Send a line to the agents of the phase that runs."""
        if self._latest is not None:
            self._latest.send_line(line)

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Send a file to agents that wait, in a step of their own unless all nodes get it."""
        joins = requests.keys() == self._session_nodes
        may_retry = self._make_retry(on_event)
        with contextlib.ExitStack() as open_here:
            stack = None if joins else open_here
            while True:
                run = self._begin(PhaseName.UNPACK, requests, on_event, stack)
                with self._supervise(run, on_event, finish=False):
                    seconds: float | None
                    if transfer.token:
                        ports = self._find_relay_ports()
                        failed, seconds = relay_source.send(transfer, run, ports)
                    else:
                        command, env = self._make_send_command, self.variables
                        failed, seconds = send_file(transfer, run, may_retry, command, env)
                    if not may_retry(run.step.errors if run.step.has_ended else ""):
                        self._listen(run)
                        break
            if not (joins or run.step.has_ended):
                grace = _LOST_SECONDS if run.liveness.lost else self._grace
                run.step.finish(run.answers.take, grace)
            ended = {**describe_ends(requests, run.step, self.errors), **run.liveness.lost}
            settled = self._find_settled_nodes(run, failed, ended)
            notes = relay_source.describe_transfer(run.answers, transfer.size)
            return Delivery(failed, ended, seconds, settled, notes)

    def _find_settled_nodes(
        self, run: PhaseRun, failed: dict[str, str], ended: dict[str, Ended]
    ) -> frozenset[str]:
        """Return the nodes that kept others from having a file; notes that these do not have it."""
        answers = run.answers
        blocking = set(run.liveness.lost)
        if run.step.has_ended:
            blocking |= self._find_blocking_nodes(answers, ended)
            if blocking and not answers.nodes <= blocking | answers.answered.keys():
                failed.setdefault("", "its step ended with that of other nodes")
        if failed.get("") in (NOT_READY, STEP_ENDED):
            blocking |= answers.answered.keys() - answers.ready.keys()
            if not blocking:  # how each node's agent ended says why
                failed.clear()
        for node in blocking:
            failed.pop(node, None)
        return frozenset(blocking)

    def fetch(self, phase: str, requests: Requests, take: Take) -> None:
        """Run a phase on one node whose agent answers with a stream; show why it failed."""
        with open(make_memory_file(b""), "rb") as stderr:
            running = self.start_fetch(phase, requests, processes.PIPE, stderr)
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

    def start_fetch(
        self, phase: str, requests: Requests, output: processes.Stream, errors: processes.Stream
    ) -> processes.Process:
        """Start what :meth:`fetch` runs; another phase may be running."""
        argv, variables, first = self._describe_step(phase, requests, 1)
        with open(make_memory_file(first), "rb") as stdin, self._convert_errors():
            return processes.start(argv, env=variables, stdin=stdin, stdout=output, stderr=errors)

    def close(self) -> None:
        """End all steps."""
        self._session = None
        self._open_steps.close()


def describe_ends(
    requests: Requests,
    step: DriverChannel,
    errors: transport.StepErrors,
    failed: Iterable[str] = (),
) -> dict[str, Ended]:
    """Return how each node's part of a step has ended, for the case that it gave no answer."""
    general = errors.general_fault(step.code, step.errors)
    blamed = next(iter(failed), "")
    first = blamed or next(iter(step.faults), "")
    if step.stopped and first:  # the others were to end with that node, and took too long
        general = Ended(_FOLLOWED, {"first": first}, general.code)
    ends = {}
    for node in requests:
        fault = step.faults.get(node, general)
        if blamed and fault.code in transport.TOLD_TO_END:
            fault = Ended(_FOLLOWED, {"first": blamed}, fault.code)
        if fault.code is None:  # srun itself may have ended well
            fault = fault._replace(code=step.code or int(fault.problem.row.is_unreachable))
        ends[node] = fault
    return ends
