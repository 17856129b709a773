"""The network as one node sees it: the addresses of names, and reaching the head node.

The answers of all nodes are compared in :mod:`bundle.checks.network_agreement`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import network
from ..system.files import error_text

_LOOKUPS = 16  # at a time: a name server that does not answer takes seconds for each
_PATIENCE = 2.0
"""Seconds that the head waits for one peer's line; a peer sends it at once."""
_PAUSE = 0.2
_LINE = 512


def resolution(names: Iterable[str]) -> dict[str, list[str]]:
    """Look up the addresses of each name on this machine; an empty list for an unknown name."""
    distinct = list(dict.fromkeys(names))
    with ThreadPoolExecutor(max_workers=min(_LOOKUPS, len(distinct) or 1)) as pool:
        return dict(zip(distinct, pool.map(_addresses, distinct)))


def await_nodes(
    address: str, port: int, job_id: str, nodes: Collection[str], timeout: float
) -> list[str]:
    """Listen on the head node until every other node has connected, or the time is up.

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
        values = {"why": error_text(exc)}
        where = f"{address}:{port}"
        raise NodeError(Problem(ProblemCode.HEAD_PORT_TAKEN, where, values)) from exc
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
            if not reply and time.monotonic() + _PAUSE < until:
                # The head hangs up on a peer whose line is late: this node may have stood still.
                time.sleep(_PAUSE)
                continue
        except OSError as exc:
            if time.monotonic() + _PAUSE < until:
                time.sleep(_PAUSE)
                continue
            raise NodeError(_unreached(f"{address}:{port}", exc, seconds, timeout)) from exc
        if reply == f"stager {job_id}":
            return seconds
        values = {"host": socket.gethostname(), "answer": repr(reply[:40])}
        raise NodeError(Problem(ProblemCode.HEAD_IS_ANOTHER, f"{address}:{port}", values))


def _addresses(name: str) -> list[str]:
    try:
        return network.resolve(name)
    except NodeError:
        return []


def _greet(peer: socket.socket, job_id: str, patience: float) -> str:
    """Return the name of the connected node; empty for a peer that does not name the job."""
    peer.settimeout(patience)
    words = _line(peer).split(" ", 2)
    peer.sendall(f"stager {job_id}\n".encode())
    # It hangs up first, so that its side and not this port waits out TIME_WAIT. One that stands
    # still before it does has come all the same.
    with contextlib.suppress(OSError):
        peer.recv(1)
    return words[2] if len(words) == 3 and words[:2] == ["stager", job_id] else ""


def _line(peer: socket.socket) -> str:
    """Read one line without its end; the peer may close early, or send too much."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LINE:
        more = peer.recv(_LINE)
        if not more:
            break
        data += more
    return data.decode(errors="replace").rstrip("\n")


def _unreached(where: str, exc: OSError, connected: float, timeout: float) -> Problem:
    host, seconds = socket.gethostname(), f"{timeout:g}"
    if connected >= 0:
        return Problem(ProblemCode.HEAD_MUTE, where, {"host": host, "seconds": seconds})
    if isinstance(exc, ConnectionRefusedError):
        return Problem(ProblemCode.HEAD_REFUSES, where, {"host": host, "seconds": seconds})
    if isinstance(exc, socket.timeout):
        return Problem(ProblemCode.HEAD_SILENT, where, {"host": host, "seconds": seconds})
    return Problem(ProblemCode.HEAD_UNREACHED, where, {"host": host, "why": error_text(exc)})
