"""The plan of the transfer: the parts of a bundle that each node needs. Pure functions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..format.archive import END, BundleFile
from ..format.manifest import BLOCK, Layer, Manifest, member_header, padding
from ..protocol.counts import counted, sized
from ..protocol.enumerations import Stage, TransferWay
from ..protocol.events import PlannedGroup, StagingWork
from ..protocol.job import ASSUMED, Rates
from ..protocol.messages import PreflightAnswer
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files
from .findings import few_names
from .forecast import Nodes, Staging, staging, staging_by_reading, staging_work

# --- A file with only some members of a bundle, which the nodes do not have, or with all of them

_CHUNK = 8 << 20


def digest_of_all(bundle: BundleFile) -> str:
    """Return the SHA-256 of a bundle as one file, as hexadecimal digits.

    Raises:
        NodeError: it cannot be read.
    """
    state, size = hashlib.sha256(), bundle.manifest.size
    for offset in range(0, size, _CHUNK):
        state.update(bundle.read(offset, min(_CHUNK, size - offset)))
    return state.hexdigest()


def write_excerpt(bundle: BundleFile, members: Collection[str], path: str) -> int:
    """Copy some members, in the bundle's order and as a tar of its own.

    Returns:
        Its length in bytes.

    Raises:
        NodeError: the file cannot be written, or the bundle cannot be read.
    """
    try:
        with open(path, "xb") as out:
            for name, size in bundle.manifest.members():
                if name not in members:
                    continue
                out.write(member_header(name, size))
                start = bundle.offset(name)
                for done in range(0, size, _CHUNK):
                    out.write(bundle.read(start + done, min(_CHUNK, size - done)))
                out.write(bytes(padding(size)))
            out.write(END)
            return out.tell()
    except OSError as exc:
        full, unwritable = ProblemCode.EXCERPT_DISK_FULL, ProblemCode.EXCERPT_UNWRITABLE
        folder = os.path.dirname(path)
        raise NodeError(files.disk_problem(exc, folder, full, unwritable)) from exc


PRESENT, SHARED, RELAY, SBCAST, SSH = "present", "shared", "relay", "sbcast", "ssh"
SENT = (RELAY, SBCAST, SSH)
"""The ways in which a file is sent."""


@dataclass(frozen=True)
class TransferRule:
    """The user's wish."""

    stage: Stage = Stage.AUTO
    """Whether the bundle is sent."""
    way: TransferWay = TransferWay.AUTO
    """How it is sent, if it is."""
    without_relay: str = SBCAST
    """How it is sent where no relay can: ``sbcast``, or ``ssh`` where there is no Slurm."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that get their environment in the same way."""

    nodes: tuple[str, ...]
    """Their names."""
    how: str
    """``present``: the environment is there; ``shared``: they read the bundle where it lies;
    ``relay``, ``sbcast`` and ``ssh``: it is sent to them."""
    members: tuple[str, ...] | None = None
    """Names of the bundle's members that are sent; None for the whole bundle. There may be none, if
    the nodes have all layers and only the manifest differs."""
    layers: tuple[str, ...] = ()
    """Names of the layers among them: packages, the project and assets."""
    bytes: int = 0
    """Size of the file that is sent."""
    work: StagingWork | None = None
    """The work of each node; None if there is none, or it is not known."""

    def planned(self) -> PlannedGroup:
        """Return the group as the plan's event has it."""
        return PlannedGroup(self.nodes, self.how, self.bytes, self.layers, self.work)


@dataclass(frozen=True)
class Plan:
    """All groups of nodes, and the reason for the choice."""

    groups: tuple[NodeGroup, ...]
    """Each node is in one of them."""
    why: str
    """The reason, in one line."""
    staged: tuple[Staging, ...] = ()
    """The expected seconds of each group that has work to do; groups are served one by one."""

    @property
    def bytes(self) -> int:
        """Bytes of all files that are sent."""
        return sum(group.bytes for group in self.groups)


def make_plan(
    facts: Mapping[str, PreflightAnswer],
    rule: TransferRule,
    manifest: Manifest | None,
    size: int,
    rates: Rates = ASSUMED,
    sharing: int = 1,
) -> tuple[Plan, dict[str, Problem]]:
    """Decide for every node how it gets its environment.

    Returns:
        The plan, and the nodes that cannot be served.
    """
    nodes = _NodesByNeed.of(facts)
    way = _SendingWay.of(rule, nodes.waiting, facts)
    groups = _to_be_sent(nodes.waiting, facts, way.how)
    if manifest is not None:
        groups = [_with_content(group, facts, manifest, size) for group in groups]
    forecast = _GroupForecast(facts, rates, sharing)
    choice = _choose(nodes, rule.stage, forecast, groups, way)
    problems = _unserved(nodes, rule.stage, sending_nothing=choice.send and manifest is None)
    if not choice.send or manifest is None:
        groups = _reading(groups, problems)
    present = [NodeGroup(tuple(nodes.ready), PRESENT)] if nodes.ready else []
    staged = tuple(forecast.staged(group) for group in groups)
    return Plan((*present, *groups), choice.why, staged), problems


