"""The driver's part in ``verify --deep``: each node is checked closely, then all ranks communicate.

The problems of the probe, of the deep check and of the all-reduce are reported together.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..checks import deep
from ..launch.commands import choose_backend
from ..protocol import messages
from ..protocol.codec import decode
from ..protocol.enumerations import Allocation, PhaseName
from ..protocol.events import AllReduceMeasured, ClockOffset, DeepReport, RankOutput
from ..protocol.job import Job
from ..protocol.messages import Answer, DeepAnswer, LaunchAnswer, NetworkReport
from ..protocol.problem import Problem, ProblemCode
from ..system import network
from ..system.signals import TERMINATED
from .findings import Names, shorten_names
from .state import State
from .transports.transport import Event

COMMAND = ("-m", "trainer", "all-reduce")
ALL_REDUCE_SECONDS = 1800  # for the launcher; the ranks' own time limits are shorter
Addresses = Mapping[str, Sequence[str]]  # those that a node finds for each name
Printed = dict[tuple[str, int], list[str]]  # the lines of each node and rank
Problems = dict[str, list[Problem]]  # the problems of each node, by its name


def check_nodes(state: State) -> None:
    """Let every node check itself; ``state.answers`` then has this beside the probe's answers."""
    probed, job = state.answers, state.job
    head: tuple[str, int] | None = None
    names: dict[str, tuple[str, ...]] | None = None
    if job.allocation is not Allocation.LOCAL:  # one machine has one clock and one resolver
        head = _find_address(state, job.nodes[0])
        names = names_to_compare(job)
    clocks: dict[str, ClockOffset] = {}
    sent = time.time()

    def take(event: Event) -> None:
        if isinstance(event, messages.NodeClock):
            clocks[event.node] = measure_clock_offset(sent, event.clock, time.time())

    state.ask(
        PhaseName.DEEP,
        lambda node: messages.DeepRequest(*state.place(node), head=head, names=names),
        take,
    )
    checked = state.get_answers(DeepAnswer)
    found: list[Problems] = []
    for node, answer in checked.items():
        if answer.damage is not None:
            found.append({node: list(answer.damage)})
            finding = "is damaged" if answer.damage else "is as it was built, every file"
            state.log_line(node, f"{node} deep: the environment {finding}")
    if names is not None:
        found += _compare_networks(state, names, clocks)
    state.answers = {
        node: _add_problems(checked.get(node, DeepAnswer(node)), found, probe)
        for node, probe in probed.items()
    }


def names_to_compare(job: Job) -> dict[str, tuple[str, ...]]:
    """Return the names that all nodes look up, with addresses; not what only ``ssh`` knows."""
    resolved = deep.resolve_names(name.rpartition("@")[2] for name in job.nodes)
    by_ssh = job.allocation is Allocation.SSH
    return {name: tuple(places) for name, places in resolved.items() if places or not by_ssh}


def _find_address(state: State, node: str) -> tuple[str, int]:
    facts = state.facts[node]
    return facts.address, facts.port or network.choose_port(state.job.id)


def _compare_networks(
    state: State, names: Addresses, clocks: Mapping[str, ClockOffset]
) -> list[Problems]:
    answers = state.get_answers(DeepAnswer).items()
    reports = {node: answer.network for node, answer in answers if answer.network is not None}
    seconds = {node: report.seconds for node, report in reports.items()}
    deep = DeepReport(
        connect_seconds={node: taken for node, taken in seconds.items() if taken is not None},
        clocks={
            node: ClockOffset(round(offset.ahead, 3), round(offset.give_or_take, 3))
            for node, offset in clocks.items()
        },
    )
    state.result = replace(state.result, deep=deep)
    return [
        find_unreachable_nodes(state.job.nodes[0], reports),
        find_disagreements({node: {**names, **one.differs} for node, one in reports.items()}),
        find_skewed_clocks(clocks),
    ]


def all_reduce(state: State) -> None:
    """Let ranks of all nodes without a problem communicate; ``answers`` then has everything."""
    before, result = state.answers, None
    problems: Problems = {}
    nodes = tuple(node for node, answer in before.items() if answer.ok)
    why = _find_reason_to_skip(state, nodes)
    if why:
        state.note(f"the all-reduce is left out: {why}")
    else:
        result, problems = _measure_all_reduce(state, nodes)
    deep = replace(state.result.deep or DeepReport(), all_reduce=result, skipped=why)
    state.result = replace(state.result, deep=deep)
    state.answers = {
        node: _add_problems(answer, [problems], Answer()) for node, answer in before.items()
    }


