"""Agreement of a job's nodes about the network: names, reaching the head node, and the time.

Each node reports what it observes (:func:`resolution`, :func:`connect`, its clock); the answers of
all nodes are compared in one place, by functions of the answers alone. All answers are JSON values.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ..protocol.problem import NodeError, Problem
from ..system import network

SKEW_LIMIT = 2.0
"""Seconds by which clocks may differ before it is a problem: time limits and logs rely on them."""

_LOOKUPS = 16  # at a time: a name server that does not answer takes seconds for each
_PATIENCE = 2.0
"""Seconds that the head waits for one peer's line; a peer sends it at once."""
_PAUSE = 0.2
_LINE = 512
_HOSTS = "add it to DNS, or to /etc/hosts on every node"


class Clock(NamedTuple):
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


def resolution(names: Iterable[str]) -> dict[str, list[str]]:
    """Look up the addresses of each name on this machine; an empty list for an unknown name."""
    distinct = list(dict.fromkeys(names))
    with ThreadPoolExecutor(max_workers=min(_LOOKUPS, len(distinct) or 1)) as pool:
        return dict(zip(distinct, pool.map(_addresses, distinct)))


def disagreements(answers: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, list[Problem]]:
    """Return the problems with the nodes' resolution of each other's names.

    A node disagrees with the others if none of its addresses for a name, or only some of them
    besides others, are among those that most nodes find; a node may find more of them, or fewer.

    Args:
        answers: for each node the result of :func:`resolution` there.

    Returns:
        The problems of each node that has any.
    """
    names = list(dict.fromkeys(name for resolved in answers.values() for name in resolved))
    expected = {name: _expected(name, answers) for name in names}
    all_problems = {}
    for node, resolved in answers.items():
        problems = [
            *_unknown_names(node, resolved),
            *_loopback_names(node, resolved),
            *_differing_names(node, resolved, expected),
        ]
        if problems:
            all_problems[node] = problems
    return all_problems


