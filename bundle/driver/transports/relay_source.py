"""The driver's part in a relay: it is the source of the file, and tells each node its places."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import random
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ...channel import agent_channel
from ...format.archive import compute_file_digest
from ...protocol.codec import encode
from ...protocol.counts import format_count, format_size
from ...protocol.enumerations import PhaseName
from ...protocol.events import Remark
from ...protocol.messages import RELAY_SOURCE, Ready, Relayed, RelayStart
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...system import processes
from ...system.files import error_text
from ...transfer import relay_chunks
from ...transfer.relay import BACKLOG, MAX_SOURCE_CONNECTIONS
from ...transfer.relay_chunks import ChunkFile
from ...transfer.relay_peers import RelayCandidates, RelayPlace, compute_node_key
from ...transfer.relay_process import RelayProcess
from ..findings import Names, shorten_names
from ..plan import digest_of_all
from .agent_program import pack_message
from .phase_run import SECONDS, PhaseAnswers, PhaseRun
from .transport import OnEvent, Transfer

_BEFORE_SOURCE = 3  # ancestors that are tried first; behind a firewall each costs a time-out


def order_candidates(position: int, nodes: int, tree: int) -> tuple[int, ...]:
    """Return the positions that a node may take the chunks of tree 0 or 1 from, best first."""
    *above, source = relay_chunks.list_ancestors(position, nodes, tree)
    return (*above[:_BEFORE_SOURCE], source, *above[_BEFORE_SOURCE:])


def find_candidates(position: int, places: Sequence[RelayPlace]) -> RelayCandidates:
    """Return what the node at a position must know."""
    nodes = len(places) - 1
    by_tree = tuple(order_candidates(position, nodes, tree) for tree in range(relay_chunks.TREES))
    wanted = sorted({candidate for chain in by_tree for candidate in chain})
    return RelayCandidates(position, by_tree, tuple(places[candidate] for candidate in wanted))


class RelayDirectory:
    """The source's answers to nodes that ask for their places; each is made when it is asked."""

    def __init__(self, places: Sequence[RelayPlace]) -> None:
        self._places = places
        self._encoded = functools.lru_cache(maxsize=None)(encode)  # those far up are sent often
        self._positions = {compute_node_key(place.name): place.position for place in places[1:]}

    def __call__(self, key: int) -> bytes | None:
        """Return the answer to the node with a key; None if it takes no part."""
        position = self._positions.get(key)
        if position is None:
            return None
        candidates = find_candidates(position, self._places)
        own = encode(candidates, omit=("places",))
        places = [self._encoded(place) for place in candidates.places]
        return zlib.compress(json.dumps({**own, "places": places}).encode())


SPARE_NODES = MAX_SOURCE_CONNECTIONS // relay_chunks.TREES - 1
"""Nodes that the source can send to besides those at the top of the trees."""


