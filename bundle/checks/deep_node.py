"""One node's part in ``verify --deep``: its clock, reaching the head, the names, every file.

Faults are reported in the answer, and the agent ends well: only the answers of all nodes tell which
one is at fault (:mod:`bundle.checks.findings`), and a fault of one node must not end the check of
another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..channel.agent_channel import AgentChannel
from ..environment import unpack
from ..node import host
from ..protocol.job import Job
from ..protocol.problem import NodeError, Problem, ProblemCode
from . import deep, reachability

REACH_SECONDS = 20.0
"""Seconds that the head listens, and the others try: a step's tasks do not start all at once."""


def check(job: Job, channel: AgentChannel) -> dict[str, Any]:
    """Check this node thoroughly.

    The request has ``root``, and between real nodes ``head`` (the address and the port of the head
    node) and ``names`` (the addresses that the driver finds for each node's name). One event
    ``clock`` is sent first; the answer has ``damage`` (problems of the environment), ``torch``
    (true if ranks can be started), and between real nodes ``network``, see :func:`_network`.
    """
    channel.emit({"event": "clock", "clock": time.time()})
    request = channel.request
    answer: dict[str, Any] = {}
    if request.get("head"):
        answer["network"] = _network(job, request)
    path = unpack.env_path(str(request["root"]), job.bundle_id)
    answer["torch"] = os.path.isdir(os.path.join(path, "pkgs", "torch", "distributed"))
    answer["damage"] = [problem.to_json() for problem in _damage(job, request, path)]
    return answer


def _network(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """Check how this node reaches the head and resolves the names of the nodes.

    Returns:
        ``differs``, the names for which it finds other addresses than the driver; on the head
        ``missing``, the nodes that did not connect, elsewhere ``seconds`` that connecting took; or
        ``problem``, why there is neither.
    """
    answer: dict[str, Any]
    try:
        answer = _meet(job, request)
    except NodeError as exc:
        answer = {"problem": exc.problem.to_json()}
    expected: Mapping[str, list[str]] = request["names"]
    resolved = reachability.resolution(expected)
    answer["differs"] = {
        name: resolved[name] for name in expected if resolved[name] != expected[name]
    }
    return answer


def _meet(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """Listen on the head for all other nodes; connect to it from any other."""
    address, port = str(request["head"][0]), int(request["head"][1])
    node = str(request["node"])
    if node == job.nodes[0]:
        others = job.nodes[1:]
        missing = reachability.await_nodes(address, port, job.id, others, REACH_SECONDS)
        return {"missing": missing}
    seconds = reachability.connect(address, port, job.id, node, REACH_SECONDS)
    return {"seconds": round(seconds, 6)}


def _damage(job: Job, request: Mapping[str, Any], path: str) -> list[Problem]:
    """Return the damage to the environment; remove the environment if there is any."""
    cpus = int(str(host.host_facts()["cpus"]))
    try:
        problems = deep.damaged_files(path, max(1, cpus // int(request["nodes_here"])))
    except NodeError as exc:
        return [exc.problem]
    if not problems:
        return []
    try:
        deep.discard(str(request["root"]), job.bundle_id)
    except NodeError as exc:
        return [*problems, exc.problem]
    return [replace(problem, code=ProblemCode.ENVIRONMENT_TAKEN_AWAY) for problem in problems]
