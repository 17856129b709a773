"""One node's part in ``verify --deep``: its clock, the way to the head, the names, every file.

What is found is answered as findings, and the agent ends well: only all answers together tell which
node is at fault (:mod:`bundle.checks.findings`), and no node's fault shall end what another one
is at.
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
from ..protocol.problem import NodeError, Problem
from . import deep, network_agreement

REACH_SECONDS = 20.0
"""How long the head listens, and the others try: the tasks of a step do not start at one moment."""
_MADE_ANEW = "it has been taken away there: the next `stager verify` or `stager run` makes it anew"


def check(job: Job, hearing: AgentChannel) -> dict[str, Any]:
    """Look closely at this node.

    The request has ``root``, and between real nodes ``head`` (the address and the port of the head
    node) and ``names`` (what the driver finds for each node's name). First comes one event
    ``clock``; the answer has ``damage`` (problems of the environment), ``torch`` (whether ranks can
    be started), and between real nodes ``network`` as :func:`_network` returns it.
    """
    hearing.emit({"event": "clock", "clock": time.time()})
    request = hearing.request
    answer: dict[str, Any] = {}
    if request.get("head"):
        answer["network"] = _network(job, request)
    path = unpack.env_path(str(request["root"]), job.bundle_id)
    answer["torch"] = os.path.isdir(os.path.join(path, "pkgs", "torch", "distributed"))
    found = _damage(job, request, path)
    return {**answer, "damage": [problem.to_json() for problem in found]}


def _network(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """How this node sees the others.

    Returns:
        ``differs``, the names for which it finds other addresses than the driver; on the head
        ``missing``, the nodes that did not come, elsewhere ``seconds`` that connecting took; or
        ``problem``, why there is neither.
    """
    address, port = str(request["head"][0]), int(request["head"][1])
    node = str(request["node"])
    answer: dict[str, Any]
    try:
        if node == job.nodes[0]:
            others = job.nodes[1:]
            missing = network_agreement.await_nodes(address, port, job.id, others, REACH_SECONDS)
            answer = {"missing": missing}
        else:
            took = network_agreement.connect(address, port, job.id, node, REACH_SECONDS)
            answer = {"seconds": round(took, 6)}
    except NodeError as exc:
        answer = {"problem": exc.problem.to_json()}
    said: Mapping[str, list[str]] = request["names"]
    found = network_agreement.resolution(said)
    return {**answer, "differs": {name: found[name] for name in said if found[name] != said[name]}}


def _damage(job: Job, request: Mapping[str, Any], path: str) -> list[Problem]:
    """What is not as it was built; a damaged environment does not stay."""
    cpus = int(str(host.host_facts()["cpus"]))
    try:
        found = deep.damaged_files(path, max(1, cpus // int(request["nodes_here"])))
    except NodeError as exc:
        return [exc.problem]
    if not found:
        return []
    try:
        deep.discard(str(request["root"]), job.bundle_id)
    except NodeError as exc:
        return [*found, exc.problem]
    return [replace(problem, fix=_MADE_ANEW) for problem in found]
