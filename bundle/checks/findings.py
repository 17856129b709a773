"""Attribution of faults to nodes, from the answers of all nodes. Pure functions, no effects."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..protocol.codec import decode
from ..protocol.events import AllReduceMeasured
from ..protocol.problem import Problem, ProblemCode
from ..protocol.reports import FailureRecord, LaunchAnswer, NetworkReport
from ..system.signals import TERMINATED
from . import network_agreement

RESULT = "ALL-REDUCE "
"""Prefix of the line with the ranks' measurement (``trainer/network/all_reduce.py``)."""

_ERROR = re.compile(r"(\[RANK \d+\] )?error: (.*)")
_BETWEEN_TWO = re.compile(r"(\S+) and (\S+): (.*)", re.DOTALL)
_ABOUT_ONE = re.compile(r"(\S+?)(?:: | \(rank )")
_SILENT = re.compile(r"no word from (.+) \(rank ")
_LOST = re.compile(r"rank \d+ on \S+ lost the others: ")

Problems = dict[str, list[Problem]]
"""The problems of each node, by its name."""


@dataclass(frozen=True)
class _Report:
    """An error that a rank has printed."""

    node: str
    """The rank's node."""
    text: str
    """The text behind ``error: ``."""
    for_all: bool
    """True if the rank reports it for all ranks, which all know it."""

    @property
    def is_consequence(self) -> bool:
        """True if the rank has only lost its connection to the others."""
        return _LOST.match(self.text) is not None

    @property
    def pair(self) -> tuple[str, str] | None:
        between = _BETWEEN_TWO.match(self.text)
        return (between[1], between[2]) if between else None


def unreachable(head: str, reports: Mapping[str, NetworkReport]) -> Problems:
    """Return what keeps nodes from reaching the head; if none can, the head itself is at fault."""
    if head not in reports:
        return {}  # the others may have waited for it in vain
    problems: Problems = {}
    for node, report in reports.items():
        if report.problem is not None:
            problems[node] = [report.problem]
    if head in problems:
        return {head: problems[head]}
    if len(problems) > 1 and len(problems) == len(reports) - 1:
        first = next(iter(problems.values()))[0]
        values = {"why": first.why, "fix": first.fix}
        return {head: [Problem(ProblemCode.HEAD_REACHED_BY_NONE, first.where, values)]}
    return problems


def names_apart(
    expected: Mapping[str, Sequence[str]], reports: Mapping[str, NetworkReport]
) -> Problems:
    """Return the problems with the nodes' resolution of each other's names."""
    resolutions = {node: {**expected, **report.differs} for node, report in reports.items()}
    return network_agreement.disagreements(resolutions)


def measured(lines: Iterable[str]) -> AllReduceMeasured | None:
    """Return the result of the all-reduce from the output of the ranks; None if there is none."""
    for line in lines:
        if not line.startswith(RESULT):
            continue
        try:
            return decode(AllReduceMeasured, json.loads(line[len(RESULT) :]), strict=False)
        except ValueError:
            continue
    return None


def blamed(
    printed: Mapping[tuple[str, int], Sequence[str]], answers: Mapping[str, LaunchAnswer]
) -> Problems:
    """Return the nodes that are at fault when an all-reduce has failed.

    A rank reports an error in a line ``error: ``; an error that all ranks know is reported by one
    of them for all. A fault between two nodes is attributed to the one with more such faults, or to
    both.
    """
    reports = _root_reports(printed)
    if reports:
        return _by_node(reports, list(answers))
    records = [record for answer in answers.values() for record in answer.failures]
    if records:
        return _first_failure(records)
    return _by_status(answers)


def silence(head: str, log_dir: str) -> Problem:
    """Return the problem of ranks that ended well and measured nothing."""
    values = {"prefix": RESULT.strip(), "log_dir": log_dir}
    return Problem(ProblemCode.NOTHING_MEASURED, head, values)


def _root_reports(printed: Mapping[tuple[str, int], Sequence[str]]) -> list[_Report]:
    """Return the reported errors, each once; consequences only if there is nothing else."""
    reports: list[_Report] = []
    for (node, _), lines in printed.items():
        reports += _reports(node, lines)
    for_all = [report for report in reports if report.for_all]
    causes = [report for report in reports if not report.is_consequence]
    return list(dict.fromkeys(for_all or causes or reports))


def _reports(node: str, lines: Iterable[str]) -> Iterator[_Report]:
    """Yield each line of a rank's errors, up to their hints."""
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


def _by_node(reports: Sequence[_Report], nodes: Sequence[str]) -> Problems:
    frequency = Counter(node for report in reports for node in report.pair or ())
    problems: Problems = {}
    for report in reports:
        for node in _at_fault(report, nodes, frequency):
            why = report.text.removeprefix(f"{node}: ")
            problems.setdefault(node, []).append(_cannot_talk(node, why))
    return {node: problems[node] for node in nodes if node in problems}


def _at_fault(report: _Report, nodes: Sequence[str], frequency: Mapping[str, int]) -> list[str]:
    pair = report.pair
    if pair and set(pair) <= set(nodes):
        most = max(frequency[node] for node in pair)
        return [node for node in pair if frequency[node] == most]
    return _nodes_named(report.text, nodes) or [report.node]


def _nodes_named(text: str, nodes: Sequence[str]) -> list[str]:
    """Return the nodes that the text of an error begins with."""
    silent = _SILENT.match(text)
    if silent:
        return [node for node in silent[1].split(", ") if node in nodes]
    about = _ABOUT_ONE.match(text)
    return [about[1]] if about and about[1] in nodes else []


def _first_failure(records: Iterable[FailureRecord]) -> Problems:
    record = min(records, key=lambda record: record.time)
    message = record.message or record.exception
    why = f"rank {record.rank} ended first, with status {record.exit_code}: {message}"
    return {record.node: [_cannot_talk(record.node, why.rstrip(": "))]}


def _by_status(answers: Mapping[str, LaunchAnswer]) -> Problems:
    """Attribute the failure by exit status; a node told to end may only have followed another."""
    silent: Problems = {}
    failed: list[str] = []
    for node, answer in answers.items():
        if answer.problems:
            silent[node] = list(answer.problems)
        elif answer.exit_code:
            failed.append(node)
    causes = [node for node in failed if answers[node].exit_code != TERMINATED]
    if causes:
        return _ended_badly(causes, answers)
    return silent or _ended_badly(failed, answers)


def _ended_badly(nodes: Iterable[str], answers: Mapping[str, LaunchAnswer]) -> Problems:
    problems: Problems = {}
    for node in nodes:
        status = f"status {answers[node].exit_code}"
        why = "; ".join([status, *answers[node].tail[-1:]])
        problems[node] = [_cannot_talk(node, why)]
    return problems


def _cannot_talk(node: str, why: str) -> Problem:
    return Problem(ProblemCode.RANKS_CANNOT_TALK, node, {"why": why})
