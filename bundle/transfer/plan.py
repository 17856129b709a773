"""What must travel to which node: decided before anything does. Pure functions, no effects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..format.archive import END
from ..format.manifest import BLOCK, Manifest, padding
from ..protocol.counts import counted
from ..protocol.problem import Problem
from ..protocol.rates import ASSUMED, Rates
from ..system.files import size as shown
from .forecast import Nodes, Staging, Work, staging

PRESENT, SHARED, BROADCAST = "present", "shared", "broadcast"


@dataclass(frozen=True)
class Group:
    """Nodes that are served alike."""

    nodes: tuple[str, ...]
    """Their names."""
    how: str
    """``present``: the environment is there; ``shared``: they read the bundle where it lies;
    ``broadcast``: it is sent to them."""
    root: str
    """Their node root."""
    members: tuple[str, ...] | None = None
    """What is sent: names of the bundle's members; None for the whole bundle. There may be none,
    where only the manifest differs from what the nodes have."""
    layers: tuple[str, ...] = ()
    """The packages, the project and the assets among it, by their names."""
    bytes: int = 0
    """Size of the file that is sent."""
    work: Work | None = None
    """What each of them has to do; None where that is nothing, or not known."""

    def to_json(self) -> dict[str, Any]:
        """The group as a JSON object."""
        return {
            "nodes": list(self.nodes),
            "how": self.how,
            "bytes": self.bytes,
            "layers": list(self.layers),
            "work": None if self.work is None else asdict(self.work),
        }


@dataclass(frozen=True)
class Plan:
    """All groups, and why it is done like this."""

    groups: tuple[Group, ...]
    """Each node is in one of them."""
    why: str
    """One line."""
    staged: tuple[Staging, ...] = ()
    """How long it is going to take each group that has something to do; they come in turn."""

    @property
    def bytes(self) -> int:
        """Bytes of all files that are sent."""
        return sum(group.bytes for group in self.groups)


def make_plan(
    facts: Mapping[str, Mapping[str, Any]],
    stage: str,
    manifest: Manifest | None,
    size: int,
    rates: Rates = ASSUMED,
    sharing: int = 1,
) -> tuple[Plan, dict[str, Problem]]:
    """Decide for every node how it comes by its environment.

    Args:
        facts: each node's answer to the preflight.
        stage: ``auto``, ``always`` or ``never``.
        manifest: the bundle's; None where the driver cannot read the bundle.
        size: length of the bundle's file in bytes.
        rates: how quick the cluster is.
        sharing: how many nodes share one machine.

    Returns:
        The plan, and the nodes that cannot be served.
    """
    ready = [node for node, one in facts.items() if one["ready"]]
    rest = [node for node in facts if node not in ready]
    blind = [node for node in rest if one_rate(facts[node]) is None]
    groups = _by_root(rest, facts)
    if manifest is not None:
        groups = [_parcel(group, facts, manifest, size) for group in groups]
    model = _Model(facts, rates, sharing)
    why, send = _choose(rest, blind, stage, model, groups)
    problems: dict[str, Problem] = {}
    if stage == "never":
        problems = {node: _invisible(node) for node in blind}
    elif send and manifest is None:
        if stage == "always" or blind:
            problems = {node: _nothing_to_send(node) for node in (blind or rest)}
        send = False
    if not send:
        groups = [
            replace(_without(group, problems), how=SHARED, members=None, layers=(), bytes=0)
            for group in groups
            if not set(group.nodes) <= problems.keys()
        ]
    here = [replace(group, how=PRESENT) for group in _by_root(ready, facts)]
    staged = tuple(model.staged(group) for group in groups)
    return Plan((*here, *groups), why, staged), problems


def where(
    nodes: Collection[str], facts: Mapping[str, Mapping[str, Any]], sharing: int = 1
) -> Nodes:
    """Some nodes as the model sees them, by what they said of themselves."""
    counts = [int((facts[node].get("host") or {}).get("cpus", 1)) for node in nodes]
    return Nodes(max(1, len(nodes)), cpus=max(1, min(counts, default=1)), sharing=max(1, sharing))


def parcel_size(members: Sequence[tuple[str, int]]) -> int:
    """Length of a file that holds some of a bundle's members, given with their sizes in bytes."""
    return len(END) + sum(BLOCK + length + padding(length) for _, length in members)


def one_rate(facts: Mapping[str, Any]) -> float | None:
    """Bytes a second at which a node reads the bundle; None if it cannot see it."""
    rate = facts.get("rate")
    return None if rate is None else float(rate)


