"""The plan of the transfer: the parts of a bundle that each node needs."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ..format.archive import END, BundleFile
from ..format.manifest import BLOCK, Layer, Manifest, count_padding, member_header
from ..protocol.counts import format_count, format_size
from ..protocol.enumerations import Stage, TransferWay
from ..protocol.events import StagingWork
from ..protocol.job import ASSUMED, Rates
from ..protocol.messages import PreflightAnswer
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files
from .findings import Names, group_nodes, shorten_names
from .forecast import Nodes, Staging, forecast_staging, measure_staging_work

_CHUNK = 8 << 20


def digest_of_all(bundle: BundleFile) -> str:
    """Return the SHA-256 of a bundle as one file, as hexadecimal digits."""
    state, size = hashlib.sha256(), bundle.manifest.size
    for offset in range(0, size, _CHUNK):
        state.update(bundle.read(offset, min(_CHUNK, size - offset)))
    return state.hexdigest()


def write_excerpt(bundle: BundleFile, members: Collection[str], path: str) -> int:
    """Copy some members, in the bundle's order and as a tar of its own; return its bytes."""
    try:
        with open(path, "xb") as out:
            for name, size in bundle.manifest.members():
                if name not in members:
                    continue
                out.write(member_header(name, size))
                start = bundle.offset(name)
                for done in range(0, size, _CHUNK):
                    out.write(bundle.read(start + done, min(_CHUNK, size - done)))
                out.write(bytes(count_padding(size)))
            out.write(END)
            return out.tell()
    except OSError as exc:
        full, unwritable = ProblemCode.EXCERPT_DISK_FULL, ProblemCode.EXCERPT_UNWRITABLE
        folder = os.path.dirname(path)
        raise NodeError(files.disk_problem(exc, folder, full, unwritable)) from exc


Facts = Mapping[str, PreflightAnswer]  # the answers to the preflight, by node
Forecasting = Callable[["NodeGroup"], Staging]
PRESENT, SHARED, RELAY, SBCAST, SSH = "present", "shared", "relay", "sbcast", "ssh"
SENT = (RELAY, SBCAST, SSH)  # the ways in which a file is sent


class TransferRule(NamedTuple):
    """The user's wish."""

    stage: Stage = Stage.AUTO
    way: TransferWay = TransferWay.AUTO
    without_relay: str = SBCAST  # ``ssh`` where there is no Slurm


class NodeGroup(NamedTuple):
    """Nodes that get their environment in the same way."""

    nodes: Names
    how: str  # they have it (``present``), read it (``shared``), or are sent it
    members: tuple[str, ...] | None = None
    """Names of the bundle's members that are sent, none if only the manifest differs; None for the
    whole bundle."""
    layers: tuple[str, ...] = ()
    bytes: int = 0
    work: StagingWork | None = None  # of each node; None if there is none, or it is unknown


class Plan(NamedTuple):
    """All groups of nodes, and the reason for the choice."""

    groups: tuple[NodeGroup, ...]
    why: str
    staged: tuple[Staging, ...] = ()  # for each group that has work; one by one

    @property
    def bytes(self) -> int:
        """Bytes of all files that are sent."""
        return sum(group.bytes for group in self.groups)


def make_plan(
    facts: Facts,
    rule: TransferRule,
    manifest: Manifest | None,
    size: int,
    rates: Rates = ASSUMED,
    sharing: int = 1,
) -> tuple[Plan, dict[str, Problem]]:
    """Return how each node gets its environment, and the problems of nodes without a way."""
    ready = tuple(node for node, answer in facts.items() if answer.ready)
    waiting = [node for node, answer in facts.items() if not answer.ready]
    how, no_relay = _choose_way(rule, waiting, facts)
    groups = _make_groups(how, waiting, facts, manifest, size)
    forecast = functools.partial(_forecast_group, facts=facts, rates=rates, sharing=sharing)
    is_sent, why = _choose(waiting, rule.stage, groups, facts, forecast)
    problems: dict[str, Problem] = {}
    if is_sent:
        why = f"{how} to {format_count(len(waiting), 'node')}: {why}{no_relay}"
    if manifest is None or not is_sent:  # all that can be served read the bundle where it lies
        problems = _find_unserved(waiting, rule.stage, facts, is_sent=is_sent)
        groups = _share_bundle(groups, problems)
    present = [NodeGroup(ready, PRESENT)] if ready else []
    return Plan((*present, *groups), why, tuple(map(forecast, groups))), problems


def forecast_nodes(nodes: Collection[str], facts: Facts, sharing: int = 1) -> Nodes:
    """Describe some nodes for the forecast, by their answers to the preflight."""
    hosts = [facts[node].host for node in nodes]
    cpus = [1 if host is None else host.cpus for host in hosts]
    return Nodes(max(1, len(nodes)), cpus=max(1, min(cpus, default=1)), sharing=max(1, sharing))


def excerpt_size(members: Sequence[tuple[str, int]]) -> int:
    """Return the length of a file with some of a bundle's members, given with their sizes."""
    return len(END) + sum(BLOCK + length + count_padding(length) for _, length in members)


def is_relayed(rule: TransferRule, facts: Facts) -> bool:
    """Return whether these nodes pass a file on to each other that all of them are sent."""
    return _choose_way(rule, list(facts), facts)[0] == RELAY


