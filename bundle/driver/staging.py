"""Bringing the environment to the nodes: the plan, the sending, and a second try where it failed.

The file goes into a directory of the job's own in ``incoming/`` of the node root, while an agent
waits on each node that gets it: the agent makes the directory, checks every digest on the way, and
removes the directory whatever happens, so that a block which comes too late finds no place.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import Any

from ..checks.preflight import BROADCAST as NAME
from ..format.archive import digest_of
from ..format.partial_bundle import write_excerpt
from ..protocol.problem import Problem
from ..protocol.rates import ASSUMED
from ..transfer.forecast import forecast
from ..transfer.plan import BROADCAST, Group, make_plan, where
from .state import State
from .transports import slurm_commands
from .transports.transport import Transfer


def decide(state: State) -> None:
    """Make the plan, and tell it; nodes that cannot be served have their problem noted."""
    manifest, size = None, 0
    if state.bundle is not None:
        manifest, size = state.bundle.manifest, os.path.getsize(state.bundle.path)
    rates, sharing = state.job.rates or ASSUMED, state.transport.nodes_here
    plan, problems = make_plan(state.facts, state.job.stage, manifest, size, rates, sharing)
    state.plan = plan
    nodes = where(state.job.nodes, state.facts, sharing)
    expected = forecast(plan.staged, nodes, rates, launcher=state.job.launch.launcher)
    told = {
        "why": plan.why,
        "bytes": plan.bytes,
        "groups": [group.to_json() for group in plan.groups],
        "cpus": nodes.cpus,
        "forecast": {"measured": state.job.rates is not None, "seconds": expected.to_json()},
    }
    state.emit({"event": "plan", **told})
    state.result["plan"] = told
    state.answers = {node: {"ok": True, "problems": []} for node in state.job.nodes}
    for node, problem in problems.items():
        state.answers[node] = {"ok": False, "problems": [problem.to_json()]}
    state.leave_out_or_fail()


def carry_out(state: State) -> None:
    """Do what was planned; ``state.answers`` then has every node's."""
    plan = state.plan
    state.answers = {}
    if plan is None:
        return
    direct = [node for group in plan.groups if group.how != BROADCAST for node in group.nodes]
    kept = tuple(node for node in direct if node in state.job.nodes)
    if kept:
        shared = {"bundle": state.job.bundle}

        def asked(node: str) -> dict[str, Any]:
            return {**state.found(node), **shared, "checked": state.facts[node]["ready"]}

        state.ask_some("unpack", kept, asked)
    for number, group in enumerate(plan.groups):
        if group.how == BROADCAST:
            _send(state, group, number)


def _send(state: State, group: Group, number: int) -> None:
    nodes = tuple(node for node in group.nodes if node in state.job.nodes)
    if not nodes or state.bundle is None:
        return
    with tempfile.TemporaryDirectory(prefix="stager-") as scratch:
        source, manifest = state.bundle.path, None
        if group.members is not None:
            source = os.path.join(scratch, "parts.tar")
            write_excerpt(state.bundle, group.members, source)
            manifest = state.bundle.manifest.to_bytes().decode()
        target = os.path.join(
            group.root, "incoming", f"{NAME}{state.job.id}.{number}", "bundle.tar"
        )
        parcel = Transfer(source, target, os.path.getsize(source))
        incoming: dict[str, Any] = {
            "target": target,
            "manifest": manifest,
            "members": list(group.members or ()),
            "size": parcel.size,
        }
        _deliver(state, parcel, nodes, incoming)
        _mend(state, parcel, nodes, incoming)
    lacking = tuple(node for node in nodes if state.answers.get(node, {}).get("lacking"))
    if lacking:  # an older environment has gone meanwhile: these get all of it
        for node in lacking:
            del state.answers[node]
        whole = Transfer(state.bundle.path, target, os.path.getsize(state.bundle.path))
        incoming = {"target": target, "manifest": None, "members": [], "size": whole.size}
        _deliver(state, whole, lacking, incoming)
        _mend(state, whole, lacking, incoming)