class _Model:
    """What the model says of these nodes."""

    def __init__(self, facts: Mapping[str, Mapping[str, Any]], rates: Rates, sharing: int) -> None:
        self._facts, self._rates, self._sharing = facts, rates, sharing

    def slowest(self, nodes: Sequence[str]) -> tuple[str, float]:
        """The node that reads the bundle most slowly, and its bytes a second."""
        node = min(nodes, key=lambda node: one_rate(self._facts[node]) or 0.0)
        return node, one_rate(self._facts[node]) or 1.0

    def staged(self, group: Group) -> Staging:
        """How long it takes one group in the way that it is served."""
        nodes = where(group.nodes, self._facts, self._sharing)
        if group.work is None:
            return Staging(0.0, 0.0, 0.0)
        rate = self.slowest(group.nodes)[1] if group.how == SHARED else None
        return staging(group.work, nodes, self._rates, rate)


def _choose(
    rest: Sequence[str], blind: Sequence[str], stage: str, model: _Model, groups: Sequence[Group]
) -> tuple[str, bool]:
    """In one line which way and why; and whether anything is sent."""
    if not rest:
        return "nothing travels: every node has the environment", False
    many = _many(rest)
    settled = {
        "never": (f"{many} read the shared bundle: staging is off", False),
        "always": (f"broadcast to {many}: staging is asked for", True),
    }
    if stage in settled:
        return settled[stage]
    if blind:
        return f"broadcast to {many}: {_some(blind)} cannot see the bundle", True
    if any(group.work is None for group in groups):
        return f"{many} read the shared bundle: the first node cannot see it", False
    node, rate = model.slowest(rest)
    # All read at the same time; files are sent one after the other.
    reading = max(model.staged(replace(group, how=SHARED)).seconds for group in groups)
    sending = sum(model.staged(group).seconds for group in groups)
    there = f"{shown(int(rate))}/s on {node}, about {reading:.1f} s"
    if reading > sending:
        text = f"broadcast to {many}: the shared bundle is slow ({there}; sending {sending:.1f} s)"
        return text, True
    return f"{many} read the shared bundle ({there}; sending would take {sending:.1f} s)", False


def _by_root(nodes: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    roots: dict[str, list[str]] = {}
    for node in nodes:
        roots.setdefault(str(facts[node]["root"]), []).append(node)
    return [Group(nodes=tuple(found), how=BROADCAST, root=root) for root, found in roots.items()]


def _without(group: Group, nodes: Collection[str]) -> Group:
    return replace(group, nodes=tuple(node for node in group.nodes if node not in nodes))


def _parcel(
    group: Group, facts: Mapping[str, Mapping[str, Any]], manifest: Manifest, size: int
) -> Group:
    """What at least one node of the group is missing."""
    wanted: set[int] = set()
    every = set(range(len(manifest.layers)))
    wheel = False
    for node in group.nodes:
        wanted |= set(facts[node].get("lacks", every))
        wheel = wheel or not facts[node].get("has_wheel", False)
    if wanted == every:
        return Group(
            nodes=group.nodes,
            how=group.how,
            root=group.root,
            layers=tuple(layer.name for layer in manifest.layers),
            bytes=size,
            work=Work.of(manifest.layers, manifest.layers, size),
        )
    fresh = [manifest.layers[number] for number in sorted(wanted)]
    names = {name for layer in fresh for name, _ in layer.members}
    if wheel and manifest.decompressor is not None:
        names.add(manifest.decompressor.name)
    members = [member for member in manifest.members() if member[0] in names]
    sent = parcel_size(members)
    return Group(
        nodes=group.nodes,
        how=group.how,
        root=group.root,
        members=tuple(name for name, _ in members),
        layers=tuple(layer.name for layer in fresh),
        bytes=sent,
        work=Work.of(fresh, manifest.layers, sent),
    )


def _many(nodes: Sequence[str]) -> str:
    return counted(len(nodes), "node")


def _some(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(nodes[:3]) + more


def _invisible(node: str) -> Problem:
    return Problem(
        what="the bundle cannot be read there, and staging is off",
        where=node,
        why="--stage never lets every node read the bundle where it lies",
        fix="use --stage auto, or put the offline root on a file system that every node sees",
    )


def _nothing_to_send(node: str) -> Problem:
    return Problem(
        what="the first node cannot see the bundle, so it cannot be sent to the others",
        where=node,
        why="a batch job is driven from its first node",
        fix="run it from the login node without --batch (it then uses salloc), or put the offline "
        "root on a file system that the nodes see; where a later build has replaced the bundle, "
        "print or submit the script again",
    )
