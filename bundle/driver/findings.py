"""Attribution of faults to nodes, from the answers of all nodes. Pure functions, no effects."""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..protocol.codec import decode
from ..protocol.counts import format_size
from ..protocol.events import AllReduceMeasured
from ..protocol.messages import (
    LaunchAnswer,
    NetworkReport,
    NodeRootFacts,
    PreflightAnswer,
    ProbeAnswer,
)
from ..protocol.problem import Problem, ProblemCode
from ..system import network
from ..system.signals import TERMINATED

Problems = dict[str, list[Problem]]
"""The problems of each node, by its name."""

# --- Lines about nodes that people grep for, made by the driver from the nodes' answers ----------

SHOWN = {"torch": "torch", "transformers": "tfm", "datasets": "datasets", "numpy": "numpy"}
"""Packages that the probe's line shows, in this order, with the name it uses."""


def format_preflight_line(answer: PreflightAnswer) -> str:
    """Return the line people grep for, ``hpc07 proj=ok pkgs=ok``, and more facts about a node."""
    seen = {True: "ok", False: "missing"}
    words = [answer.node, f"proj={seen[answer.proj]}", f"pkgs={seen[answer.pkgs]}"]
    facts = None if answer.host is None else answer.host.node_root
    if isinstance(facts, NodeRootFacts):
        words += [
            f"root={answer.root}",
            f"free={format_size(facts.free_bytes).replace(' ', '')}",
            f"inodes={'any' if facts.free_inodes is None else facts.free_inodes}",
            f"exec={'no' if facts.noexec else 'ok'}",
        ]
    if answer.python:
        words.append(f"python={answer.python}")
    return " ".join(words)


def format_probe_line(answer: ProbeAnswer) -> str:
    """Return the line people grep for: ``NODE hpc09 OK -> PY 3.11 torch 2.3.1 tfm 4.41.2``."""
    if answer.problems:
        first = answer.problems[0]  # its finding and its remedy are shown once, for all nodes
        return f"NODE {answer.node} FAILED -> {first.where}: {first.what}"
    installed = {name: version for name, version in answer.packages.items() if version}
    words = [f"{SHOWN[name]} {installed[name]}" for name in SHOWN if name in installed]
    if not words:
        words = [f"{name} {version}" for name, version in list(installed.items())[:6]]
    python = ".".join(answer.python.split(".")[:2])
    return " ".join([f"NODE {answer.node} OK -> PY {python}", *words])