def _deliver(
    state: State, parcel: Transfer, nodes: tuple[str, ...], incoming: dict[str, Any]
) -> None:
    """Send, as often without the nodes that it failed on as it takes; then to each of those alone.

    Where Slurm does not say which nodes it failed on, all of them get a second try.
    """
    bad: list[str] = []
    rest, unknown = nodes, 0
    while rest:
        failed = _try(state, parcel, rest, incoming)
        named = [node for node in rest if node in failed]
        unknown += bool(failed) and not named
        if not failed:
            break
        if unknown > 1:
            _blame(state, parcel, rest, failed)
            break
        bad += named
        rest = tuple(node for node in rest if node not in failed)
        if rest and named:
            state.emit({"event": "note", "text": f"sending again, without {', '.join(bad)}"})
    for node in bad:
        _blame(state, parcel, (node,), _try(state, parcel, (node,), incoming))


def _mend(state: State, parcel: Transfer, nodes: tuple[str, ...], incoming: dict[str, Any]) -> None:
    """Send once more to the nodes whose copy was damaged on its way.

    One that has arrived as it was sent, and is damaged all the same, would only be so again.
    """
    damaged = _damaged_on_its_way(state, parcel, nodes)
    if not damaged:
        return
    text = f"the copy was damaged on its way to {', '.join(damaged)}; sending it again"
    state.emit({"event": "note", "text": text})
    _deliver(state, parcel, damaged, incoming)
    for node in _damaged_on_its_way(state, parcel, damaged):
        problem = Problem(
            what="the copy of the bundle was damaged on its way, twice",
            where=node,
            why=str(state.answers[node]["problems"][0]["why"]),
            fix=f"the bundle itself is sound: look at the network to {node} and at its memory and "
            f"disk, or leave the node out with --exclude={node}",
        )
        state.answers[node] = {"ok": False, "problems": [problem.to_json()]}


def _damaged_on_its_way(state: State, parcel: Transfer, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """The nodes on which something else has arrived than was sent."""
    arrived = {node: state.answers.get(node, {}).get("arrived") for node in nodes}
    if not any(arrived.values()):
        return ()
    sent = digest_of(parcel.source)
    return tuple(node for node, digest in arrived.items() if digest and digest != sent)


def _try(
    state: State, parcel: Transfer, nodes: tuple[str, ...], incoming: dict[str, Any]
) -> dict[str, str]:
    for node in nodes:
        state.answers.pop(node, None)
    before = state.sendings.count(parcel.target)
    state.sendings.append(parcel.target)
    if before:
        # Blocks of a sending that failed may still come to its own place, and spoil what is there.
        target = f"{os.path.dirname(parcel.target)}.{before}/bundle.tar"
        parcel, incoming = replace(parcel, target=target), {**incoming, "target": target}
    extra = {"incoming": incoming}
    delivery = state.deliver(parcel, nodes, lambda node: {**state.found(node), **extra})
    if not delivery.failed:
        state.bytes_sent += parcel.size
        state.emit({"event": "sent", "bytes": parcel.size, "seconds": round(delivery.seconds, 3)})
    return delivery.failed


def _blame(state: State, parcel: Transfer, nodes: tuple[str, ...], failed: dict[str, str]) -> None:
    """Note the problem of each node that the file did not reach."""
    for node in nodes if failed else ():
        why = failed.get(node) or failed.get("") or "it failed on another node, see there"
        said = state.answers.get(node, {}).get("problems", [])
        arrived = said[0]["why"] if said else ""
        problem = Problem(
            what="the bundle could not be sent to the node",
            where=node,
            why="; ".join(filter(None, [f"sbcast says: {why}", arrived])),
            fix=_what_to_do(node, why, parcel),
        )
        state.answers[node] = {"ok": False, "problems": [problem.to_json()]}


def _what_to_do(node: str, why: str, parcel: Transfer) -> str:
    if slurm_commands.network_fault(why):
        look = f"look at the network to {node}: `sinfo -N -n {node}`, `ping {node}`"
    else:
        look = f"see the space and the permissions in {_incoming(parcel)} there"
    return f"{look}; or leave the node out with --exclude={node}"


def _incoming(parcel: Transfer) -> str:
    return os.path.dirname(os.path.dirname(parcel.target))
