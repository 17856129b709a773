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

from ..channel.agent_channel import AgentChannel
from ..node import machine
from ..node.node_root import env_path
from ..protocol.messages import DeepRequest
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..protocol.reports import DeepAnswer, NetworkReport, NodeClock
from . import deep, reachability

REACH_SECONDS = 20.0
"""Seconds that the head listens, and the others try: a step's tasks do not start all at once."""


def check(request: DeepRequest, channel: AgentChannel) -> DeepAnswer:
    """Check this node thoroughly; its clock is sent first."""
    channel.emit(NodeClock(clock=time.time()))
    network = None if request.head is None else _network(request, *request.head)
    path = env_path(request.root, request.job.bundle_id)
    return DeepAnswer(
        network=network,
        torch=os.path.isdir(os.path.join(path, "pkgs", "torch", "distributed")),
        damage=tuple(_damage(request, path)),
    )


def _network(request: DeepRequest, address: str, port: int) -> NetworkReport:
    missing, seconds, problem = None, None, None
    job, others = request.job, request.job.nodes[1:]
    try:
        if request.node == job.nodes[0]:
            missing = tuple(reachability.await_nodes(address, port, job.id, others, REACH_SECONDS))
        else:
            took = reachability.connect(address, port, job.id, request.node, REACH_SECONDS)
            seconds = round(took, 6)
    except NodeError as exc:
        problem = exc.problem
    return NetworkReport(_differing_names(request.names or {}), missing, seconds, problem)


def _differing_names(expected: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the names for which this node finds other addresses than the driver, and these."""
    resolved = reachability.resolution(expected)
    found = {name: tuple(addresses) for name, addresses in resolved.items()}
    return {name: found[name] for name in expected if found[name] != expected[name]}


def _damage(request: DeepRequest, path: str) -> list[Problem]:
    try:
        problems = deep.damaged_files(path, max(1, machine.host_facts().cpus // request.nodes_here))
    except NodeError as exc:
        return [exc.problem]
    if not problems:
        return []
    try:
        deep.discard(request.root, request.job.bundle_id)
    except NodeError as exc:
        return [*problems, exc.problem]
    return [replace(problem, code=ProblemCode.ENVIRONMENT_TAKEN_AWAY) for problem in problems]