def group_nodes(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the nodes that have each of the texts."""
    nodes: dict[str, list[str]] = {}
    for node, text in texts.items():
        nodes.setdefault(text, []).append(node)
    return nodes


def shorten_names(nodes: Sequence[str]) -> str:
    """Return the names of some nodes for a person: the first three, and how many more."""
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(nodes[:3]) + more


# --- Agreement of a job's nodes about names and the time

SKEW_LIMIT = 2.0
"""Seconds by which clocks may differ before it is a problem: time limits and logs rely on them."""


class ClockReading(NamedTuple):
    """A node's clock, and the driver's around it; seconds since the epoch."""

    sent: float
    """The time of the driver's request, by the driver's clock."""
    clock: float
    """The time by the node's clock."""
    received: float
    """The time when the driver had the answer, by the driver's clock."""


class Offset(NamedTuple):
    """The time by which a clock is ahead of the driver's."""

    seconds: float
    """The best estimate; negative for behind."""
    uncertainty: float
    """Seconds by which the estimate may be wrong."""


def find_differing_names(
    expected: Mapping[str, Sequence[str]], reports: Mapping[str, NetworkReport]
) -> Problems:
    """Return the problems with the nodes' resolution of each other's names."""
    return find_disagreements({node: {**expected, **one.differs} for node, one in reports.items()})


def find_disagreements(answers: Mapping[str, Mapping[str, Sequence[str]]]) -> Problems:
    """Return the problems with the nodes' resolution of each other's names.

    A node disagrees with the others if none of its addresses for a name, or only some of them
    besides others, are among those that most nodes find; a node may find more of them, or fewer.
    """
    names = dict.fromkeys(name for resolved in answers.values() for name in resolved)
    expected = {name: _find_expected_addresses(name, answers) for name in names}
    found = {node: _judge_names(node, resolved, expected) for node, resolved in answers.items()}
    return {node: problems for node, problems in found.items() if problems}


def _judge_names(
    node: str, resolved: Mapping[str, Sequence[str]], expected: Mapping[str, Collection[str]]
) -> list[Problem]:
    unknown, inward, differing = [], [], []
    for name, addresses in resolved.items():
        usable = _list_usable(addresses)
        if not addresses:
            unknown.append(name)
        elif network.is_loopback(addresses[0]):
            inward.append(f"{name} is {addresses[0]}")
        if not _agree(usable, expected[name]):
            right = _name_some(sorted(expected[name]))
            differing.append(f"{name} is {_name_some(usable)}, not {right}")
    codes = ProblemCode.NAMES_UNRESOLVED, ProblemCode.NAMES_LEAD_BACK, ProblemCode.NAMES_DIFFER
    named = zip(codes, (unknown, inward, differing))
    return [Problem(code, node, {"names": _name_some(names)}) for code, names in named if names]


def measure_clock_offset(clock: ClockReading) -> Offset:
    """Estimate a clock's offset: it was read between the driver's two times."""
    middle = (clock.sent + clock.received) / 2
    return Offset(clock.clock - middle, abs(clock.received - clock.sent) / 2)


def find_skewed_clocks(clocks: Mapping[str, ClockReading], limit: float = SKEW_LIMIT) -> Problems:
    """Find the nodes whose clocks are certainly more than ``limit`` seconds from most clocks.

    The driver's clock has one vote as well, and decides between two equal halves.
    """
    offsets = {node: measure_clock_offset(clock) for node, clock in clocks.items()}
    votes = sorted([Offset(0.0, 0.0), *offsets.values()])
    middle = votes[(len(votes) - 1) // 2], votes[len(votes) // 2]
    median = min(middle, key=lambda vote: abs(vote.seconds))
    problems = {}
    for node, offset_here in offsets.items():
        skew = offset_here.seconds - median.seconds
        uncertainty = offset_here.uncertainty + median.uncertainty
        if abs(skew) - uncertainty > limit:
            values = {
                "seconds": f"{abs(skew):.1f}",
                "side": "ahead of" if skew > 0 else "behind",
                "uncertainty": f"{uncertainty:.1f}",
            }
            problems[node] = [Problem(ProblemCode.CLOCK_WRONG, node, values)]
    return problems


def _list_usable(addresses: Iterable[str]) -> list[str]:
    """Leave out loopback and link-local addresses, which mean another host on each node."""
    return [
        address
        for address in addresses
        if not network.is_loopback(address)
        and not ipaddress.ip_address(address.partition("%")[0]).is_link_local
    ]


def _find_expected_addresses(
    name: str, answers: Mapping[str, Mapping[str, Sequence[str]]]
) -> frozenset[str]:
    """Return the addresses of a name that most nodes find; its own node decides a tie."""
    lists = {node: _list_usable(names.get(name, ())) for node, names in answers.items()}
    by_node = {node: frozenset(addresses) for node, addresses in lists.items()}
    counts = Counter(addresses for addresses in by_node.values() if addresses)
    if not counts:
        return frozenset()
    return max(counts, key=lambda addresses: (counts[addresses], by_node.get(name) == addresses))


def _agree(mine: Collection[str], expected: Collection[str]) -> bool:
    return not mine or set(mine) <= set(expected) or set(expected) <= set(mine)


def _name_some(items: Iterable[str], most: int = 4) -> str:
    listed = list(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


RESULT = "ALL-REDUCE "
"""Prefix of the line with the ranks' measurement (``trainer/network/all_reduce.py``)."""

_ERROR = re.compile(r"(\[RANK \d+\] )?error: (.*)")
_BETWEEN_TWO = re.compile(r"(\S+) and (\S+): (.*)", re.DOTALL)
_ABOUT_ONE = re.compile(r"(\S+?)(?:: | \(rank )")
_SILENT = re.compile(r"no word from (.+) \(rank ")
_LOST = re.compile(r"rank \d+ on \S+ lost the others: ")


class _Report(NamedTuple):
    node: str
    text: str
    """The text behind ``error: ``."""
    for_all: bool
    """True if the rank reports it for all ranks, which all know it."""

    @property
    def pair(self) -> tuple[str, str] | None:
        between = _BETWEEN_TWO.match(self.text)
        return (between[1], between[2]) if between else None


def find_unreachable_nodes(head: str, reports: Mapping[str, NetworkReport]) -> Problems:
    """Return what keeps nodes from reaching the head; if none can, the head itself is at fault."""
    if head not in reports:
        return {}  # the others may have waited for it in vain
    problems = {node: [one.problem] for node, one in reports.items() if one.problem is not None}
    if head in problems:
        return {head: problems[head]}
    if len(problems) > 1 and len(problems) == len(reports) - 1:
        first = next(iter(problems.values()))[0]
        values = {"why": first.why, "fix": first.fix}
        return {head: [Problem(ProblemCode.HEAD_REACHED_BY_NONE, first.where, values)]}
    return problems


def read_measurement(lines: Iterable[str]) -> AllReduceMeasured | None:
    """Return the result of the all-reduce from the output of the ranks; None if there is none."""
    for line in lines:
        if not line.startswith(RESULT):
            continue
        try:
            return decode(AllReduceMeasured, json.loads(line[len(RESULT) :]), strict=False)
        except ValueError:
            continue
    return None


def find_failed_ranks(
    printed: Mapping[tuple[str, int], Sequence[str]], answers: Mapping[str, LaunchAnswer]
) -> Problems:
    """Return the nodes that are at fault when an all-reduce has failed.

    A rank reports an error in a line ``error: ``; an error that all ranks know is reported by one
    of them for all. A fault between two nodes is attributed to the one with more such faults, or to
    both.
    """
    reports = _select_reports(printed)
    if reports:
        return _group_by_node(reports, list(answers))
    records = [record for answer in answers.values() for record in answer.failures]
    if not records:
        return _describe_exits(answers)
    first = min(records, key=lambda record: record.time)
    message = first.message or first.exception
    why = f"rank {first.rank} ended first, with status {first.exit_code}: {message}"
    return {first.node: [_problem(first.node, why.rstrip(": "))]}


def _select_reports(printed: Mapping[tuple[str, int], Sequence[str]]) -> list[_Report]:
    """Return the reported errors, each once; consequences only if there is nothing else."""
    reports = [one for (node, _), lines in printed.items() for one in _read_reports(node, lines)]
    for_all = [report for report in reports if report.for_all]
    causes = [report for report in reports if not _LOST.match(report.text)]
    return list(dict.fromkeys(for_all or causes or reports))


def _read_reports(node: str, lines: Iterable[str]) -> Iterator[_Report]:
    for_all: bool | None = None
    for line in lines:
        error = _ERROR.match(line)
        if error:
            for_all = not error[1]
            yield _Report(node, error[2], for_all)
        elif line.startswith("hint: "):
            for_all = None
        elif for_all is not None:
            yield _Report(node, line, for_all)


def _group_by_node(reports: Sequence[_Report], nodes: Sequence[str]) -> Problems:
    frequency = Counter(node for report in reports for node in report.pair or ())
    problems: Problems = {}
    for report in reports:
        for node in _pick_faulty_ranks(report, nodes, frequency):
            why = report.text.removeprefix(f"{node}: ")
            problems.setdefault(node, []).append(_problem(node, why))
    return {node: problems[node] for node in nodes if node in problems}


def _pick_faulty_ranks(
    report: _Report, nodes: Sequence[str], frequency: Mapping[str, int]
) -> list[str]:
    pair = report.pair
    if pair and set(pair) <= set(nodes):
        most = max(frequency[node] for node in pair)
        return [node for node in pair if frequency[node] == most]
    return _find_named_nodes(report.text, nodes) or [report.node]


def _find_named_nodes(text: str, nodes: Sequence[str]) -> list[str]:
    silent = _SILENT.match(text)
    if silent:
        return [node for node in silent[1].split(", ") if node in nodes]
    about = _ABOUT_ONE.match(text)
    return [about[1]] if about and about[1] in nodes else []


def _describe_exits(answers: Mapping[str, LaunchAnswer]) -> Problems:
    """Attribute the failure by exit status; a node told to end may only have followed another."""
    silent: Problems = {}
    failed: Problems = {}
    causes: Problems = {}
    for node, answer in answers.items():
        if answer.problems:
            silent[node] = list(answer.problems)
        elif answer.exit_code:
            why = "; ".join([f"status {answer.exit_code}", *answer.tail[-1:]])
            ended = failed if answer.exit_code == TERMINATED else causes
            ended[node] = [_problem(node, why)]
    return causes or silent or failed


def _problem(node: str, why: str) -> Problem:
    return Problem(ProblemCode.RANKS_CANNOT_TALK, node, {"why": why})