def _choose_way(rule: TransferRule, nodes: Sequence[str], facts: Facts) -> tuple[str, str]:
    if rule.way is TransferWay.SBCAST:
        return SBCAST, ""
    nowhere = [node for node in nodes if not facts[node].address]
    if nowhere:
        have = "has" if len(nowhere) == 1 else "have"
        why = f"; no relay, as {shorten_names(nowhere)} {have} no address for others"
        return rule.without_relay, why
    return RELAY, ""


def _make_groups(
    how: str, nodes: Sequence[str], facts: Facts, manifest: Manifest | None, size: int
) -> list[NodeGroup]:
    # One file each for nodes with one path; nodes of a relay may have any.
    same = [tuple(nodes)] if how == RELAY and nodes else group_by_root(nodes, facts)
    return [_find_missing_layers(NodeGroup(own, how), facts, manifest, size) for own in same]


def _find_blind(nodes: Sequence[str], facts: Facts) -> list[str]:
    return [node for node in nodes if facts[node].rate is None]


def _find_unserved(
    waiting: Sequence[str], stage: Stage, facts: Facts, *, is_sent: bool
) -> dict[str, Problem]:
    blind = _find_blind(waiting, facts)
    if stage == Stage.NEVER:
        return {node: Problem(ProblemCode.BUNDLE_INVISIBLE, node) for node in blind}
    unserved = (blind or waiting) if is_sent else ()
    return {node: Problem(ProblemCode.NOTHING_TO_SEND, node) for node in unserved}


def _share_bundle(groups: Sequence[NodeGroup], problems: Collection[str]) -> list[NodeGroup]:
    """Return the groups without nodes that have problems; they read the bundle where it lies."""
    return [
        NodeGroup(nodes, SHARED, work=group.work)
        for group in groups
        if (nodes := tuple(node for node in group.nodes if node not in problems))
    ]


def _find_slowest_reader(nodes: Sequence[str], facts: Facts) -> tuple[str, float]:
    slowest = min(nodes, key=lambda node: facts[node].rate or 0.0)
    return slowest, facts[slowest].rate or 1.0


def _forecast_group(group: NodeGroup, facts: Facts, rates: Rates, sharing: int) -> Staging:
    if group.work is None:
        return Staging(0.0, 0.0, 0.0)
    nodes = forecast_nodes(group.nodes, facts, sharing)
    speed = _find_slowest_reader(group.nodes, facts)[1] if group.how == SHARED else None
    return forecast_staging(group.work, nodes, rates, relayed=group.how == RELAY, speed=speed)


def _choose(
    waiting: Sequence[str],
    stage: Stage,
    groups: Sequence[NodeGroup],
    facts: Facts,
    forecast: Forecasting,
) -> tuple[bool, str]:
    count = format_count(len(waiting), "node")
    if not waiting:
        return False, "nothing to send: every node has the environment"
    if stage != Stage.AUTO:
        as_asked = f"{count} to read the shared bundle, as asked for"
        return stage == Stage.ALWAYS, "sending is asked for" if stage == Stage.ALWAYS else as_asked
    blind = _find_blind(waiting, facts)
    if blind:
        return True, f"{shorten_names(blind)} cannot see the bundle"
    if any(group.work is None for group in groups):
        return False, f"{count} read the shared bundle: the first node cannot see it"
    slowest, rate = _find_slowest_reader(waiting, facts)
    # All nodes read at the same time; files are sent one after the other.
    reading = max(forecast(group._replace(how=SHARED)).seconds for group in groups)
    sending = sum(forecast(group).seconds for group in groups)
    if reading > sending:
        speed = f"{format_size(int(rate))}/s on {slowest}, about {reading:.1f} s"
        return True, f"the shared bundle is slow ({speed}; sending {sending:.1f} s)"
    return False, (
        f"{count} read the shared bundle: reading from the shared disk "
        f"(about {reading:.1f} s) is quicker than sending ({sending:.1f} s)"
    )


def group_by_root(nodes: Sequence[str], facts: Facts) -> list[tuple[str, ...]]:
    """Return the nodes that have the same node root, together."""
    return [*map(tuple, group_nodes((node, facts[node].root) for node in nodes).values())]


def _choose_members(
    manifest: Manifest, layers: Sequence[Layer], answers: Sequence[PreflightAnswer]
) -> list[tuple[str, int]]:
    """Return the members of some layers, with what unpacks these where a node lacks it."""
    sent = {name for layer in layers for name, _ in layer.members}
    if manifest.decompressor is not None and not all(one.has_wheel for one in answers):
        sent.add(manifest.decompressor.name)
    return [member for member in manifest.members() if member[0] in sent]


def _find_missing_layers(
    group: NodeGroup, facts: Facts, manifest: Manifest | None, size: int
) -> NodeGroup:
    if manifest is None:
        return group
    answers, every = [facts[node] for node in group.nodes], range(len(manifest.layers))
    missing = set().union(*(every if one.lacks is None else one.lacks for one in answers))
    layers = [manifest.layers[number] for number in sorted(missing)]
    members: tuple[str, ...] | None = None
    if len(layers) < len(every):
        excerpt = _choose_members(manifest, layers, answers)
        members, size = tuple(name for name, _ in excerpt), excerpt_size(excerpt)
    return group._replace(
        members=members,
        layers=tuple(layer.name for layer in layers),
        bytes=size,
        work=measure_staging_work(layers, manifest.layers, size),
    )
