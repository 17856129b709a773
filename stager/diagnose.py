"""What failed first, why, and what to do: from what the nodes and ranks left behind."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundle.problem import Problem
from bundle.ranks import CAUSE, weight

LINES = 20
_TOLD_TO_END = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The failure that the others follow from."""

    node: str
    """The node it happened on."""
    rank: int | None
    """The rank, where it was one."""
    exit_code: int | None
    """The rank's exit status, negative for a signal; None where no rank had started."""
    kind: str
    """Its class, one of the words that ``--json`` documents."""
    cause: str
    """What happened, in one line."""
    hint: str
    """What to do about it."""
    lines: tuple[str, ...]
    """The last lines that belong to it."""

    def to_json(self) -> dict[str, Any]:
        """The fields under the names that scripts rely on."""
        return {
            "node": self.node,
            "rank": self.rank,
            "exit_code": self.exit_code,
            "class": self.kind,
            "cause": self.cause,
            "hint": self.hint,
            "lines": list(self.lines),
        }


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """A text that tells a class of failure."""

    kind: str
    pattern: re.Pattern[str]
    hint: str


_SIGNS = (
    _Sign(
        kind="missing-module",
        pattern=re.compile(r"ModuleNotFoundError: No module named|cannot run -m "),
        hint="add the package to environment.requirements and build again; a module of your own "
        "must be in the project folder and not excluded",
    ),
    _Sign(
        kind="missing-module",
        pattern=re.compile(r"FileNotFoundError: no script "),
        hint="check the script's name; it is looked for in the staged project, then in the "
        "directory that stager was called from",
    ),
    _Sign(
        kind="missing-asset",
        pattern=re.compile(r"FileNotFoundError: \[Errno 2\]"),
        hint="relative paths start where stager was called; files named in assets.paths are "
        "under $STAGER_ASSETS on every node",
    ),
    _Sign(
        kind="missing-asset",
        pattern=re.compile(
            r"OfflineModeIsEnabled|LocalEntryNotFoundError|Couldn't find cache for"
            r"|Couldn't (connect|reach) .*[Hh]ub"
        ),
        hint="nothing is fetched at run time: put the files under assets.paths and give their path",
    ),
    _Sign(
        kind="out-of-memory",
        pattern=re.compile(r"OutOfMemoryError|CUDA out of memory|MemoryError|oom.kill", re.I),
        hint="use a smaller batch, fewer ranks a node, or nodes with more memory",
    ),
    _Sign(
        kind="disk-full",
        pattern=re.compile(r"No space left on device|Disk quota exceeded"),
        hint="free some space there, or write somewhere else",
    ),
    _Sign(
        kind="port",
        pattern=re.compile(r"EADDRINUSE|[Aa]ddress already in use"),
        hint="another process took the port in between: start the job again",
    ),
    _Sign(
        kind="interface",
        pattern=re.compile(r"Unable to find address for|connectFullMesh failed"),
        hint="name the right network interface with --interface",
    ),
    _Sign(
        kind="rendezvous",
        pattern=re.compile(r"RendezvousTimeoutError|waiting for clients"),
        hint="some node's ranks never came: look at the other nodes' logs",
    ),
)

_NODE_SIGNS = (
    ("node-failure", re.compile(r"gave no answer")),
    ("damaged-copy", re.compile(r"damaged|another bundle")),
    ("disk-full", re.compile(r" are free|No space left")),
    ("interface", re.compile(r"no such interface")),
    ("name-resolution", re.compile(r"name cannot be resolved")),
    ("port", re.compile(r"ports .* can be listened on")),
)
"""How the far side words its problems, by class; anything else is the environment's."""


def first_failure(result: Mapping[str, Any]) -> FirstFailure | None:
    """The earliest failure that is a cause and not a consequence.

    A rank that failed by itself comes first; then a node that could not do its part; then a
    launcher that failed before it had ranks. Only where there is none of these is a rank blamed
    that lost its connection to the others, or that somebody ended.

    Args:
        result: the driver's ``result`` event.
    """
    ranked = sorted(result.get("failures", []), key=lambda one: (weight(one), float(one["time"])))
    if ranked and weight(ranked[0]) == CAUSE:
        return _of_rank(ranked[0])
    for node, problems in result.get("problems", {}).items():
        for raw in problems:
            return _of_node(node, Problem.from_json(raw))
    codes = {node: int(code) for node, code in result.get("exit_codes", {}).items() if code}
    with_ranks = {record["node"] for record in ranked}
    silent = {node: code for node, code in codes.items() if node not in with_ranks}
    # A launcher that was told to end is a consequence, too.
    for node in sorted(silent, key=lambda node: silent[node] == _TOLD_TO_END):
        if silent[node] != _TOLD_TO_END or not ranked:
            return _of_launcher(node, silent[node], result.get("tails", {}).get(node, []))
    return _of_rank(ranked[0]) if ranked else None


def _of_rank(record: Mapping[str, Any]) -> FirstFailure:
    code = int(record["exit_code"])
    lines = tuple(str(line) for line in record["lines"][-LINES:])
    sign = _sign("\n".join(lines))
    exception, message = str(record["exception"]), str(record["message"]).split("\n")[0]
    if exception == "SystemExit":
        cause = f"the program ended itself: sys.exit({message})"
        kind, hint = "python-error", "the lines before that in its log say why"
    elif exception:
        cause = f"{exception}: {message}" if message else exception
        kind, hint = "python-error", "the traceback names the line in your program"
    else:
        cause, kind, hint = _of_code(code)
    if sign is not None and kind != "killed":  # the lines of a killed one may be anybody's
        kind, hint = sign.kind, sign.hint
    return FirstFailure(
        node=str(record["node"]),
        rank=int(record["rank"]),
        exit_code=code,
        kind=kind,
        cause=cause,
        hint=hint,
        lines=lines,
    )


def _of_code(code: int) -> tuple[str, str, str]:
    """Cause, class and hint of a process that left no word."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number == 0:
        return f"it ended with exit status {code}", "unknown", "its log holds all it wrote"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hints = {
        "SIGKILL": "usually the machine ran out of memory: use a smaller batch or fewer ranks",
        "SIGSEGV": "a crash in compiled code: set PYTHONFAULTHANDLER=1 and run again to see where",
        "SIGILL": "a wheel uses instructions that this processor has not: exclude the node",
    }
    return f"it was killed by {name}", "killed", hints.get(name, "see who sent the signal")


def _of_launcher(node: str, code: int, tail: Sequence[str]) -> FirstFailure:
    """The launcher itself failed, before or beside its ranks."""
    sign = _sign("\n".join(tail))
    shown = tuple(tail[-LINES:])
    last = next((line.strip() for line in reversed(tail) if line.strip()), "")
    return FirstFailure(
        node=node,
        rank=None,
        exit_code=code,
        kind=sign.kind if sign else "unknown",
        cause=last or f"the launcher ended with exit status {code}",
        hint=sign.hint if sign else "the node's log holds all that was written",
        lines=shown,
    )


def _of_node(node: str, problem: Problem) -> FirstFailure:
    """No rank was started: the node could not do its part."""
    why = f"{problem.what}: {problem.why}" if problem.why else problem.what
    kinds = (kind for kind, pattern in _NODE_SIGNS if pattern.search(why))
    return FirstFailure(
        node=node,
        rank=None,
        exit_code=None,
        kind=next(kinds, "environment"),
        cause=f"{problem.where}: {why}" if problem.where else why,
        hint=problem.fix,
        lines=(),
    )


def _sign(text: str) -> _Sign | None:
    return next((sign for sign in _SIGNS if sign.pattern.search(text)), None)