def forecast_nodes(
    nodes: Collection[str], facts: Mapping[str, PreflightAnswer], sharing: int = 1
) -> Nodes:
    """Describe some nodes for the forecast, by their answers to the preflight."""
    cpus = []
    for node in nodes:
        host = facts[node].host
        cpus.append(1 if host is None else host.cpus)
    return Nodes(max(1, len(nodes)), cpus=max(1, min(cpus, default=1)), sharing=max(1, sharing))


def excerpt_size(members: Sequence[tuple[str, int]]) -> int:
    """Return the length of a file with some of a bundle's members, given with their sizes."""
    return len(END) + sum(BLOCK + length + padding(length) for _, length in members)


@dataclass(frozen=True)
class _NodesByNeed:
    ready: list[str]
    """Those that have the environment."""
    waiting: list[str]
    """The others."""
    blind: list[str]
    """Those of the others that cannot read the bundle where it lies."""

    @classmethod
    def of(cls, facts: Mapping[str, PreflightAnswer]) -> _NodesByNeed:
        ready = [node for node, answer in facts.items() if answer.ready]
        waiting = [node for node, answer in facts.items() if not answer.ready]
        blind = [node for node in waiting if facts[node].rate is None]
        return cls(ready, waiting, blind)


@dataclass(frozen=True)
class _SendingWay:
    how: str
    """``relay``, ``sbcast`` or ``ssh``."""
    why: str = ""
    """The reason, where it is not what is usual."""

    @classmethod
    def of(
        cls, rule: TransferRule, nodes: Sequence[str], facts: Mapping[str, PreflightAnswer]
    ) -> _SendingWay:
        """Choose the relay, unless the rule forbids it or a node has no address for others."""
        if rule.way is TransferWay.SBCAST:
            return cls(SBCAST)
        nowhere = [node for node in nodes if not facts[node].address]
        if nowhere:
            have = "has" if len(nowhere) == 1 else "have"
            return cls(rule.without_relay, f"{few_names(nowhere)} {have} no address for others")
        return cls(RELAY)

    def line(self, count: str, why: str) -> str:
        besides = f"; no relay, as {self.why}" if self.why else ""
        return f"{self.how} to {count}: {why}{besides}"


def is_relayed(rule: TransferRule, facts: Mapping[str, PreflightAnswer]) -> bool:
    """Return whether these nodes pass a file on to each other that all of them are sent."""
    return _SendingWay.of(rule, list(facts), facts).how == RELAY


@dataclass(frozen=True)
class _Choice:
    """The choice between sending the bundle and reading it in place."""

    why: str
    """The reason, in one line."""
    send: bool
    """True if it is sent."""


class _GroupForecast:
    def __init__(self, facts: Mapping[str, PreflightAnswer], rates: Rates, sharing: int) -> None:
        self._facts = facts
        self._rates = rates
        self._sharing = sharing

    def slowest(self, nodes: Sequence[str]) -> tuple[str, float]:
        """Return the node that reads the bundle most slowly, and its bytes/s."""
        rates = {node: self._facts[node].rate or 0.0 for node in nodes}
        slowest = min(nodes, key=lambda node: rates[node])
        return slowest, rates[slowest] or 1.0

    def staged(self, group: NodeGroup) -> Staging:
        if group.work is None:
            return Staging(0.0, 0.0, 0.0)
        nodes = forecast_nodes(group.nodes, self._facts, self._sharing)
        if group.how == SHARED:
            return staging_by_reading(group.work, nodes, self.slowest(group.nodes)[1], self._rates)
        return staging(group.work, nodes, self._rates, relayed=group.how == RELAY)


def _choose(
    nodes: _NodesByNeed,
    stage: Stage,
    forecast: _GroupForecast,
    groups: Sequence[NodeGroup],
    way: _SendingWay,
) -> _Choice:
    if not nodes.waiting:
        return _Choice("nothing to send: every node has the environment", send=False)
    count = counted(len(nodes.waiting), "node")
    if stage == Stage.NEVER:
        return _Choice(f"{count} to read the shared bundle, as asked for", send=False)
    if stage == Stage.ALWAYS:
        return _Choice(way.line(count, "sending is asked for"), send=True)
    if nodes.blind:
        names = few_names(nodes.blind)
        return _Choice(way.line(count, f"{names} cannot see the bundle"), send=True)
    if any(group.work is None for group in groups):
        why = f"{count} read the shared bundle: the first node cannot see it"
        return _Choice(why, send=False)
    return _choose_by_speed(nodes.waiting, forecast, groups, way)


