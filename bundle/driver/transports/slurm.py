"""The transport of a Slurm allocation: ``srun`` starts the agents, ``sbcast`` brings the file.

The phases share one ``srun`` over all nodes; only a launch may have its own. The agents get program
and request on standard input, so nothing has to be on a node beforehand; they answer in frames
(:mod:`bundle.channel.frames`). As long as standard input stays open they work; its end tells them
to stop, however the driver came to its own.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import IO, cast

from ...agent.agent import SESSION
from ...channel import agent_channel
from ...launch import output_reader
from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...system import processes, signals
from . import relay_source, slurm_commands, slurm_faults
from .agent_program import factored, request_line
from .driver_channel import DriverChannel
from .phase_answers import PhaseAnswers
from .phase_run import SECONDS, LaunchLimit, Limit, PhaseRun, TimeLimit
from .relay_remarks import remarks
from .sbcast import Broadcaster
from .step_starter import StepStarter
from .timeouts import CONTROLLER_SECONDS, Waiting, Watch, endings
from .transport import Delivery, Ended, OnEvent, Requests, Transfer, saving_note

_LOST_SECONDS = 1.0
"""Time that ``srun`` gets to end by itself when all nodes but those that are lost have answered."""
_ASK_SECONDS = 30.0
_HURRIED_SECONDS, _HURRIED_ASK_SECONDS = 5.0, 10.0
"""The waits for an absent controller, and for its answers, once the user has asked for the end."""
_HOLD_SECONDS = 180.0
"""Time after which ranks that are held back begin although not all nodes have said a word."""
_FOLLOWED = ProblemCode.NO_ANSWER_FOLLOWED


class SlurmTransport:
    """Reaches the nodes of the allocation that this process runs in."""

    def __init__(self, job: Job) -> None:
        """Look at the allocation once.

        Raises:
            NodeError: a command of Slurm's is missing here.
        """
        self.nodes_here = 1
        self._job = job
        self._controller_seconds, self._ask_seconds = CONTROLLER_SECONDS, _ASK_SECONDS
        self._starter = StepStarter(job)
        self._variables = self._starter.variables
        version = slurm_commands.version(self._ask("srun", "--version"))
        self._broadcaster = Broadcaster(self._variables, version)
        self._session: DriverChannel | None = None
        """The step that all phases share."""
        self._session_nodes: frozenset[str] = frozenset()
        self._session_job: Job | None = None
        """The job that the agents of that step know."""
        self._open_steps = contextlib.ExitStack()
        self._grace = job.launch.grace_seconds + output_reader.AGENT_SECONDS

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        """Run one phase on the given nodes: in the step that all phases share, if it may."""
        joins = phase != "launch" or self._job.one_step
        if not joins:
            self.close()
        try:
            run = self._run_until_begun(phase, requests, on_event, joins=joins)
            ended = {**endings(requests, run.step), **run.watch.lost}
        except BaseException:
            self.close()
            raise
        if not joins or run.step.ended:
            self.close()
        return self._run_on_the_rest(run, requests, on_event, ended)

    def _run_until_begun(
        self, phase: str, requests: Requests, on_event: OnEvent, *, joins: bool
    ) -> PhaseRun:
        """Run a phase; again while Slurm's controller does not answer, so that it cannot begin."""
        waiting = Waiting(on_event, self._controller_seconds)
        while True:
            run = self._run_once(phase, requests, on_event, joins=joins)
            refused = run.step.ended and not run.answers.answered
            if not (refused and waiting.again(run.step.errors)):
                return run
            self.close()

    def _run_once(
        self, phase: str, requests: Requests, on_event: OnEvent, *, joins: bool
    ) -> PhaseRun:
        """Ask for a phase, and wait until all nodes have answered or the step is over."""
        step, tasks = self._begin(phase, requests, joins=joins)
        watch = Watch(phase, requests, on_event, self._variables)
        answers = PhaseAnswers(requests, tasks, watch.take, phase)
        answers.held = self._starter.holds(phase)
        run = PhaseRun(step, answers, watch)
        try:
            with contextlib.closing(watch):
                self._listen(run)
        except signals.Stopped:  # the last output of the ranks belongs in their logs
            if phase == "launch":
                on_event(saving_note(self._job))
            run.finish(self._grace)
            raise
        finally:
            run.report_losses(on_event)
        return run

    def _run_on_the_rest(
        self, run: PhaseRun, requests: Requests, on_event: OnEvent, ended: dict[str, Ended]
    ) -> dict[str, Ended]:
        """Run a phase again without the nodes that kept the others from answering, if any.

        Slurm starts a step on all of its nodes or on none, and may end all for the fault of one.
        """
        answers = run.answers
        launch = answers.phase == "launch"
        if launch and not answers.held:
            return ended
        blocking = self._blocking_nodes(requests, answers, ended)
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
        self.close()  # srun may not have ended yet, but has told all tasks to
        return {**ended, **self.run(answers.phase, rest, on_event)}

    def _blocking_nodes(
        self, requests: Requests, answers: PhaseAnswers, ended: dict[str, Ended]
    ) -> set[str]:
        """Return the nodes on which nothing can be started, or for which others were ended.

        ``srun`` names the nodes that it cannot reach, and ``sinfo`` has those that Slurm gave up;
        of these the reason is noted in ``ended``.
        """
        silent = {node: ended[node] for node in requests if node not in answers.answered}
        followed = _with_problem(silent, _FOLLOWED)
        if followed and answers.phase != "launch":
            return requests.keys() - followed
        blocking = _with_problem(silent, *slurm_faults.UNREACHABLE)
        if blocking or answers.answered:
            return blocking
        down = self._down(requests)
        ended.update(down)
        return set(down)

    def _down(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Return those of an allocation's nodes that Slurm lost before anything ran on them."""
        listing = ("sinfo", "--Node", "--noheader", "--format=%N %T", f"--nodes={','.join(nodes)}")
        try:
            states = slurm_commands.down_nodes(self._ask(*listing))
        except NodeError:
            return {}
        no_start = ProblemCode.NO_ANSWER_NO_START
        return {
            node: Ended(1, no_start, {"why": f"it is {state}"}) for node, state in states.items()
        }

    def _begin(self, phase: str, requests: Requests, *, joins: bool) -> tuple[DriverChannel, int]:
        """Ask the agents of the session, or start a step.

        Returns:
            The step, and the tasks of each of its nodes.
        """
        if not joins:
            tasks = self._starter.tasks(phase, requests)
            step = self._open_steps.enter_context(self._starter.start(phase, requests, tasks))
            return step, tasks
        session = self._session
        if session is None or session.ended or not requests.keys() <= self._session_nodes:
            return self._begin_session(phase, requests), 1
        message = factored(requests, self._session_job)
        self._session_job = _job_of(requests)
        if requests.keys() != self._session_nodes:
            message = replace(message, nodes=tuple(requests))
        session.tell(request_line(message))
        return session, 1

    def _begin_session(self, phase: str, requests: Requests) -> DriverChannel:
        self.close()
        step = self._open_steps.enter_context(self._starter.start(phase, requests, 1, SESSION))
        self._session, self._session_nodes = step, frozenset(requests)
        self._session_job = _job_of(requests)
        return step

    def _listen(self, run: PhaseRun) -> None:
        """Pass on what the agents say until all have answered, or the step has ended."""
        step, answers = run.step, run.answers
        limit: Limit
        if answers.phase == "launch":
            limit = LaunchLimit(self._job, len(answers.nodes), self._starter.patience)
        else:
            limit = TimeLimit(answers.phase)
        hold_until = time.monotonic() + _HOLD_SECONDS
        while not step.ended:
            step.pump(answers.take)
            _release(step, answers, hold_until)
            lost = run.lost_nodes()
            complete = answers.complete(lost)
            if limit.reached(run, lost, complete=complete):
                run.finish(self._grace)
            elif complete and step is self._session:
                return
            elif complete and run.watch.lost:  # srun itself would wait for the node that is lost
                step.finish(answers.take, _LOST_SECONDS)
            elif run.settled():  # agents of a step of its own stay until then
                run.finish(self._grace)

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Send the file to agents that wait for it, and unpack it while it comes.

        A step gets the file on all of its nodes; where only some of them are to get it, these have
        a step of their own.
        """
        joins = requests.keys() == self._session_nodes
        waiting = Waiting(on_event, self._controller_seconds)
        with contextlib.ExitStack() as open_here:
            while True:
                if joins:
                    step, _ = self._begin("unpack", requests, joins=True)
                else:
                    step = open_here.enter_context(self._starter.start("unpack", requests, 1))
                watch = Watch("unpack", requests, on_event, self._variables)
                run = PhaseRun(step, PhaseAnswers(requests, 1, watch.take, "unpack"), watch)
                if transfer.token:
                    failed, seconds = relay_source.send(transfer, run, self._relay_ports())
                else:
                    failed, seconds = self._broadcaster.send(transfer, run, waiting)
                if not waiting.again(step.errors if step.ended else ""):
                    break
            open_here.enter_context(contextlib.closing(watch))
            self._await_unpacking(run)
            run.report_losses(on_event)
            if not joins:
                step.finish(run.answers.take, _LOST_SECONDS if watch.lost else self._grace)
            ended = {**endings(requests, step), **watch.lost}
            return Delivery(failed, ended, seconds, remarks(run.answers, transfer.size))

    def _relay_ports(self) -> range | None:
        """Return the ports of this host that a cluster's firewall lets nodes connect to.

        It is where ``srun`` listens, too. None where Slurm names none.
        """
        with contextlib.suppress(NodeError):
            return slurm_commands.srun_ports(self._ask("scontrol", "show", "config"))
        return None

    def _await_unpacking(self, run: PhaseRun) -> None:
        step, answers = run.step, run.answers
        deadline = time.monotonic() + SECONDS["unpack"]
        while not step.ended:
            if answers.complete(run.lost_nodes()):
                return
            step.pump(answers.take)
            if time.monotonic() > deadline:
                step.finish(answers.take, self._grace)

    def fetch(self, phase: str, requests: Requests, take: Callable[[IO[bytes]], None]) -> None:
        """Run a phase on one node whose agent answers with a stream of bytes."""
        step = self._starter.command(phase, requests, 1)
        with tempfile.TemporaryFile() as stdin:
            stdin.write(step.input)
            stdin.seek(0)
            try:
                running = processes.start(
                    step.argv, env=step.variables, stdin=stdin, stdout=processes.PIPE
                )
            except processes.ProcessError as exc:
                problem = Problem(ProblemCode.SRUN_NOT_STARTED, "", {"why": exc.reason})
                raise NodeError(problem) from exc
            try:
                take(cast("IO[bytes]", running.stdout))
            finally:
                processes.stop(running, self._grace)

    def hurry(self) -> None:
        """Wait for an absent controller for some seconds only."""
        self._controller_seconds, self._ask_seconds = _HURRIED_SECONDS, _HURRIED_ASK_SECONDS

    def close(self) -> None:
        """End all steps."""
        self._session = None
        self._open_steps.close()

    def ended_by(self) -> str:
        """Return the controller's reason for the end; empty where it cannot be asked."""
        try:
            shown = self._ask("scontrol", "--oneliner", "show", "job", self._job.id)
        except NodeError:
            return ""
        latest = self._starter.latest
        errors = latest.errors if latest else ""
        return slurm_commands.ended_by(shown, self._job.attempt, errors) or ""

    def _ask(self, *argv: str) -> str:
        """Return what a command of Slurm's prints."""
        try:
            return processes.run(argv, timeout=self._ask_seconds, env=self._variables).stdout
        except processes.ProcessError as exc:
            values = {"command": argv[0], "why": "; ".join([exc.reason, *exc.tail[-1:]])}
            where = os.uname().nodename
            raise NodeError(Problem(ProblemCode.SLURM_COMMAND_FAILED, where, values)) from exc


def _job_of(requests: Requests) -> Job:
    return next(iter(requests.values())).job


def _with_problem(ended: Mapping[str, Ended], *problems: ProblemCode) -> set[str]:
    return {node for node, end in ended.items() if end.problem in problems}


def _release(step: DriverChannel, answers: PhaseAnswers, until: float) -> None:
    """Let ranks begin that are held back, once all nodes are there or the time is over."""
    if answers.held and (answers.ready >= answers.nodes or time.monotonic() > until):
        answers.held = False
        step.tell(agent_channel.GO)