def _find_reason_to_skip(state: State, nodes: Names) -> str:
    if not nodes:
        return "every node has a problem"
    answers = state.get_answers(DeepAnswer)
    if not all(node in answers and answers[node].torch for node in nodes):
        return "torch is not in the bundle"
    if len(nodes) * state.nproc < 2:
        return "there is only one rank, and it takes two"
    return ""


def _measure_all_reduce(state: State, nodes: Names) -> tuple[AllReduceMeasured | None, Problems]:
    all_gpus = state.gpus()
    gpus = {node: all_gpus[node] for node in nodes}
    try:
        backend = choose_backend(state.job.launch.backend, gpus)
    except ValueError as exc:
        problem = Problem(ProblemCode.BACKEND_UNUSABLE, "", {"why": str(exc)})
        return None, {node: [problem] for node in nodes if not gpus[node]}
    printed = _run_ranks(state, nodes, backend)
    result = read_measurement(itertools.chain.from_iterable(printed.values()))
    if result is None:
        problems = find_faulty_nodes(printed, state.get_answers(LaunchAnswer))
        values = {"prefix": RESULT.strip(), "log_dir": state.job.log_dir}
        nothing = Problem(ProblemCode.NOTHING_MEASURED, nodes[0], values)
        return None, problems or {nodes[0]: [nothing]}
    # Printed once every rank has the right sum: a later failure is only one of cleaning up.
    failed = state.find_failed()
    if failed:
        where = ", ".join(failed)
        state.note(f"the ranks have measured all, but did not end well on {where}: see the logs")
    return result, {}


def _run_ranks(state: State, nodes: Names, backend: str) -> Printed:
    # Nobody joins these ranks later, and none is started again.
    launch = replace(state.job.launch, command=COMMAND, elastic=None, max_restarts=0)
    address, port = _find_address(state, nodes[0])
    job = replace(state.job, nodes=nodes, launch=launch)
    group = messages.GroupSettings(address, port, backend, state.nproc)
    printed: Printed = {}

    def take(event: Event) -> None:
        if isinstance(event, RankOutput) and event.rank is not None:
            lines = messages.split_lines(event.data)
            printed.setdefault((event.node, event.rank), []).extend(lines)

    def request(node: str) -> messages.LaunchRequest:
        placed = state.place(node)
        asked = messages.LaunchRequest(*placed, group=group, shared=False, own=True)
        return replace(asked, job=job, node_rank=nodes.index(node), limit=ALL_REDUCE_SECONDS)

    state.ask(PhaseName.LAUNCH, request, take, nodes)
    return printed


def _add_problems(answer: Answer, found: list[Problems], before: Answer) -> Answer:
    """Add problems to a node's answer, and those of its earlier answer, each once."""
    problems = [*answer.problems]
    problems += [problem for by_node in found for problem in by_node.get(answer.node, [])]
    problems += [problem for problem in before.problems if problem not in problems]
    return replace(
        answer,
        ok=answer.ok and before.ok and not problems,
        lost=answer.lost or before.lost,
        problems=tuple(problems),
    )


SKEW_LIMIT = 2.0  # seconds; time limits and logs rely on clocks


def find_disagreements(answers: Mapping[str, Addresses]) -> Problems:
    """Return the problems with the nodes' resolution of each other's names.

    A node disagrees if its addresses for a name are neither a part of those that most nodes find,
    nor all of these and more.
    """
    names = dict.fromkeys(name for resolved in answers.values() for name in resolved)
    expected = {name: _find_expected_addresses(name, answers) for name in names}
    found = {node: _judge_names(node, resolved, expected) for node, resolved in answers.items()}
    return {node: problems for node, problems in found.items() if problems}


