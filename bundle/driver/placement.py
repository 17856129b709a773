"""Bringing the environment to the nodes: the plan, the sending, and a second try where it failed.

The agent makes a directory for the file in ``incoming/`` of the node root, and removes it whatever
happens: a block that comes late finds no place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ..checks.preflight import INCOMING_PREFIX
from ..format.archive import BundleFile, compute_file_digest
from ..node import removal
from ..protocol.enumerations import Allocation, PhaseName
from ..protocol.events import FileSent, PlannedGroup, StagingForecast, TransferPlan
from ..protocol.job import ASSUMED, Job
from ..protocol.messages import Answer, Incoming, RelayTask, UnpackAnswer, UnpackRequest
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import disk_problem
from . import plan as planning
from .findings import Names, group_nodes, shorten_names
from .forecast import forecast
from .plan import RELAY, SENT, NodeGroup, TransferRule
from .state import State
from .transports import slurm_text
from .transports.transport import Delivery, Transfer

_FAULTS = frozenset((errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT))  # of a file system


@contextlib.contextmanager
def convert_disk_errors() -> Iterator[None]:
    """Turn an error of a file system on this host into a problem of it, which is no node's."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _FAULTS:
            raise
        raise _error(exc) from exc


@contextlib.contextmanager
def make_scratch_dir() -> Iterator[str]:
    """Make a temporary directory, and remove it after the block; yield its path."""
    try:
        folder = tempfile.mkdtemp(prefix="stager-")
    except OSError as exc:
        raise _error(exc) from exc
    try:
        yield folder
    finally:
        removal.delete_as_far_as_possible(folder)


def _error(exc: OSError) -> NodeError:
    place = exc.filename or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - only named
    full, other = ProblemCode.HOST_DISK_FULL, ProblemCode.HOST_DISK_UNWRITABLE
    return NodeError(disk_problem(exc, str(place), full, other))


def make_and_emit_plan(state: State) -> None:
    """Make the plan, and report it; nodes that cannot be served have their problem noted."""
    job, manifest = state.job, None if state.bundle is None else state.bundle.manifest
    rates, sharing = job.rates or ASSUMED, state.transport.nodes_here
    rule = TransferRule(job.stage, job.transfer, _other_way(job))
    size = 0 if manifest is None else manifest.size
    plan, problems = planning.make_plan(state.facts, rule, manifest, size, rates, sharing)
    state.plan = plan
    nodes = planning.forecast_nodes(job.nodes, state.facts, sharing)
    expected = forecast(plan.staged, nodes, rates, launcher=job.launch.launcher)
    report = TransferPlan(
        why=plan.why,
        bytes=plan.bytes,
        groups=tuple(
            PlannedGroup(group.nodes, group.how, group.bytes, group.layers, group.work)
            for group in plan.groups
        ),
        cpus=nodes.cpus,
        forecast=StagingForecast(job.rates is not None, expected.to_json()),
    )
    state.emit(report)
    state.result = replace(state.result, plan=report)
    state.answers = {node: Answer(node) for node in job.nodes}
    for problem in problems.values():
        _fail_node(state, problem)
    state.leave_out_or_fail()


def execute_plan(state: State) -> None:
    """Do what was planned; ``state.answers`` then has every node's."""
    planned, kept = () if state.plan is None else state.plan.groups, set(state.job.nodes)
    groups = [
        group._replace(nodes=tuple(filter(kept.__contains__, group.nodes))) for group in planned
    ]

    def request(node: str) -> UnpackRequest:
        ready = state.facts[node].ready
        return UnpackRequest(*state.place(node), bundle=state.job.bundle, checked=ready)

    # Some nodes read the bundle where it is, or have the environment.
    direct = tuple(node for group in groups if group.how not in SENT for node in group.nodes)
    state.ask(PhaseName.UNPACK, request, nodes=direct)
    for number, group in enumerate(groups):
        if group.how in SENT and group.nodes and state.bundle is not None:
            _send_to_group(state, state.bundle, group, number)


def _send_to_group(state: State, bundle: BundleFile, group: NodeGroup, number: int) -> None:
    """Send a group its file; nodes that turn out to need more get the whole bundle."""
    thin = bundle if bundle.is_thin else None
    folder, size = f"{INCOMING_PREFIX}{state.job.id}.{number}", bundle.manifest.size
    whole = _Shipment(bundle.path, size, folder, relayed=group.how == RELAY, thin=thin)
    if group.members is None:
        _deliver(state, whole, group.nodes)
        return
    with make_scratch_dir() as scratch:
        source = os.path.join(scratch, "parts.tar")
        size = planning.write_excerpt(bundle, group.members, source)
        manifest = bundle.manifest.to_bytes().decode()
        part = whole._replace(source=source, size=size, manifest=manifest, thin=None)
        _deliver(state, part._replace(members=group.members), group.nodes)
    answers = state.get_answers(UnpackAnswer)
    lacking = tuple(node for node in group.nodes if node in answers and answers[node].lacking)
    if lacking:  # an older environment has gone meanwhile
        _deliver(state, whole, lacking)


