"""The plan of the transfer: the parts of a bundle that each node needs. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..format.archive import END
from ..format.manifest import BLOCK, Layer, Manifest, padding
from ..protocol.answers import PreflightAnswer
from ..protocol.counts import counted, sized
from ..protocol.enumerations import Stage
from ..protocol.planned_transfer import PlannedGroup, StagingWork
from ..protocol.problem import Problem, ProblemCode
from ..protocol.rates import ASSUMED, Rates
from .forecast import Nodes, Staging, staging, staging_work

PRESENT, SHARED, BROADCAST = "present", "shared", "broadcast"


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that get their environment in the same way."""

    nodes: tuple[str, ...]
    """Their names."""
    how: str
    """``present``: the environment is there; ``shared``: they read the bundle where it lies;
    ``broadcast``: it is sent to them."""
    root: str
    """Their node root."""
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
    stage: Stage,
    manifest: Manifest | None,
    size: int,
    rates: Rates = ASSUMED,
    sharing: int = 1,
) -> tuple[Plan, dict[str, Problem]]:
    """Decide for every node how it gets its environment.

    Args:
        facts: each node's answer to the preflight.
        stage: the rule by which the bundle is sent.
        manifest: the bundle's; None if the driver cannot read the bundle.
        size: length of the bundle's file in bytes.
        rates: the measured speeds of the cluster.
        sharing: the number of nodes that share one machine.

    Returns:
        The plan, and the nodes that cannot be served.
    """
    nodes = _Nodes.of(facts)
    groups = _by_root(nodes.waiting, facts)
    if manifest is not None:
        groups = [_with_content(group, facts, manifest, size) for group in groups]
    model = _Model(facts, rates, sharing)
    choice = _choose(nodes, stage, model, groups)
    problems = _unserved(nodes, stage, sending_nothing=choice.send and manifest is None)
    if not choice.send or manifest is None:
        groups = _reading(groups, problems)
    present = [replace(group, how=PRESENT) for group in _by_root(nodes.ready, facts)]
    staged = tuple(model.staged(group) for group in groups)
    return Plan((*present, *groups), choice.why, staged), problems


def where(nodes: Collection[str], facts: Mapping[str, PreflightAnswer], sharing: int = 1) -> Nodes:
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
class _Nodes:
    """The nodes of a job, as the preflight found them."""

    ready: list[str]
    """Those that have the environment."""
    waiting: list[str]
    """The others."""
    blind: list[str]
    """Those of the others that cannot read the bundle where it lies."""

    @classmethod
    def of(cls, facts: Mapping[str, PreflightAnswer]) -> _Nodes:
        """Return the nodes that have answered, by what they need."""
        ready = [node for node, answer in facts.items() if answer.ready]
        waiting = [node for node, answer in facts.items() if not answer.ready]
        blind = [node for node in waiting if facts[node].rate is None]
        return cls(ready, waiting, blind)


@dataclass(frozen=True)
class _Choice:
    """The choice between sending the bundle and reading it where it lies."""

    why: str
    """The reason, in one line."""
    send: bool
    """True if it is sent."""


class _Model:
    """The forecast for these nodes."""

    def __init__(self, facts: Mapping[str, PreflightAnswer], rates: Rates, sharing: int) -> None:
        self._facts = facts
        self._rates = rates
        self._sharing = sharing

    def slowest(self, nodes: Sequence[str]) -> tuple[str, float]:
        """Return the node that reads the bundle most slowly, and its bytes a second."""
        rates = {node: self._facts[node].rate or 0.0 for node in nodes}
        slowest = min(nodes, key=lambda node: rates[node])
        return slowest, rates[slowest] or 1.0

    def staged(self, group: NodeGroup) -> Staging:
        """Return the expected seconds of one group."""
        if group.work is None:
            return Staging(0.0, 0.0, 0.0)
        nodes = where(group.nodes, self._facts, self._sharing)
        rate = self.slowest(group.nodes)[1] if group.how == SHARED else None
        return staging(group.work, nodes, self._rates, rate)


def _choose(nodes: _Nodes, stage: Stage, model: _Model, groups: Sequence[NodeGroup]) -> _Choice:
    """Choose whether the bundle is sent."""
    if not nodes.waiting:
        return _Choice("nothing to send: every node has the environment", send=False)
    count = counted(len(nodes.waiting), "node")
    if stage == Stage.NEVER:
        return _Choice(f"{count} read the shared bundle: staging is off", send=False)
    if stage == Stage.ALWAYS:
        return _Choice(f"broadcast to {count}: staging is asked for", send=True)
    if nodes.blind:
        names = _first_names(nodes.blind)
        return _Choice(f"broadcast to {count}: {names} cannot see the bundle", send=True)
    if any(group.work is None for group in groups):
        why = f"{count} read the shared bundle: the first node cannot see it"
        return _Choice(why, send=False)
    return _choose_by_speed(nodes.waiting, model, groups)


def _choose_by_speed(waiting: Sequence[str], model: _Model, groups: Sequence[NodeGroup]) -> _Choice:
    count = counted(len(waiting), "node")
    slowest, rate = model.slowest(waiting)
    # All nodes read at the same time; files are sent one after the other.
    reading = max(model.staged(replace(group, how=SHARED)).seconds for group in groups)
    sending = sum(model.staged(group).seconds for group in groups)
    speed = f"{sized(int(rate))}/s on {slowest}, about {reading:.1f} s"
    if reading > sending:
        slow = f"the shared bundle is slow ({speed}; sending {sending:.1f} s)"
        return _Choice(f"broadcast to {count}: {slow}", send=True)
    why = f"{count} read the shared bundle ({speed}; sending would take {sending:.1f} s)"
    return _Choice(why, send=False)


def _unserved(nodes: _Nodes, stage: Stage, *, sending_nothing: bool) -> dict[str, Problem]:
    """Return the nodes that cannot get the bundle.

    Args:
        nodes: all nodes.
        stage: the rule by which the bundle is sent.
        sending_nothing: True if the bundle is to be sent, and the driver cannot read it.
    """
    if stage == Stage.NEVER:
        return _each_with(ProblemCode.BUNDLE_INVISIBLE, nodes.blind)
    if sending_nothing:  # requested, or some node cannot read the bundle
        return _each_with(ProblemCode.NOTHING_TO_SEND, nodes.blind or nodes.waiting)
    return {}


def _each_with(code: ProblemCode, nodes: Sequence[str]) -> dict[str, Problem]:
    return {node: Problem(code, node) for node in nodes}


def _by_root(nodes: Sequence[str], facts: Mapping[str, PreflightAnswer]) -> list[NodeGroup]:
    by_root: dict[str, list[str]] = {}
    for node in nodes:
        by_root.setdefault(facts[node].root, []).append(node)
    return [
        NodeGroup(nodes=tuple(group), how=BROADCAST, root=root) for root, group in by_root.items()
    ]


def _reading(groups: Sequence[NodeGroup], left_out: Collection[str]) -> list[NodeGroup]:
    """Let groups read the bundle where it lies, without the nodes that cannot be served."""
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
    """Add the parts of the bundle that at least one node of the group is missing."""
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
    """Return the members of some layers with their sizes, and the decompressor if it is needed."""
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


def _first_names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(nodes[:3]) + more