def _judge_names(
    node: str, resolved: Addresses, expected: Mapping[str, Collection[str]]
) -> list[Problem]:
    unknown, inward, differing = [], [], []
    for name, addresses in resolved.items():
        usable = _list_usable(addresses)
        if not addresses:
            unknown.append(name)
        elif network.is_loopback(addresses[0]):
            inward.append(f"{name} is {addresses[0]}")
        wanted = frozenset(expected[name])
        if usable and not (wanted.issuperset(usable) or wanted.issubset(usable)):
            right = shorten_names(sorted(wanted))
            differing.append(f"{name} is {shorten_names(usable)}, not {right}")
    codes = ProblemCode.NAMES_UNRESOLVED, ProblemCode.NAMES_LEAD_BACK, ProblemCode.NAMES_DIFFER
    named = zip(codes, (unknown, inward, differing))
    return [Problem(code, node, {"names": shorten_names(names)}) for code, names in named if names]


def measure_clock_offset(sent: float, clock: float, received: float) -> ClockOffset:
    """Estimate how far a clock is ahead of the driver's: it was read between the driver's times."""
    return ClockOffset(clock - (sent + received) / 2, abs(received - sent) / 2)


def find_skewed_clocks(offsets: Mapping[str, ClockOffset]) -> Problems:
    """Find the nodes whose clocks are certainly too far from the median, with the driver's."""
    votes = sorted([ClockOffset(0.0, 0.0), *offsets.values()], key=lambda vote: vote.ahead)
    middle = votes[(len(votes) - 1) // 2], votes[len(votes) // 2]
    median = min(middle, key=lambda vote: abs(vote.ahead))
    problems = {}
    for node, offset in offsets.items():
        skew = offset.ahead - median.ahead
        uncertainty = offset.give_or_take + median.give_or_take
        if abs(skew) - uncertainty > SKEW_LIMIT:
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


def _find_expected_addresses(name: str, answers: Mapping[str, Addresses]) -> frozenset[str]:
    """Return the addresses of a name that most nodes find; its own node decides a tie."""
    lists = {node: _list_usable(names.get(name, ())) for node, names in answers.items()}
    by_node = {node: frozenset(addresses) for node, addresses in lists.items()}
    counts = Counter(addresses for addresses in by_node.values() if addresses)
    if not counts:
        return frozenset()
    return max(counts, key=lambda addresses: (counts[addresses], by_node.get(name) == addresses))


RESULT = "ALL-REDUCE "  # what trainer/network/all_reduce.py prints before its measurement

_ERROR = re.compile(r"(\[RANK \d+\] )?error: (.*)")
_LOST = re.compile(r"rank \d+ on \S+ lost the others: ")


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
        if line.startswith(RESULT):
            with contextlib.suppress(ValueError):
                return decode(AllReduceMeasured, json.loads(line[len(RESULT) :]), strict=False)
    return None


class _Report(NamedTuple):
    node: str
    text: str
    for_all: bool  # true if the rank reports it for all ranks, which all know it


def find_faulty_nodes(printed: Printed, answers: Mapping[str, LaunchAnswer]) -> Problems:
    """Return the nodes that are at fault when an all-reduce has failed.

    An error that all ranks know is reported by one of them for all. One that names several nodes is
    attributed to those that most errors name.
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
    return {first.node: [_make_problem(first.node, why.rstrip(": "))]}


def _select_reports(printed: Printed) -> list[_Report]:
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
    named = {report: _find_named_nodes(report.text, nodes) for report in reports}
    frequency = Counter(itertools.chain.from_iterable(named.values()))
    problems: Problems = {}
    for report, candidates in named.items():
        most = max((frequency[node] for node in candidates), default=0)
        faulty = [node for node in candidates if frequency[node] == most]
        for node in faulty or [report.node]:
            why = report.text.removeprefix(f"{node}: ")
            problems.setdefault(node, []).append(_make_problem(node, why))
    return {node: problems[node] for node in nodes if node in problems}


def _find_named_nodes(text: str, nodes: Sequence[str]) -> list[str]:
    """Return the nodes that an error is about, as in ``n1 and n2: no answer``."""
    words = re.findall(r"[^\s,()]+", text.partition(": ")[0])
    return [] if _LOST.match(text) else [node for node in nodes if node in words]


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
            ended[node] = [_make_problem(node, why)]
    return causes or silent or failed


def _make_problem(node: str, why: str) -> Problem:
    return Problem(ProblemCode.RANKS_CANNOT_TALK, node, {"why": why})