def send_results(state: State, source: str) -> None:
    """Send earlier results to all nodes, which put them into the ranks' working directory."""
    _send_file(state, source, "results", state.job.nodes)
    state.leave_out_or_fail()


def send_code(state: State, source: str, kind: str, nodes: Names) -> dict[str, str]:
    """Send compiled code to nodes of a kind; return those that did not get it, and why."""
    _send_file(state, source, f"code.{kind}", nodes, code=kind)
    failed = state.find_failed()
    return {node: str(next(iter(answer.problems), "")) for node, answer in failed.items()}


def _send_file(state: State, source: str, name: str, nodes: Names, code: str = "") -> None:
    rule = TransferRule(way=state.job.transfer, without_relay=_other_way(state.job))
    relayed = planning.is_relayed(rule, {node: state.facts[node] for node in nodes})
    folder, size = f"{INCOMING_PREFIX}{state.job.id}.{name}", os.path.getsize(source)
    shipment = _Shipment(source, size, folder, relayed=relayed, results=not code, code=code)
    state.answers = {}
    _deliver(state, shipment, nodes)


class _Shipment(NamedTuple):
    source: str
    size: int
    folder: str  # the name of the directory that it goes to, in ``incoming/`` of each node root
    relayed: bool  # else ``sbcast`` or ``ssh`` brings it
    manifest: str | None = None  # the bundle's, where the file has only a part of it
    members: tuple[str, ...] = ()  # those that the file has, where it has only a part
    results: bool = False
    code: str = ""  # the kind of node that it is compiled code for
    thin: BundleFile | None = None  # of which ``source`` lacks the layers' frames

    @property
    def content(self) -> str:
        if self.code:
            return "compiled code"
        return "earlier results" if self.results else "the bundle"

    def make_target(self, root: str) -> str:
        return os.path.join(root, "incoming", self.folder, "bundle.tar")


def _deliver(state: State, shipment: _Shipment, nodes: Names) -> None:
    _deliver_in_any_way(state, shipment, nodes)
    damaged = _find_damaged_copies(state, shipment, nodes)
    if not damaged:
        return
    state.note(f"the copy was damaged on its way to {', '.join(damaged)}; sending it again")
    _deliver_in_any_way(state, shipment, damaged)
    for node in _find_damaged_copies(state, shipment, damaged):
        values = {"why": state.answers[node].problems[0].why}
        _fail_node(state, Problem(ProblemCode.COPY_DAMAGED_TWICE, node, values))


def _deliver_in_any_way(state: State, shipment: _Shipment, nodes: Names) -> None:
    """Send to all nodes, then to failed ones singly; by ``sbcast`` or ``ssh`` if a relay failed."""
    if shipment.relayed:
        nodes = _relay(state, shipment, nodes)
        shipment = shipment._replace(relayed=False)
    if not nodes:
        return
    with make_scratch_dir() if shipment.thin else contextlib.nullcontext("") as folder:
        if shipment.thin is not None:  # sbcast and ssh need one file
            source, members = os.path.join(folder, "bundle.tar"), shipment.thin.manifest.members()
            planning.write_excerpt(shipment.thin, [name for name, _ in members], source)
            shipment = shipment._replace(source=source, thin=None)
        for group in planning.group_by_root(nodes, state.facts):
            for node in _deliver_together(state, shipment, group):
                delivery = _deliver_once(state, shipment, (node,))
                if delivery.failed and node not in delivery.settled:
                    _note_not_sent(state, shipment, (node,), delivery.failed)


def _relay(state: State, shipment: _Shipment, nodes: Names) -> Names:
    delivery = _deliver_once(state, shipment, nodes)
    unreached: dict[str, str] = {}
    for node in nodes:
        answer = state.answers.get(node, Answer(lost=True))
        if answer.problems and answer.problems[0].code is ProblemCode.RELAY_NOT_STARTED:
            unreached[node] = answer.problems[0].why
        elif node in delivery.failed:
            unreached[node] = delivery.failed[node]
        elif "" in delivery.failed and node not in delivery.settled and answer.lost:
            unreached[node] = delivery.failed[""]
    for why, named in group_nodes(unreached.items()).items():
        said = f"the relay did not reach {shorten_names(named)} ({why})"
        state.note(f"{said}: using {_other_way(state.job)}", warning=True)
    return tuple(unreached)


def _other_way(job: Job) -> str:
    return planning.SSH if job.allocation is Allocation.SSH else planning.SBCAST


