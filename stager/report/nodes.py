"""The facts about each node of a job: its Python, its packages, its network interface."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from bundle.protocol.problem import Problem

from ..logs.json_fields import listing, table, text, texts, whole
from .attempt import Attempt, Event, answered

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
        if event["event"] == "job":
            reports = {node: _Learned() for node in texts(event, "nodes")}
        if event["event"] == "left-out":
            for name, learned in reports.items():
                learned.leave_out(table(event, "nodes").get(name))
        answering = reports.get(answered(event))
        if answering is not None:
            answering.take(event)
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
    """A node while the events are read."""

    report: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    out: bool = False
    bad: bool = False
    heard: bool = False
    problems: dict[str, None] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Learn from an answer."""
        kind = event["event"]
        self.heard = True
        if kind == "probe":
            self.report = dict(event)
        if kind == "launch":
            code = whole(event, "exit_code")
            self.exit_code = self.exit_code or code  # of several tasks the first that failed
        # What is not ok is tried again sometimes; what counts then is the result.
        for problem in _problems(event):
            self.problems[problem] = None

    def leave_out(self, why: object) -> None:
        """Note that the job went on without this node."""
        if isinstance(why, list):
            self.out = True
            self.problems = dict.fromkeys(line for line in why if isinstance(line, str))

    def conclude(self, result: Event, name: str) -> None:
        """Learn from the job's result."""
        listed = table(result, "problems")
        self.bad = name in listed
        for problem in _problems({"problems": listed.get(name)}):
            self.problems[problem] = None
        code = whole(table(result, "exit_codes"), name)
        self.exit_code = self.exit_code if code is None else code

    def node(self, name: str, result: Event) -> Node:
        """Return the node."""
        failed = self.bad or bool(self.exit_code) or (bool(self.problems) and not result)
        versions = table(self.report, "packages")
        return Node(
            name=name,
            state=_state(self, failed=failed, over=bool(result)),
            python=text(self.report, "python"),
            packages={package: text(versions, package) for package in versions},
            interface=text(self.report, "interface"),
            address=text(self.report, "address"),
            exit_code=self.exit_code,
            problems=tuple(self.problems),
        )


def _state(learned: _Learned, *, failed: bool, over: bool) -> str:
    if learned.out:
        return LEFT_OUT
    if failed:
        return FAILED
    return WELL if learned.heard and (over or learned.exit_code == 0) else NOT_YET


def _problems(event: Event) -> Iterator[str]:
    """Return problems as lines, in whichever form they are written."""
    for raw in listing(event, "problems"):
        if isinstance(raw, str):
            yield raw
        elif isinstance(raw, dict):
            with suppress(KeyError, TypeError):
                problem = Problem.from_json(raw)
                is_of_node = problem.where == text(event, "node")
                yield str(replace(problem, where="") if is_of_node else problem)