def find_obstacle(nodes: int, out_of_reach: Mapping[str, Mapping[str, str]]) -> str:
    """Return why most of so many nodes cannot take part in a relay; empty while they can."""
    without_source = [node for node, others in out_of_reach.items() if RELAY_SOURCE in others]
    if 2 * len(without_source) > nodes:
        node = without_source[-1]
        why = out_of_reach[node][RELAY_SOURCE]
        return f"nodes cannot connect to this host, for example {node}: {why}"
    without_parent = [
        node for node, others in out_of_reach.items() if others.keys() - {RELAY_SOURCE}
    ]
    if len(without_parent) > max(nodes // 2, SPARE_NODES):
        node = without_parent[-1]
        other, why = next(item for item in out_of_reach[node].items() if item[0] != RELAY_SOURCE)
        return f"most nodes cannot connect to others, for example {node} to {other}: {why}"
    return ""


_SENDERS = 2  # senders that fail one node, and no other, for it to be the node that is at fault


def describe_damage(relayed: Mapping[str, Relayed]) -> list[str]:
    """Return a line for each node that damages what it receives, or has sent damaged bytes.

    A node reports the senders of damaged chunks. Its own faulty memory or network card looks the
    same to it, but then several senders fail it, and each serves others well.
    """
    senders = {node: tuple(dict.fromkeys(report.corrupt)) for node, report in relayed.items()}
    # A node that several senders failed may be at fault itself: it is no witness against them.
    few = [failed for failed in senders.values() if len(failed) < _SENDERS]
    blamed = {*itertools.chain.from_iterable(few)}
    receivers: list[str] = []
    lines: list[str] = []
    for node, failed in senders.items():
        sound = [sender for sender in failed if sender not in blamed]
        if len(sound) >= _SENDERS:
            receivers.append(
                f"{node} damages what it receives: data from {shorten_names(sound)} "
                "arrived damaged there, and nowhere else; check its memory and its network card"
            )
            continue
        end = "" if relayed[node].failure else ", which took them from another node"
        lines += [f"{sender} sent damaged bytes to {node}{end}" for sender in failed]
    return [*receivers, *lines]


_SLOW_SHARE = 3.0  # a node is slow if its file took so many times as long as the others'
_SLOW_SECONDS = 6.0  # and so many seconds more: as long as it may wait for a silent parent
_MOST_REMARKS = 8  # lines of one kind


def describe_transfer(answers: PhaseAnswers, size: int) -> tuple[str, ...]:
    """Return lines about nodes that were slow, damaged bytes, or could not connect to others."""
    apart = [
        f"{node} cannot connect to {other} ({why}), and took the file from another node"
        for node, others in answers.out_of_reach.items()
        for other, why in others.items()
        if node in answers.relayed and not answers.relayed[node].failure
    ]
    slow, damage = _describe_slow_nodes(answers.relayed, size), describe_damage(answers.relayed)
    return tuple(line for lines in (slow, damage, apart) for line in _limit_lines(lines))


def _describe_slow_nodes(relayed: Mapping[str, Relayed], size: int) -> list[str]:
    seconds = {node: report.seconds for node, report in relayed.items() if not report.failure}
    others = len(seconds) - 1
    if others < 1:
        return []
    ordered = sorted(seconds.values())
    # The median of the others, for a node that is slower than it.
    usual = (ordered[(others - 1) // 2] + ordered[others // 2]) / 2
    limit = max(_SLOW_SHARE * usual, usual + _SLOW_SECONDS)
    rate = format_size(int(size / max(usual, 0.001)))
    return [
        f"{node} is slow: it received {format_size(int(size / taken))}/s, the median of the others "
        f"is {rate}/s"
        for node, taken in seconds.items()
        if taken > limit
    ]


def _limit_lines(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_REMARKS
    end = [f"... and {format_count(more, 'more line')}"] if more > 0 else []
    return [*lines[:_MOST_REMARKS], *end]


def await_relay(
    run: PhaseRun, nodes: Collection[str], check_source: Callable[[], object], deadline: float
) -> dict[str, str]:
    """Wait until every node has the file, has failed, or is lost; return why nodes failed.

    It ends at once where this host would have to send to most nodes; ``check_source`` may raise.
    """
    awaited, answers, why = set(nodes), run.answers, ""
    while awaited and not why and time.monotonic() < deadline:
        active = run.receive_events(awaited)
        awaited.difference_update({*active} & answers.relayed.keys())
        awaited.difference_update({*active} & answers.answered.keys())
        if not answers.out_of_reach.keys().isdisjoint(active):
            why = find_obstacle(len(nodes), answers.out_of_reach)
        if awaited and not active:  # else an answer may be among what is still to be read
            check_source()
    failed = {node: report.failure for node, report in answers.relayed.items() if report.failure}
    return {**failed, **dict.fromkeys(awaited, why or "it did not finish in time")}


STILL_SECONDS = 10.0  # without a round of a source's loop; nodes give it up after a minute


class _SourceWatch:
    def __init__(self, source: RelayProcess, on_event: OnEvent, transfer: Transfer) -> None:
        self._source, self._on_event, self._transfer = source, on_event, transfer
        self._told = False

    def check(self) -> None:
        task = None if self._told else self._read_still_task()
        if task is not None:
            self._told = True
            text = (
                f"the process on {os.uname().nodename} that sends the bundle has stood still for "
                f"{STILL_SECONDS:g} s: {task}; the nodes wait for it, for a minute at most"
            )
            self._on_event(Remark(text, warning=True))
        why = self._source.find_source_failure()
        if why:
            raise _source_error(ProblemCode.RELAY_SOURCE_ENDED, self._transfer, why)

    def find_hang(self) -> str:
        """Return what the source hangs in; empty if it makes progress, or was merely stopped."""
        task = self._read_still_task()
        return "" if task is None or task.state in "Tt" else str(task)

    def _read_still_task(self) -> processes.TaskState | None:
        still = self._source.measure_stillness() >= STILL_SECONDS
        return processes.read_task_state(self._source.pid) if still else None


def send(
    transfer: Transfer, run: PhaseRun, ports: range | None = None
) -> tuple[dict[str, str], float]:
    """Let agents take a file from here and each other; return the failures and the seconds."""
    deadline = time.monotonic() + SECONDS[PhaseName.UNPACK]
    late, answers = run.await_ready(deadline), run.answers
    nodes = order_by_switches(answers.nodes, answers.ready)
    started = time.monotonic()
    failed = _relay(transfer, run, nodes, ports, deadline) if nodes else {}
    run.step.send_line(agent_channel.GO)
    run.give_up_late(late)
    why = f"it began to listen more than {run.patience():g} s after the others"
    failed.update(dict.fromkeys(sorted(late & answers.ready.keys()), why))
    in_order = {node: failed[node] for node in answers.nodes if node in failed}
    return in_order, time.monotonic() - started


def order_by_switches(nodes: Iterable[str], listening: Mapping[str, Ready]) -> tuple[str, ...]:
    """Return the nodes that listen; those below one switch, if Slurm knows it, are neighbours."""
    there = [node for node in nodes if node in listening]
    return tuple(sorted(there, key=lambda node: listening[node].switches.split(".")))


def _relay(
    transfer: Transfer, run: PhaseRun, nodes: Names, ports: range | None, deadline: float
) -> dict[str, str]:
    with contextlib.ExitStack() as resources:
        file = resources.enter_context(_open_file(transfer))
        try:
            listener = resources.enter_context(contextlib.closing(listen(ports)))
            port = int(listener.getsockname()[1])
            places = [RelayPlace(relay_chunks.SOURCE, RELAY_SOURCE, "", port)]
            for position, node in enumerate(nodes, 1):
                ready = run.answers.ready[node]
                places.append(RelayPlace(position, node, ready.address, ready.port))
            token = bytes.fromhex(transfer.token)
            source = RelayProcess(file, token, listener, RelayDirectory(places))
        except OSError as exc:
            why = f"{os.uname().nodename} cannot be its source: {error_text(exc)}"
            return dict.fromkeys(nodes, why)
        resources.enter_context(contextlib.closing(source))
        source.begin(None)
        left_out = tuple(sorted(run.answers.nodes - set(nodes)))
        start = RelayStart(port, len(nodes), left_out)
        run.step.send_line(agent_channel.RELAY + pack_message(start))
        resources.enter_context(run.step.watch_process(source))
        watch = _SourceWatch(source, run.liveness.take, transfer)
        failed = await_relay(run, nodes, watch.check, deadline)
        hang = watch.find_hang()
    reports = run.answers.relayed
    if reports and all(report.failure for report in reports.values()):
        if hang:  # to read the file here, or to send it by sbcast, would hang as well
            raise _source_error(ProblemCode.RELAY_SOURCE_HANGS, transfer, hang)
        _refuse_unreadable(transfer)
    return failed


@contextlib.contextmanager
def _open_file(transfer: Transfer) -> Iterator[ChunkFile]:
    if transfer.bundle is not None:
        yield ChunkFile(-1, transfer.size, complete=True, locate=transfer.bundle.locate)
        return
    try:
        file = open(transfer.source, "rb", buffering=0)  # noqa: SIM115 - closed below
    except OSError as exc:
        raise _source_error(ProblemCode.BUNDLE_UNREADABLE, transfer, error_text(exc)) from exc
    with file:
        yield ChunkFile(file.fileno(), transfer.size, complete=True)


def _source_error(code: ProblemCode, transfer: Transfer, why: str) -> NodeError:
    values = {"host": os.uname().nodename, "why": why}
    return NodeError(Problem(code, transfer.source, {name: values[name] for name in code.names}))


def _refuse_unreadable(transfer: Transfer) -> None:
    if transfer.bundle is not None:
        digest_of_all(transfer.bundle)
        return
    compute_file_digest(transfer.source)
    size = os.path.getsize(transfer.source)
    if size < transfer.size:
        why = f"it has become shorter: {size} of {transfer.size} bytes are left"
        raise _source_error(ProblemCode.BUNDLE_UNREADABLE, transfer, why)


def listen(ports: range | None) -> socket.socket:
    """Listen on all addresses of this host, IPv4 and IPv6, on any port or one of these."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    candidates = random.sample(ports, len(ports)) if ports else [0]
    for port in candidates:
        try:
            listener = socket.create_server(
                ("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
        else:
            listener.setblocking(False)
            return listener
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