def _deliver_together(state: State, shipment: _Shipment, nodes: Names) -> list[str]:
    """Send to all, then retry without failed nodes (with all if Slurm names none); return these."""
    failed_nodes: list[str] = []
    unexplained = 0
    while nodes:
        delivery = _deliver_once(state, shipment, nodes)
        faults = delivery.failed
        if not faults:
            break
        left = _leave_out(nodes, delivery.settled)
        named = [node for node in left if node in faults]
        unexplained += not (named or delivery.settled)
        if unexplained > 1:
            _note_not_sent(state, shipment, left, faults)
            break
        failed_nodes += named
        nodes = _leave_out(left, named)
        if nodes and named:
            state.note(f"sending again, without {', '.join(failed_nodes)}")
    return failed_nodes


def _leave_out(nodes: Names, dropped: Collection[str]) -> Names:
    return tuple(node for node in nodes if node not in dropped)


def _find_damaged_copies(state: State, shipment: _Shipment, nodes: Names) -> Names:
    answers = state.get_answers(UnpackAnswer)
    arrived = {node: answers[node].arrived for node in nodes if node in answers}
    if not any(arrived.values()):
        return ()
    thin = shipment.thin
    sent = compute_file_digest(shipment.source) if thin is None else planning.digest_of_all(thin)
    return tuple(node for node, digest in arrived.items() if digest and digest != sent)


def _deliver_once(state: State, shipment: _Shipment, nodes: Names) -> Delivery:
    for node in nodes:
        state.answers.pop(node, None)
    attempts = state.sent_folders.count(shipment.folder)
    state.sent_folders.append(shipment.folder)
    if attempts:
        # Blocks of a sending that failed may still come to its own place, and spoil what is there.
        shipment = shipment._replace(folder=f"{shipment.folder}.{attempts}")
    token = secrets.token_hex(32) if shipment.relayed else ""
    target = shipment.make_target(state.facts[nodes[0]].root)
    transfer = Transfer(shipment.source, target, shipment.size, token, shipment.thin)

    def request(node: str) -> UnpackRequest:
        facts = state.facts[node]
        file = (shipment.manifest, shipment.members, shipment.size)
        relay = RelayTask(token, facts.address) if token else None
        place = shipment.make_target(facts.root)
        incoming = Incoming(place, *file, relay, shipment.results, shipment.code)
        return UnpackRequest(*state.place(node), incoming=incoming)

    delivery = state.deliver(transfer, nodes, request)
    for remark in delivery.remarks:
        state.note(remark, warning=True)
    _record_sending(state, shipment, delivery, nodes)
    return delivery


def _record_sending(state: State, shipment: _Shipment, delivery: Delivery, nodes: Names) -> None:
    # What is learnt of sending bundles comes from bundles only.
    if shipment.results or shipment.code or delivery.seconds is None:
        return
    if not delivery.failed or (shipment.relayed and delivery.failed.keys() < set(nodes)):
        state.bytes_sent += shipment.size
        seconds = round(delivery.seconds, 3)
        state.send_seconds = round((state.send_seconds or 0.0) + seconds, 3)
        state.emit(FileSent(shipment.size, seconds, shipment.relayed))


def _classify_fault(fault: str, answered: Iterable[Problem]) -> ProblemCode:
    if slurm_text.NETWORK_FAULT.search(fault):
        return ProblemCode.BUNDLE_NOT_SENT_NETWORK
    if any(told.code is ProblemCode.BUNDLE_NOT_ARRIVED_NO_ROOM for told in answered):
        return ProblemCode.BUNDLE_NOT_SENT_NO_ROOM
    return ProblemCode.BUNDLE_NOT_SENT


def _note_not_sent(
    state: State, shipment: _Shipment, nodes: Iterable[str], faults: dict[str, str]
) -> None:
    """Note a failed transfer; a node's agent sees a full disk, which Slurm hides."""
    way = _other_way(state.job)
    for node in nodes:
        fault = faults.get(node) or faults.get("") or "it failed on another node, see there"
        answered = state.answers.get(node, Answer()).problems[:1]
        code = _classify_fault(fault, answered)
        values = {
            "file": shipment.content,
            "why": "; ".join(filter(None, [fault, *(told.why for told in answered)])),
            "way": way,
            "check": f"ssh {node} true" if way == planning.SSH else f"sinfo -N -n {node}",
            "incoming": os.path.join(state.facts[node].root, "incoming"),
        }
        values = {name: values[name] for name in values if name in code.names}
        _fail_node(state, Problem(code, node, values))


def _fail_node(state: State, problem: Problem) -> None:
    state.answers[problem.where] = UnpackAnswer(problem.where, ok=False, problems=(problem,))
