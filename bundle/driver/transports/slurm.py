"""The transport of a Slurm allocation: ``srun`` starts the agents, ``sbcast`` brings the file.

Each phase is one ``srun`` over all nodes. The agents get program and request on standard input, so
nothing has to be on a node beforehand; they answer in frames (:mod:`bundle.channel.frames`). As
long as standard input stays open they work; its end tells them to stop, however the driver came to
its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import IO, cast

from ...agent import agent
from ...agent.agent import SESSION
from ...channel import agent_channel
from ...launch import output_reader
from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem
from ...redaction.masking import without_secrets
from ...system import processes, signals
from . import slurm_commands
from .agent_program import Opening, line, shortened
from .answers import Answers
from .driver_channel import DriverChannel
from .sbcast import Sending
from .timeouts import CONTROLLER_SECONDS, Waiting, Watch, endings
from .transport import Delivery, Ended, OnEvent, Requests, Transfer, mounts, saving_note

SECONDS = {
    "preflight": 180.0,
    "unpack": 3600.0,
    "probe": agent.PROBE_SECONDS + 120,
    "deep": 3600.0,
    "tidy": 600.0,
    "clean": 3600.0,
}
"""How long a phase may take; nodes that have not answered by then are named."""
_ELASTIC_GRACE = 2.0
"""Seconds that the rest of an elastic group gets to end by itself when too few nodes are left.