def _choose_by_speed(
    waiting: Sequence[str], forecast: _GroupForecast, groups: Sequence[NodeGroup], way: _SendingWay
) -> _Choice:
    count = counted(len(waiting), "node")
    slowest, rate = forecast.slowest(waiting)
    # All nodes read at the same time; files are sent one after the other.
    reading = max(forecast.staged(replace(group, how=SHARED)).seconds for group in groups)
    sending = sum(forecast.staged(group).seconds for group in groups)
    speed = f"{sized(int(rate))}/s on {slowest}, about {reading:.1f} s"
    if reading > sending:
        slow = f"the shared bundle is slow ({speed}; sending {sending:.1f} s)"
        return _Choice(way.line(count, slow), send=True)
    why = (
        f"{count} read the shared bundle: reading from the shared disk "
        f"(about {reading:.1f} s) is quicker than sending ({sending:.1f} s)"
    )
    return _Choice(why, send=False)


def _unserved(nodes: _NodesByNeed, stage: Stage, *, sending_nothing: bool) -> dict[str, Problem]:
    """Return nodes that cannot get it; ``sending_nothing``: the driver cannot read the bundle."""
    if stage == Stage.NEVER:
        return _each_with(ProblemCode.BUNDLE_INVISIBLE, nodes.blind)
    if sending_nothing:  # requested, or some node cannot read the bundle
        return _each_with(ProblemCode.NOTHING_TO_SEND, nodes.blind or nodes.waiting)
    return {}


def _each_with(code: ProblemCode, nodes: Sequence[str]) -> dict[str, Problem]:
    return {node: Problem(code, node) for node in nodes}


def _to_be_sent(
    nodes: Sequence[str], facts: Mapping[str, PreflightAnswer], how: str
) -> list[NodeGroup]:
    """Group the nodes that get one file each: by equal path, except for a relay."""
    if how == RELAY:
        return [NodeGroup(tuple(nodes), how)] if nodes else []
    return [NodeGroup(group, how) for group in by_root(nodes, facts)]


def by_root(nodes: Sequence[str], facts: Mapping[str, PreflightAnswer]) -> list[tuple[str, ...]]:
    """Return the nodes that have the same node root, together."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        groups.setdefault(facts[node].root, []).append(node)
    return [tuple(group) for group in groups.values()]


def _reading(groups: Sequence[NodeGroup], left_out: Collection[str]) -> list[NodeGroup]:
    reading = []
    for group in groups:
        nodes = tuple(node for node in group.nodes if node not in left_out)
        if nodes:
            reading.append(
                replace(group, nodes=nodes, how=SHARED, members=None, layers=(), bytes=0)
            )
    return reading


def _with_content(
    group: NodeGroup, facts: Mapping[str, PreflightAnswer], manifest: Manifest, size: int
) -> NodeGroup:
    """Add the layers that at least one node of the group is missing."""
    missing = _missing_layers(group, facts, manifest)
    members: tuple[str, ...] | None = None
    if len(missing) < len(manifest.layers):
        have_wheel = all(facts[node].has_wheel for node in group.nodes)
        excerpt = _excerpt(manifest, missing, have_wheel=have_wheel)
        members = tuple(name for name, _ in excerpt)
        size = excerpt_size(excerpt)
    return replace(
        group,
        members=members,
        layers=tuple(layer.name for layer in missing),
        bytes=size,
        work=staging_work(missing, manifest.layers, size),
    )


def _excerpt(
    manifest: Manifest, layers: Sequence[Layer], *, have_wheel: bool
) -> list[tuple[str, int]]:
    """Return the layers' members with their sizes, and the decompressor if needed."""
    names = {name for layer in layers for name, _ in layer.members}
    if manifest.decompressor is not None and not have_wheel:
        names.add(manifest.decompressor.name)
    return [(name, size) for name, size in manifest.members() if name in names]


def _missing_layers(
    group: NodeGroup, facts: Mapping[str, PreflightAnswer], manifest: Manifest
) -> list[Layer]:
    missing: set[int] = set()
    for node in group.nodes:
        lacks = facts[node].lacks
        missing.update(range(len(manifest.layers)) if lacks is None else lacks)
    return [manifest.layers[number] for number in sorted(missing)]
