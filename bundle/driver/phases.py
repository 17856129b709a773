"""The phases of a job, in their order: each asks the nodes, then uses their answers."""

from __future__ import annotations

from dataclasses import replace

from ..checks.findings import few_names, preflight_line
from ..format.manifest import room_for
from ..node.node_root import MEMORY
from ..protocol.enumerations import Action, Allocation, PhaseName
from ..protocol.job import Job
from ..protocol.messages import (
    CleanRequest,
    PreflightAnswer,
    PreflightRequest,
    ProbeAnswer,
    ProbeRequest,
    UnpackAnswer,
)
from ..protocol.problem import NodeError, Problem, ProblemCode
from . import collect, nvidia_drivers, placement, ranks
from .state import State


class Phase:
    """One step of a job, on all of its nodes at once."""

    name: PhaseName
    """Its name in the events ``begin`` and ``end``, and in the result's ``seconds``."""

    def ask(self, state: State) -> None:
        """Ask the nodes; ``state.answers`` then has the answer of each."""

    def use(self, state: State) -> None:
        """Learn from the answers; leave out the nodes that have a problem, or fail."""


def phases_of(job: Job) -> tuple[Phase, ...]:
    """Return the phases of a job."""
    if job.action is Action.CLEAN:
        return (CleanPhase(),)
    check = (PreflightPhase(), PlacePhase(), UnpackPhase(), ProbePhase())
    if _checks_deeply(job):
        return (*check, DeepCheckPhase(), AllReducePhase())
    return (*check, LaunchPhase()) if job.action is Action.RUN else check


def _checks_deeply(job: Job) -> bool:
    return job.deep and job.action is Action.VERIFY


class PreflightPhase(Phase):
    """Look before anything is sent: every problem of every node at once."""

    name = PhaseName.PREFLIGHT

    def ask(self, state: State) -> None:
        """Ask for the facts of each node."""
        with collect.run_dir_marker(state.job) as marker:
            state.ask(self.name, lambda node: _preflight_request(state, node, marker))

    def use(self, state: State) -> None:
        """Keep the facts, log them, and decide how many ranks each node gets."""
        nvidia_drivers.compare(state)
        state.facts = state.answers_of(PreflightAnswer)
        lines: list[str] = []
        for node, facts in state.facts.items():
            lines += _preflight_lines(state, node, facts)
        seconds = [facts.check_seconds for facts in state.facts.values()]
        state.result = replace(state.result, check_seconds=max(seconds, default=0.0))
        state.logs.preflight(lines)
        _refuse_interface_of_none(state)
        _note_addresses(state)
        _note_unchecked(state)
        _warn_of_memory(state)
        _add_same_host_problems(state)
        state.leave_out_or_fail()
        state.choose_nproc()


class PlacePhase(Phase):
    """Plan what must travel; the sending is part of the unpacking."""

    name = PhaseName.PLACE

    def use(self, state: State) -> None:
        """Make the plan from the facts of the nodes."""
        placement.decide(state)


class UnpackPhase(Phase):
    """Make the environment on every node."""

    name = PhaseName.UNPACK

    def ask(self, state: State) -> None:
        """Carry out the plan."""
        placement.carry_out(state)

    def use(self, state: State) -> None:
        """Log where each environment is, and report those that were repaired."""
        answers = state.answers_of(UnpackAnswer)
        times = (answer.unpack_seconds for answer in answers.values())
        own = [seconds for seconds in times if seconds is not None]
        state.result = replace(
            state.result, send_seconds=state.send_seconds, unpack_seconds=max(own, default=None)
        )
        for node, answer in answers.items():
            if answer.ok:
                action = "reused" if answer.reused else "staged"
                state.log_line(node, f"{node} {action} -> {answer.path}")
            if answer.mended is not None:
                repaired = {**(state.result.repaired or {}), node: answer.mended}
                state.result = replace(state.result, repaired=repaired)
                if state.facts[node].damage is None:
                    _warn_of_damage(state, node, answer.mended)
        state.leave_out_or_fail()


class ProbePhase(Phase):
    """Check on every node that the environment is what was built, and runs."""

    name = PhaseName.PROBE

    def ask(self, state: State) -> None:
        """Let each node's environment describe itself."""
        head = state.facts[state.job.nodes[0]].address
        state.ask(self.name, lambda node: ProbeRequest(**state.placed(node), head=head))

    def use(self, state: State) -> None:
        """Log the answers, and each warning once with the nodes that have it."""
        warned: dict[str, list[str]] = {}
        for node, answer in state.answers_of(ProbeAnswer).items():
            if answer.line:
                state.log_line(node, answer.line)
            for warning in answer.warnings:
                warned.setdefault(str(warning), []).append(node)
        for text, nodes in warned.items():
            state.note(f"{few_names(nodes)}: {text}", warning=True)
        if not _checks_deeply(state.job):  # else problems are reported with their causes
            state.leave_out_or_fail()


class DeepCheckPhase(Phase):
    """Look closely at every node, also where the probe has found something."""

    name = PhaseName.DEEP

    def ask(self, state: State) -> None:
        """Compare every file, and the nodes with each other."""
        from . import deep_check

        deep_check.check_nodes(state)