Short: what ranks need to save what they have, they get once they are told to end.
"""
_LOST_SECONDS = 1.0
"""What ``srun`` gets to end by itself when all nodes but those that are lost have answered."""
_ASK_SECONDS = 30.0
_HURRIED_SECONDS, _HURRIED_ASK_SECONDS = 5.0, 10.0
"""How long an absent controller is waited for, and asked, once the user has asked for the end."""
_HOLD_SECONDS = 180.0
"""After which ranks that are held back may begin although not all nodes have said a word."""
_ODD_LINES, _ODD_CHARACTERS = 5, 200
"""How much is shown of what came through ``srun`` from nobody."""
_TICK_SECONDS = 0.02
"""How often a running broadcast is looked after."""


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
        with open(sys.argv[0], "rb") as handle:
            self._opening = Opening(handle.read())
        own = slurm_commands.CREDENTIALS
        self._plain = slurm_commands.step_environment(without_secrets(os.environ, own))
        # What the ranks get besides is for their own step alone.
        self._ranks = slurm_commands.step_environment(
            without_secrets(os.environ, (*own, *job.launch.pass_env))
        )
        self._fanout_version = slurm_commands.version(self._ask("srun", "--version"))
        counts = slurm_commands.cpus_per_node(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        self._cpus = job.cpus_per_task or min(counts, default=1)
        self._patience = slurm_commands.patience(os.environ)
        self._step: DriverChannel | None = None
        self._latest: DriverChannel | None = None
        self._nodes: frozenset[str] = frozenset()
        self._told: object = None
        """The job that the agents of that step know."""
        self._kept = contextlib.ExitStack()
        self._grace = job.launch.grace_seconds + output_reader.AGENT_SECONDS

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        """Run one phase on the given nodes: in the step that is there for all phases, if it may."""
        joins = phase != "launch" or self._job.one_step
        if not joins:
            self.close()
        waiting = Waiting(on_event, self._controller_seconds)
        try:
            while True:
                step, tasks = self._begin(phase, requests, joins=joins)
                watch = Watch(phase, requests, on_event, self._plain)
                answers = Answers(requests, tasks, watch.take, phase)
                answers.held = self._holds(phase)
                try:
                    with contextlib.closing(watch):
                        self._listen(step, answers, watch)
                except signals.Stopped:  # what the ranks say last belongs into their logs
                    if phase == "launch":
                        on_event(saving_note(self._job))
                    self._finish(step, answers, watch)
                    raise
                finally:
                    _account(step, answers, on_event)
                again = step.ended and not answers.answered and waiting.again(step.errors)
                if not again:
                    break
                self.close()
            ended = {**endings(requests, step), **watch.lost}
        except BaseException:
            self.close()
            raise
        if not joins or step.ended:
            self.close()
        dead = self._dead(requests, answers, ended) if phase != "launch" or answers.held else set()
        rest = [node for node in requests if node not in dead and node not in answers.answered]
        if phase == "launch":  # the others are to know that they are fewer: the driver asks again
            return {**ended, **{node: replace(ended[node], unreachable=True) for node in dead}}
        if not dead or not rest:
            return ended
        self.close()  # srun may not have ended yet, but has told all tasks to
        return {**ended, **self.run(phase, {node: requests[node] for node in rest}, on_event)}

    def _dead(self, requests: Requests, answers: Answers, ended: dict[str, Ended]) -> set[str]:
        """The nodes that have kept the step from beginning on the others, too.

        Slurm starts a step on all of its nodes or on none. Who is to blame is noted in ``ended``:
        ``srun`` names the nodes that it cannot reach, and ``sinfo`` has those that Slurm gave up.
        """
        silent = [node for node in requests if node not in answers.answered]
        dead = {node for node in silent if slurm_commands.unreachable(ended[node].why)}
        if not dead and not answers.answered:
            down = self._down(requests)
            ended.update(down)
            dead = set(down)
        return dead

    def _holds(self, phase: str) -> bool:
        """Whether ranks begin only when all nodes are there: without one, others could do it."""
        return phase == "launch" and not self._job.one_step and self._job.min_nodes is not None

    @staticmethod
    def _let_go(step: DriverChannel, answers: Answers, until: float) -> None:
        """Let ranks begin that are held back, once all nodes are there."""
        if answers.held and (answers.ready >= answers.nodes or time.monotonic() > until):
            answers.held = False
            step.tell(agent_channel.GO)

    def _begin(self, phase: str, requests: Requests, *, joins: bool) -> tuple[DriverChannel, int]:
        """Ask the agents that are there, or start some in a new step; with the tasks of a node."""
        if not joins:
            tasks = self._tasks(phase, requests)
            step = self._kept.enter_context(self._talk(phase, requests, tasks))
            return step, tasks
        there = self._step
        if there is not None and not there.ended and requests.keys() <= self._nodes:
            asked = shortened(requests)
            job = asked["common"].get("job")
            if job is not None and job == self._told:
                del asked["common"]["job"]
            self._told = job or self._told
            there.tell(line({"phase": phase, "nodes": list(requests), **asked}))
            return there, 1
        self.close()
        step = self._kept.enter_context(self._talk(phase, requests, 1, SESSION))
        self._step, self._nodes = step, frozenset(requests)
        self._told = shortened(requests)["common"].get("job")
        return step, 1

    def _listen(self, step: DriverChannel, answers: Answers, watch: Watch) -> None:
        """Pass on what the agents say until all have answered, or the step has ended."""
        phase, joins = answers.phase, step is self._step
        limit = SECONDS.get(phase)
        deadline = None if limit is None else time.monotonic() + limit
        elastic = self._job.launch.elastic
        spare = max(0, len(answers.nodes) - elastic[0]) if elastic else 0
        hold_until = time.monotonic() + _HOLD_SECONDS
        while not step.ended:
            step.pump(answers.take)
            self._let_go(step, answers, hold_until)
            faults = step.faults.keys() & answers.nodes
            watch.look(faults)
            faults |= watch.lost.keys()
            gone = answers.bad | faults
            if deadline is None and phase == "launch" and len(gone) > spare:
                deadline = time.monotonic() + (_ELASTIC_GRACE if elastic else 0.0)
            late = answers.late(self._patience) if phase == "launch" else []
            if late:
                watch.take({"v": 1, "event": "late", "nodes": late, "seconds": self._patience})
            whole = answers.complete(faults)
            over = phase == "launch" and not whole and watch.over(faults)
            if over or late or (deadline is not None and time.monotonic() > deadline):
                self._finish(step, answers, watch)
            elif joins and whole:
                return
            elif whole and watch.lost:  # srun itself would wait for the node that is lost
                step.finish(answers.take, _LOST_SECONDS)
            elif _settled(step, answers, watch):  # agents of a step of its own stay until then
                self._finish(step, answers, watch)

    def _finish(self, step: DriverChannel, answers: Answers, watch: Watch) -> None:
        """End a step; where ranks run, not before all that they wrote has come."""
        waits = answers.phase == "launch"
        complete = (lambda: _settled(step, answers, watch)) if waits else None
        step.finish(answers.take, self._grace, complete)

    def _down(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Those of an allocation's nodes that Slurm has lost before anything ran on them."""
        listing = ("sinfo", "--Node", "--noheader", "--format=%N %T", f"--nodes={','.join(nodes)}")
        try:
            found = slurm_commands.down_nodes(self._ask(*listing))
        except NodeError:
            return {}
        why = {node: f"Slurm can start nothing there (it is {found[node]})" for node in found}
        return {
            node: Ended(1, text, slurm_commands.advice(node, text)) for node, text in why.items()
        }

    def deliver(self, parcel: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Send the file to agents that wait for it, and unpack it while it comes.

        A step gets the file on all of its nodes; where only some of them shall have it, these get
        a step of their own.
        """
        joins = requests.keys() == self._nodes
        waiting = Waiting(on_event, self._controller_seconds)
        with contextlib.ExitStack() as running:
            while True:
                watch = Watch("unpack", requests, on_event, self._plain)
                answers = Answers(requests, 1, watch.take, "unpack")
                if joins:
                    step, _ = self._begin("unpack", requests, joins=True)
                else:
                    step = running.enter_context(self._talk("unpack", requests, 1))
                failed, seconds = self._send(parcel, step, answers, waiting)
                if not waiting.again(step.errors if step.ended else ""):
                    break
            deadline = time.monotonic() + SECONDS["unpack"]
            running.enter_context(contextlib.closing(watch))
            while not step.ended:
                faults = {**step.faults, **watch.lost}
                if answers.complete(faults):
                    break
                step.pump(answers.take)
                watch.look(faults)
                if time.monotonic() > deadline:
                    step.finish(answers.take, self._grace)
            _account(step, answers, on_event)
            if not joins:
                step.finish(answers.take, _LOST_SECONDS if watch.lost else self._grace)
            return Delivery(failed, {**endings(requests, step), **watch.lost}, seconds)

    def _send(
        self, parcel: Transfer, step: DriverChannel, answers: Answers, waiting: Waiting
    ) -> tuple[dict[str, str], float]:
        """Send as soon as all agents are ready, and tell them when all has come, or none will.

        Returns:
            The nodes that were not reached, with the reasons, and the seconds that it took.
        """
        deadline = time.monotonic() + SECONDS["unpack"]
        while not step.ended and not answers.ready >= answers.nodes:
            step.pump(answers.take)
            if answers.answered or step.faults or time.monotonic() > deadline:
                step.tell(agent_channel.STOP)  # it is known already that it cannot be done
                return {}, 0.0
        if step.ended:
            return {}, 0.0  # how each node's agent ended says why
        started = time.monotonic()
        width = slurm_commands.fanout(len(answers.nodes), self._fanout_version)
        argv = slurm_commands.broadcast_argv(parcel.source, parcel.target, answers.step_id, width)
        while True:
            with Sending(argv, self._plain) as sending:
                while not (step.ended or sending.ended or time.monotonic() > deadline):
                    step.pump(answers.take, _TICK_SECONDS)
                late = not (sending.ended or step.ended)
                failed = {"": "it was not done in time"} if late else sending.failed
            if late or step.ended or not waiting.again(failed.get("", "")):
                break
        step.tell(agent_channel.STOP if failed else agent_channel.GO)
        return failed, time.monotonic() - started

    def fetch(self, phase: str, requests: Requests, take: Callable[[IO[bytes]], None]) -> None:
        """Run a phase on one node whose agent answers with a stream of bytes."""
        argv, opening = self._asked(phase, requests, 1)
        with tempfile.TemporaryFile() as stdin:
            stdin.write(opening)
            stdin.seek(0)
            try:
                running = processes.start(argv, env=self._plain, stdin=stdin, stdout=processes.PIPE)
            except processes.ProcessError as exc:
                fix = "see whether the allocation still stands"
                raise NodeError(Problem("srun cannot be started", "", exc.reason, fix)) from exc
            try:
                take(cast("IO[bytes]", running.stdout))
            finally:
                processes.stop(running, self._grace)

    def hurry(self) -> None:
        """Wait for an absent controller for some seconds only."""
        self._controller_seconds, self._ask_seconds = _HURRIED_SECONDS, _HURRIED_ASK_SECONDS

    def close(self) -> None:
        """End the step that is there for all phases."""
        self._step = None
        self._kept.close()

    def ended_by(self) -> str:
        """What the controller says about the job; empty where it cannot be asked."""
        try:
            shown = self._ask("scontrol", "--oneliner", "show", "job", self._job.id)
        except NodeError:
            return ""
        return slurm_commands.ended_by(
            shown, self._job.attempt, self._latest.errors if self._latest else ""
        )

    def _tasks(self, phase: str, requests: Requests) -> int:
        """Tasks of a node: one agent; but where Slurm starts the ranks, one for each rank."""
        if phase != "launch" or self._job.launch.launcher != "srun":
            return 1
        return max(int(request["group"]["nproc"]) for request in requests.values())

    def _talk(self, phase: str, requests: Requests, tasks: int, word: str = "") -> DriverChannel:
        argv, opening = self._asked(phase, requests, tasks, word)
        env = self._ranks if phase == "launch" else self._plain
        self._latest = DriverChannel(argv, env, opening)
        return self._latest

    def _asked(
        self, phase: str, requests: Requests, tasks: int, word: str = ""
    ) -> tuple[list[str], bytes]:
        """The command of a step, and what its tasks are sent at once.

        Args:
            phase: what is asked first; the step has its name.
            requests: what each node is asked.
            tasks: how many there are on each node.
            word: what the agents are told to do; empty for the phase and nothing else.
        """
        settings = self._job.launch
        step = slurm_commands.Step(
            phase=phase,
            nodes=tuple(requests),
            cpus=max(1, self._cpus // tasks),
            tasks_per_node=tasks,
            together=phase == "launch" and settings.elastic is None,
            patience=self._patience if phase == "launch" else 0,
            image=settings.container_image,
            mounts=mounts(self._job),
        )
        program = slurm_commands.starter(
            self._opening.bootstrap, word or phase, self._job.python_hints
        )
        if self._holds(phase):
            requests = {node: {**request, "hold": True} for node, request in requests.items()}
        opening = self._opening.of(
            self._phases(word or phase), {"phase": phase, **shortened(requests)}
        )
        return slurm_commands.step_argv(step, program), opening

    def _phases(self, word: str) -> set[str]:
        """The phases that agents of a step may be asked for, if they are told this word."""
        if word != SESSION:
            return {word}
        phases = {self._job.action, *(("deep",) if self._job.deep else ())}
        # A deep check launches, too; and so may the session of a job that runs.
        return phases | ({"launch"} if self._job.one_step and phases & {"run", "deep"} else set())

    def _ask(self, *argv: str) -> str:
        try:
            return processes.run(argv, timeout=self._ask_seconds, env=self._plain).stdout
        except processes.ProcessError as exc:
            why = "; ".join([exc.reason, *exc.tail[-1:]])
            fix = "run it where Slurm's commands are on PATH and the controller answers"
            raise NodeError(Problem(f"{argv[0]} failed", os.uname().nodename, why, fix)) from exc


def _settled(step: DriverChannel, answers: Answers, watch: Watch) -> bool:
    """Return whether every task has answered, or is known to have ended without."""
    gone = step.gone
    lost = {*watch.lost, *(step.faults.keys() - gone.keys())}
    return answers.complete(lost, gone)


def _account(step: DriverChannel, answers: Answers, on_event: OnEvent) -> None:
    """Say what of a phase was lost on its way, and what came from nobody."""
    answers.account(step.losses())
    if lines := step.oddities():
        shown = [line[:_ODD_CHARACTERS] for line in lines[:_ODD_LINES]]
        on_event({"v": 1, "event": "stray", "count": len(lines), "lines": shown})
