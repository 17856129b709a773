"""The facts about each node of a job: its Python, its packages, its network interface."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bundle.protocol.events import JobBegins, JobEnds, NodesLeftOut
from bundle.protocol.messages import Answer, ProbeAnswer
from bundle.protocol.problem import Problem
from bundle.protocol.reports import LaunchAnswer

from .attempt import Attempt

WELL, FAILED, LEFT_OUT, NOT_YET = "ok", "failed", "left out", "not known"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node, as far as it has reported about itself."""

    name: str
    """Its name."""
    state: str
    """``ok``, ``failed``, ``left out`` or ``not known``."""
    python: str = ""
    """The version of its Python."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions by name, of the packages it has."""
    interface: str = ""
    """The network interface by which it reaches the first node."""
    address: str = ""
    """Its address on it."""
    exit_code: int | None = None
    """The exit status of the ranks there."""
    problems: tuple[str, ...] = ()
    """Its problems, a line each."""

    @property
    def ending(self) -> str:
        """The exit status, with a signal's name."""
        if self.exit_code is None:
            return ""
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
        try:
            return f"{self.exit_code} ({signal.Signals(number).name})"
        except ValueError:
            return str(self.exit_code)


def nodes(attempt: Attempt) -> tuple[Node, ...]:
    """Return every node of an attempt, in the job's order."""
    reports: dict[str, _Learned] = {}
    for event in attempt.events:
        if isinstance(event, JobBegins):
            reports = {node: _Learned() for node in event.nodes}
        elif isinstance(event, NodesLeftOut):
            for name in reports.keys() & event.nodes.keys():
                reports[name].leave_out(event.nodes[name])
        elif isinstance(event, Answer) and event.node in reports:
            reports[event.node].take(event)
    for name, learned in reports.items():
        learned.conclude(attempt.result, name)
    return tuple(learned.node(name, attempt.result) for name, learned in reports.items())


def apart(every: tuple[Node, ...]) -> dict[str, dict[str, list[str]]]:
    """Return the packages whose versions differ: the nodes by package and version.

    Nodes that have said nothing of packages do not count.
    """
    checked = [node for node in every if node.packages]
    different: dict[str, dict[str, list[str]]] = {}
    for package in sorted({name for node in checked for name in node.packages}):
        for node in checked:
            version = node.packages.get(package, "")
            different.setdefault(package, {}).setdefault(version, []).append(node.name)
    return {package: versions for package, versions in different.items() if len(versions) > 1}


@dataclass
class _Learned:
    probe: ProbeAnswer | None = None
    exit_code: int | None = None
    out: bool = False
    bad: bool = False
    heard: bool = False
    problems: dict[str, None] = field(default_factory=dict)

    def take(self, answer: Answer) -> None:
        self.heard = True
        if isinstance(answer, ProbeAnswer):
            self.probe = answer
        if isinstance(answer, LaunchAnswer):
            # Of several tasks the first that failed.
            self.exit_code = self.exit_code or answer.exit_code
        # What is not ok is tried again sometimes; what counts then is the result.
        for problem in answer.problems:
            self.problems[_shown(problem, answer.node)] = None

    def leave_out(self, why: Sequence[str]) -> None:
        self.out = True
        self.problems = dict.fromkeys(why)

    def conclude(self, result: JobEnds | None, name: str) -> None:
        if result is None:
            return
        self.bad = name in result.problems
        for problem in result.problems.get(name, ()):
            self.problems[_shown(problem, "")] = None
        code = (result.exit_codes or {}).get(name)
        self.exit_code = self.exit_code if code is None else code

    def node(self, name: str, result: JobEnds | None) -> Node:
        over = result is not None
        failed = self.bad or bool(self.exit_code) or (bool(self.problems) and not over)
        probe = self.probe or ProbeAnswer()
        return Node(
            name=name,
            state=_state(self, failed=failed, over=over),
            python=probe.python,
            packages={package: version or "" for package, version in probe.packages.items()},
            interface=probe.interface,
            address=probe.address,
            exit_code=self.exit_code,
            problems=tuple(self.problems),
        )


def _state(learned: _Learned, *, failed: bool, over: bool) -> str:
    if learned.out:
        return LEFT_OUT
    if failed:
        return FAILED
    return WELL if learned.heard and (over or learned.exit_code == 0) else NOT_YET


def _shown(problem: Problem, node: str) -> str:
    return problem.without_place if problem.where == node else str(problem)
