"""Whether the nodes of a job see the same network: names, the way to the head, and the time.

Each node says what it sees (:func:`resolution`, :func:`connect`, its clock); what the answers mean
together is decided in one place, by functions of the answers alone. All answers are JSON values.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ..protocol.problem import NodeError, Problem
from ..system import network

SKEW_LIMIT = 2.0
"""Seconds by which clocks may differ before it is a problem: time limits and logs go by them."""

_LOOKUPS = 16  # at a time: a name server that does not answer takes seconds for each
_PATIENCE = 2.0
"""Seconds that the head waits for one peer's line; a peer sends it at once."""
_PAUSE = 0.2
_LINE = 512
_HOSTS = "add it to DNS, or to /etc/hosts on every node"


class Clock(NamedTuple):
    """A node's clock, and the driver's around it; seconds since the epoch."""

    sent: float
    """When the driver asked, by the driver's clock."""
    clock: float
    """What the node's clock said."""
    received: float
    """When the driver had the answer, by the driver's clock."""


class Offset(NamedTuple):
    """How far a clock is ahead of the driver's."""

    seconds: float
    """The best guess; negative for behind."""
    uncertainty: float
    """The truth is within so many seconds of it."""


def resolution(names: Iterable[str]) -> dict[str, list[str]]:
    """The addresses that this machine finds for each name; an empty list where it finds none."""
    every = list(dict.fromkeys(names))
    with ThreadPoolExecutor(max_workers=min(_LOOKUPS, len(every) or 1)) as pool:
        return dict(zip(every, pool.map(_addresses, every)))


def disagreements(answers: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, list[Problem]]:
    """What is wrong with how the nodes resolve each other's names.

    A node is at odds with the others where none of its addresses for a name, or only some besides
    others, are among those that most nodes find; to find more of them, or fewer, is no fault.

    Args:
        answers: for each node what :func:`resolution` returned there.

    Returns:
        The problems of each node that has any.
    """
    names = list(dict.fromkeys(name for said in answers.values() for name in said))
    expected = {name: _expected(name, answers) for name in names}
    found = {}
    for node, said in answers.items():
        unknown = [name for name in said if not said[name]]
        inward = [name for name in said if said[name] and network.is_loopback(said[name][0])]
        usable = {name: _usable(said[name]) for name in said}
        apart = [name for name in said if not _agree(usable[name], expected[name])]
        problems = []
        if unknown:
            what, why = "names of nodes cannot be resolved", f"no address for {_some(unknown)}"
            problems.append(Problem(what, node, why, _HOSTS))
        if inward:
            what = "names of nodes lead back to the node itself"
            why = _some(f"{name} is {said[name][0]}" for name in inward)
            fix = "take them off the loopback lines (127.0.1.1) of /etc/hosts there"
            problems.append(Problem(what, node, why, fix))
        if apart:
            what = "names of nodes lead elsewhere than from the other nodes"
            why = _some(
                f"{name} is {_some(usable[name])}, not {_some(sorted(expected[name]))}"
                for name in apart
            )
            problems.append(Problem(what, node, why, "correct /etc/hosts or the DNS cache there"))
        if problems:
            found[node] = problems
    return found


def await_nodes(
    address: str, port: int, job_id: str, nodes: Collection[str], timeout: float
) -> list[str]:
    """Listen on the head node until every other node has come, or the time is up.

    Args:
        address: the head's numeric address, on which it listens.
        port: the job's port there.
        job_id: the job's id; who does not name it does not count.
        nodes: who is expected, each with :func:`connect`.
        timeout: seconds.

    Returns:
        The nodes that did not come.

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
            with contextlib.suppress(OSError):  # it went away again, or nobody came
                peer, _ = listener.accept()
                with peer:
                    missing.pop(_welcome(peer, job_id, min(left, _PATIENCE)), None)
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
        Seconds that setting up the connection took.

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
                said = _line(peer)
        except OSError as exc:
            if time.monotonic() + _PAUSE < until:
                time.sleep(_PAUSE)
                continue
            raise NodeError(_unreached(f"{address}:{port}", exc, seconds, timeout)) from exc
        if said == f"stager {job_id}":
            return seconds
        why = f"another program listens there; it answered {said[:40]!r}"
        raise NodeError(_no_way(f"{address}:{port}", why, "end it, or start the job again"))


def offset(clock: Clock) -> Offset:
    """How far a node's clock is from the driver's: it was read between the driver's two times."""
    middle = (clock.sent + clock.received) / 2
    return Offset(clock.clock - middle, abs(clock.received - clock.sent) / 2)


def skewed(clocks: Mapping[str, Clock], limit: float = SKEW_LIMIT) -> dict[str, list[Problem]]:
    """Nodes whose clocks are certainly further than ``limit`` seconds from what most clocks say.

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
    usual = min(middle, key=lambda vote: abs(vote.seconds))
    found = {}
    for node, one in offsets.items():
        apart, unsure = one.seconds - usual.seconds, one.uncertainty + usual.uncertainty
        if abs(apart) - unsure > limit:
            way = "ahead of" if apart > 0 else "behind"
            why = f"it is {abs(apart):.1f} s {way} the others (give or take {unsure:.1f} s)"
            fix = "have its time service looked at (chronyc tracking), or exclude the node"
            found[node] = [Problem("the clock is wrong", node, why, fix)]
    return found


def _addresses(name: str) -> list[str]:
    try:
        return network.resolve(name)
    except NodeError:
        return []


def _usable(addresses: Iterable[str]) -> list[str]:
    """Addresses that mean the same on every node: neither loopback nor link-local."""
    return [
        one
        for one in addresses
        if not network.is_loopback(one)
        and not ipaddress.ip_address(one.partition("%")[0]).is_link_local
    ]


def _expected(name: str, answers: Mapping[str, Mapping[str, Sequence[str]]]) -> frozenset[str]:
    """The addresses of a name that most nodes find; of two equal halves its own node decides."""
    said = {node: frozenset(_usable(found.get(name, ()))) for node, found in answers.items()}
    counts = Counter(addresses for addresses in said.values() if addresses)
    if not counts:
        return frozenset()
    return max(counts, key=lambda addresses: (counts[addresses], said.get(name) == addresses))


def _agree(mine: Collection[str], expected: Collection[str]) -> bool:
    return not mine or set(mine) <= set(expected) or set(expected) <= set(mine)


def _welcome(peer: socket.socket, job_id: str, patience: float) -> str:
    """The name of the node that came; empty for a stranger."""
    peer.settimeout(patience)
    words = _line(peer).split(" ", 2)
    peer.sendall(f"stager {job_id}\n".encode())
    peer.recv(1)  # it hangs up first, so that its side and not this port waits out TIME_WAIT
    return words[2] if len(words) == 3 and words[:2] == ["stager", job_id] else ""


def _line(peer: socket.socket) -> str:
    """One line, without its end; what came of it where the other side ends, or sends too much."""
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
    return _no_way(where, why, fix)


def _no_way(where: str, why: str, fix: str) -> Problem:
    what = "the head node cannot be reached"
    return Problem(what, where, f"from {socket.gethostname()}: {why}", fix)


def _some(items: Iterable[str], most: int = 4) -> str:
    """The first few of many."""
    every = list(items)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