def _unknown_names(node: str, resolved: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    unknown = [name for name, addresses in resolved.items() if not addresses]
    if unknown:
        what, why = "names of nodes cannot be resolved", f"no address for {_some(unknown)}"
        yield Problem(what, node, why, _HOSTS)


def _loopback_names(node: str, resolved: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    firsts = {name: addresses[0] for name, addresses in resolved.items() if addresses}
    inward = [f"{name} is {first}" for name, first in firsts.items() if network.is_loopback(first)]
    if inward:
        what = "names of nodes lead back to the node itself"
        fix = "take them off the loopback lines (127.0.1.1) of /etc/hosts there"
        yield Problem(what, node, _some(inward), fix)


def _differing_names(
    node: str, resolved: Mapping[str, Sequence[str]], expected: Mapping[str, Collection[str]]
) -> Iterator[Problem]:
    differing = []
    for name, addresses in resolved.items():
        usable = _usable(addresses)
        if not _agree(usable, expected[name]):
            differing.append(f"{name} is {_some(usable)}, not {_some(sorted(expected[name]))}")
    if differing:
        what = "names of nodes lead elsewhere than from the other nodes"
        yield Problem(what, node, _some(differing), "correct /etc/hosts or the DNS cache there")


def await_nodes(
    address: str, port: int, job_id: str, nodes: Collection[str], timeout: float
) -> list[str]:
    """Listen on the head node until every other node has connected, or the time is up.

    Args:
        address: the head's numeric address, on which it listens.
        port: the job's port there.
        job_id: the job's id; a connection that does not name it does not count.
        nodes: the nodes that are expected, each with :func:`connect`.
        timeout: seconds.

    Returns:
        The nodes that did not connect.

    Raises:
        NodeError: the port cannot be listened on.
    """
    until = time.monotonic() + timeout
    missing = dict.fromkeys(nodes)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=len(nodes) + 16)
    except OSError as exc:
        what, why = "the head node cannot listen on the job's port", exc.strerror or str(exc)
        fix = "end what is left of earlier jobs on this node; `ss -tlnp` there names it"
        raise NodeError(Problem(what, f"{address}:{port}", why, fix)) from exc
    with listener:
        while missing:
            left = until - time.monotonic()
            if left <= 0:
                break
            listener.settimeout(left)
            with contextlib.suppress(OSError):  # the peer hung up, or nobody connected
                peer, _ = listener.accept()
                with peer:
                    missing.pop(_greet(peer, job_id, min(left, _PATIENCE)), None)
    return list(missing)


def connect(address: str, port: int, job_id: str, node: str, timeout: float) -> float:
    """Connect from this node to the head, which listens with :func:`await_nodes`.

    The head may begin to listen later than this node begins to try.

    Args:
        address: the head's numeric address.
        port: the job's port there.
        job_id: the job's id.
        node: this node's name.
        timeout: seconds.

    Returns:
        Seconds that it took to set up the connection.

    Raises:
        NodeError: the head cannot be reached, or something else listens there.
    """
    until = time.monotonic() + timeout
    while True:
        left = max(until - time.monotonic(), 0.01)
        seconds = -1.0
        try:
            started = time.monotonic()
            with socket.create_connection((address, port), timeout=left) as peer:
                seconds = time.monotonic() - started
                peer.sendall(f"stager {job_id} {node}\n".encode())
                reply = _line(peer)
        except OSError as exc:
            if time.monotonic() + _PAUSE < until:
                time.sleep(_PAUSE)
                continue
            raise NodeError(_unreached(f"{address}:{port}", exc, seconds, timeout)) from exc
        if reply == f"stager {job_id}":
            return seconds
        why = f"another program listens there; it answered {reply[:40]!r}"
        raise NodeError(
            _cannot_reach_head(f"{address}:{port}", why, "end it, or start the job again")
        )


def offset(clock: Clock) -> Offset:
    """Estimate a clock's offset: it was read between the driver's two times."""
    middle = (clock.sent + clock.received) / 2
    return Offset(clock.clock - middle, abs(clock.received - clock.sent) / 2)


def skewed(clocks: Mapping[str, Clock], limit: float = SKEW_LIMIT) -> dict[str, list[Problem]]:
    """Find the nodes whose clocks are certainly more than ``limit`` seconds from most clocks.

    The driver's clock has one vote as well, and decides between two equal halves.

    Args:
        clocks: each node's clock, for example from ``host_facts()["clock"]`` of its preflight.
        limit: seconds.

    Returns:
        The problems of each node that has any.
    """
    offsets = {node: offset(clock) for node, clock in clocks.items()}
    votes = sorted([Offset(0.0, 0.0), *offsets.values()])
    middle = votes[(len(votes) - 1) // 2], votes[len(votes) // 2]
    median = min(middle, key=lambda vote: abs(vote.seconds))
    problems = {}
    for node, offset_here in offsets.items():
        skew = offset_here.seconds - median.seconds
        uncertainty = offset_here.uncertainty + median.uncertainty
        if abs(skew) - uncertainty > limit:
            side = "ahead of" if skew > 0 else "behind"
            why = f"it is {abs(skew):.1f} s {side} the others (give or take {uncertainty:.1f} s)"
            fix = "have its time service looked at (chronyc tracking), or exclude the node"
            problems[node] = [Problem("the clock is wrong", node, why, fix)]
    return problems


def _addresses(name: str) -> list[str]:
    try:
        return network.resolve(name)
    except NodeError:
        return []


def _usable(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that mean the same on every node: not loopback, not link-local."""
    usable = []
    for address in addresses:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if not network.is_loopback(address) and not parsed.is_link_local:
            usable.append(address)
    return usable


def _expected(name: str, answers: Mapping[str, Mapping[str, Sequence[str]]]) -> frozenset[str]:
    """Return the addresses of a name that most nodes find; its own node decides a tie."""
    by_node = {node: frozenset(_usable(names.get(name, ()))) for node, names in answers.items()}
    counts = Counter(addresses for addresses in by_node.values() if addresses)
    if not counts:
        return frozenset()
    return max(counts, key=lambda addresses: (counts[addresses], by_node.get(name) == addresses))


def _agree(mine: Collection[str], expected: Collection[str]) -> bool:
    return not mine or set(mine) <= set(expected) or set(expected) <= set(mine)


def _greet(peer: socket.socket, job_id: str, patience: float) -> str:
    """Return the name of the node that has connected; empty for a stranger."""
    peer.settimeout(patience)
    words = _line(peer).split(" ", 2)
    peer.sendall(f"stager {job_id}\n".encode())
    peer.recv(1)  # it hangs up first, so that its side and not this port waits out TIME_WAIT
    return words[2] if len(words) == 3 and words[:2] == ["stager", job_id] else ""


def _line(peer: socket.socket) -> str:
    """Read one line, without its end; the peer may close, or send too much, before it is whole."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LINE:
        more = peer.recv(_LINE)
        if not more:
            break
        data += more
    return data.decode(errors="replace").rstrip("\n")


def _unreached(where: str, exc: OSError, connected: float, timeout: float) -> Problem:
    if connected >= 0:
        why = f"the connection stands, but in {timeout:g} s nobody answered"
        fix = "another program may listen on that port: end it, or start the job again"
    elif isinstance(exc, ConnectionRefusedError):
        why = f"refused for {timeout:g} s: nobody listens there, or a firewall refuses"
        fix = "see whether the head node still runs, and what its firewall refuses"
    elif isinstance(exc, socket.timeout):
        why = f"no answer within {timeout:g} s, as when a firewall drops what is sent"
        fix = "let the nodes reach one another on ports 61000 to 65535, or name the interface "
        fix += "with [launch] interface in stager.toml"
    else:
        why = exc.strerror or str(exc)
        fix = "check that the nodes share a network; name the interface with [launch] interface"
    return _cannot_reach_head(where, why, fix)


def _cannot_reach_head(where: str, why: str, fix: str) -> Problem:
    what = "the head node cannot be reached"
    return Problem(what, where, f"from {socket.gethostname()}: {why}", fix)


def _some(items: Iterable[str], most: int = 4) -> str:
    """List the first few, and how many more there are."""
    listed = list(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