class AllReducePhase(Phase):
    """Let ranks communicate on the nodes that are well, then report all problems of all nodes."""

    name = PhaseName.ALL_REDUCE

    def ask(self, state: State) -> None:
        """Start the ranks of an all-reduce."""
        from . import deep_check

        deep_check.all_reduce(state)

    def use(self, state: State) -> None:
        """Leave out the nodes that have a problem, or fail."""
        state.leave_out_or_fail()


class LaunchPhase(Phase):
    """Start the ranks, and wait for all of them."""

    name = PhaseName.LAUNCH

    def ask(self, state: State) -> None:
        """Start the ranks, again without the nodes that kept all of them from beginning."""
        ranks.start(state)
        while state.leave_out_unreachable():
            ranks.start(state)

    def use(self, state: State) -> None:
        """Fail where ranks have failed, unless an elastic group has gone on without them."""
        state.result = replace(state.result, notes=ranks.notes(state))
        if state.job.launch.elastic is not None:
            state.leave_out_or_fail()
        state.fail_if_any()


class CleanPhase(Phase):
    """Remove environments that nobody uses."""

    name = PhaseName.CLEAN

    def ask(self, state: State) -> None:
        """Let each node remove its own."""
        state.ask(self.name, lambda node: CleanRequest(**state.common(node)))

    def use(self, state: State) -> None:
        """Fail where something could not be removed."""
        state.fail_if_any()


def _preflight_request(state: State, node: str, marker: str) -> PreflightRequest:
    request = PreflightRequest(**state.common(node), marker=marker)
    if state.bundle is None:
        return request
    manifest = state.bundle.manifest
    wheel = manifest.decompressor
    return replace(
        request,
        heads=tuple(layer.head for layer in manifest.layers),
        room=tuple(room_for([layer]) for layer in manifest.layers),
        own_room=room_for([], manifest),
        size=manifest.size,
        wheel=None if wheel is None else (wheel.name, wheel.size),
    )


def _preflight_lines(state: State, node: str, facts: PreflightAnswer) -> list[str]:
    lines = [preflight_line(facts)]
    if facts.gpus is not None:
        lines.append(nvidia_drivers.line(node, facts.gpus))
    if facts.damage is not None:
        _warn_of_damage(state, node, facts.damage)
        lines.append(f"{node} damage: {facts.damage}")
    lines += [f"{node} problem: {problem}" for problem in facts.problems]
    return lines


def _refuse_interface_of_none(state: State) -> None:
    """Refuse a setting that names an interface of no node; no node is at fault."""
    lacking = [
        problem
        for facts in state.facts.values()
        for problem in (*facts.problems, facts.no_head)
        if problem is not None and problem.code is ProblemCode.NO_INTERFACE
    ]
    if len(lacking) > 1 and len(lacking) == len(state.job.nodes):
        names = ", ".join(sorted({problem.where for problem in lacking}))
        values = {**lacking[0].values, "names": names}
        raise NodeError(Problem(ProblemCode.INTERFACE_OF_NO_NODE, "[launch] interface", values))


def _add_same_host_problems(state: State) -> None:
    """Add a problem for each host that the user has named twice, by different names."""
    if state.job.allocation is not Allocation.SSH:
        return
    first: dict[str, str] = {}
    for node, facts in state.facts.items():
        named = first.setdefault(facts.address, node) if facts.address else node
        if named != node:
            values = {"first": named, "address": facts.address}
            problem = Problem(ProblemCode.SSH_SAME_HOST, node, values)
            state.answers[node] = replace(facts, ok=False, problems=(*facts.problems, problem))


def _note_addresses(state: State) -> None:
    """Report nodes that have an unexpected address, once for each reason."""
    nodes: dict[str, list[str]] = {}
    for node, facts in state.facts.items():
        if facts.no_head is not None and facts.address:
            nodes.setdefault(facts.no_head.what, []).append(node)
    for why, named in nodes.items():
        state.note(
            f"{few_names(named)}: {why}; in the transfer, the address of the way to the driver's "
            "host is used"
        )
    for node, facts in state.facts.items():
        if facts.loopback and facts.address and len(state.job.nodes) > 1:
            state.note(
                f"{node}: ssh reaches it at {facts.loopback}, so it is this machine (or the jump "
                f"host before it); the others are to reach it at {facts.address}"
            )


def _note_unchecked(state: State) -> None:
    """Report nodes that could not check the signature, once for each reason."""
    nodes: dict[str, list[str]] = {}
    for node, facts in state.facts.items():
        if facts.unchecked:
            nodes.setdefault(facts.unchecked, []).append(node)
    for why, named in nodes.items():
        state.note(
            f"{few_names(named)}: the bundle's signature was not checked there, only its id, "
            f"whose signature was good where the job was prepared ({why})",
            warning=True,
        )


def _warn_of_memory(state: State) -> None:
    """Warn of environments in a memory file system."""
    nodes = [node for node, facts in state.facts.items() if facts.root.startswith(MEMORY)]
    if nodes:
        text = (
            "the environment is in /dev/shm, where it takes memory until `stager clean` removes it"
        )
        state.note(f"{few_names(nodes)}: {text}", warning=True)


def _warn_of_damage(state: State, node: str, damage: Problem) -> None:
    state.note(f"{node}: {damage}", warning=True)
