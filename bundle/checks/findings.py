"""Whose fault it is: what all nodes found together, judged. Pure functions, no effects."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..protocol.problem import Problem
from ..system.signals import TERMINATED
from . import network_agreement

RESULT = "ALL-REDUCE "
"""How the line begins that the ranks' measurement ends with (``trainer/network/all_reduce.py``)."""

_SEEN = "look at the network between the nodes (cable, MTU, firewall), name the interface with "
_SEEN += "[launch] interface in stager.toml, or leave the node out with --exclude"
_ERROR = re.compile(r"(\[RANK \d+\] )?error: (.*)")
_PAIR = re.compile(r"(\S+) and (\S+): (.*)", re.DOTALL)
_OWN = re.compile(r"(\S+?)(?:: | \(rank )")
_SILENT = re.compile(r"no word from (.+) \(rank ")
_LOST = re.compile(r"rank \d+ on \S+ lost the others: ")

Problems = dict[str, list[Problem]]
"""What is wrong, by node."""


def unreachable(head: str, answers: Mapping[str, Mapping[str, Any]]) -> Problems:
    """What keeps nodes from the head; where it is none of them, the head itself is at fault.

    Args:
        head: the head node.
        answers: what each node found about the network, see :mod:`bundle.checks.deep_node`; a node
            that has not answered is absent.
    """
    if head not in answers:
        return {}  # the others may have waited for it in vain
    if "problem" in answers[head]:
        return {head: [Problem.from_json(answers[head]["problem"])]}
    failed = {
        node: Problem.from_json(answer["problem"])
        for node, answer in answers.items()
        if "problem" in answer
    }
    if len(failed) > 1 and len(failed) == len(answers) - 1:
        first = next(iter(failed.values()))
        what = "no other node can reach the head node"
        return {head: [Problem(what, first.where, first.why, first.fix)]}
    return {node: [problem] for node, problem in failed.items()}


def names_apart(
    expected: Mapping[str, Sequence[str]], answers: Mapping[str, Mapping[str, Any]]
) -> Problems:
    """What is wrong with how nodes resolve each other's names.

    Args:
        expected: what the driver finds for each name.
        answers: what each node found about the network: there is only what differs.
    """
    said = {node: {**expected, **answer["differs"]} for node, answer in answers.items()}
    return network_agreement.disagreements(said)


def measured(lines: Iterable[str]) -> dict[str, Any] | None:
    """The result of the all-reduce, from what the ranks printed; None where there is none."""
    for line in lines:
        if line.startswith(RESULT):
            try:
                found = json.loads(line[len(RESULT) :])
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return None


def blamed(
    printed: Mapping[tuple[str, int], Sequence[str]], answers: Mapping[str, Mapping[str, Any]]
) -> Problems:
    """Which nodes an all-reduce that failed is the fault of.

    A rank tells what it knows in a line ``error: ``; what all of them know, one tells for all. A
    fault between two nodes is that of the one with more such faults, or of both.

    Args:
        printed: the lines of each rank, by its node and number.
        answers: how the ranks' agents ended.
    """
    told = _told(printed)
    if told:
        return _by_node(told, list(answers))
    records = [record for one in answers.values() for record in one.get("failures", [])]
    if records:
        record = min(records, key=lambda record: float(record.get("time") or 0))
        node, said = str(record["node"]), record.get("message") or record.get("exception") or ""
        why = f"rank {record['rank']} ended first, with status {record['exit_code']}: {said}"
        return {node: [_failed(node, why.rstrip(": "))]}
    # Who was told to end, or gave no answer, may only have been ended along with another one.
    codes = {node: answer.get("exit_code") for node, answer in answers.items()}
    own = [node for node, answer in answers.items() if codes[node] and not answer["problems"]]
    first = [node for node in own if codes[node] != TERMINATED]
    silent = {node: answer["problems"] for node, answer in answers.items() if answer["problems"]}
    if silent and not first:
        return {node: [Problem.from_json(raw) for raw in raws] for node, raws in silent.items()}
    return {
        node: [_failed(node, "; ".join([f"status {codes[node]}", *answers[node]["tail"][-1:]]))]
        for node in first or own
    }


def silence(head: str, log_dir: str) -> Problem:
    """The problem of ranks that ended well and measured nothing."""
    why = f"no line of theirs begins with {RESULT.strip()}"
    return Problem("the ranks have measured nothing", head, why, f"see the logs in {log_dir}")


def _told(printed: Mapping[tuple[str, int], Sequence[str]]) -> list[tuple[str, str]]:
    """What ranks said went wrong, each with the node that said it; no mere consequences."""
    found = [(node, *said) for (node, _), lines in printed.items() for said in _errors(lines)]
    common = [(node, text) for node, together, text in found if together]
    lost = [(node, text) for node, _, text in found if _LOST.match(text)]
    single = [(node, text) for node, _, text in found if not _LOST.match(text)]
    return list(dict.fromkeys(common or single or lost))


def _errors(lines: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """Each line of an error up to its hint, and whether the rank spoke for all of them."""
    together: bool | None = None
    for line in lines:
        begins = _ERROR.match(line)
        if begins:
            together = not begins[1]
            yield together, begins[2]
        elif line.startswith("hint: "):
            together = None
        elif together is not None:
            yield together, line


def _by_node(told: Sequence[tuple[str, str]], nodes: Sequence[str]) -> Problems:
    """Give each fault to the node, or the two, that it is about."""
    pairs = [_PAIR.match(text) for _, text in told]
    often = Counter(node for pair in pairs if pair for node in pair.groups()[:2])
    found: Problems = {}
    for (node, text), pair in zip(told, pairs):
        if pair and {pair[1], pair[2]} <= set(nodes):
            most = max(often[pair[1]], often[pair[2]])
            having = [one for one in pair.groups()[:2] if often[one] == most]
        else:
            having = _named(text, nodes) or [node]
        for one in having:
            found.setdefault(one, []).append(_failed(one, text.removeprefix(f"{one}: ")))
    return {node: found[node] for node in nodes if node in found}


def _named(text: str, nodes: Sequence[str]) -> list[str]:
    """The nodes that a fault begins with."""
    silent = _SILENT.match(text)
    if silent:
        return [node for node in silent[1].split(", ") if node in nodes]
    own = _OWN.match(text)
    return [own[1]] if own and own[1] in nodes else []


def _failed(node: str, why: str) -> Problem:
    return Problem("the ranks cannot talk", node, why, _SEEN)
