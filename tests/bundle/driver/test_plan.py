"""What travels to which node: every way to decide, and that the sizes are the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bundle.driver.plan import NodeGroup, Plan, TransferRule, make_plan, write_excerpt
from bundle.format.archive import BundleFile
from bundle.format.manifest import Manifest
from bundle.protocol.enumerations import Stage, TransferWay
from bundle.protocol.job import ASSUMED
from bundle.protocol.messages import PreflightAnswer
from stager.pack.bundle import Packed

Facts = dict[str, PreflightAnswer]
SIZE = 300_000_000
FAST, SLOW = 15e9, 1.5e6
AUTO, ALWAYS, NEVER = map(TransferRule, (Stage.AUTO, Stage.ALWAYS, Stage.NEVER))


@pytest.fixture
def manifest(standard: Packed) -> Manifest:
    return standard.manifest


def node(rate: float | None = FAST, root: str = "/tmp/stager-7", **more: Any) -> PreflightAnswer:
    return PreflightAnswer(**{"rate": rate, "root": root, "address": "10.0.0.7", **more})


READY = node(None, ready=True)


def ways(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(group.how, group.nodes) for group in plan.groups]


ELSEWHERE = "/scratch/stager-7"


@pytest.mark.parametrize(
    ("facts", "rule", "expected", "why"),
    [
        *(
            (
                {"n1": READY, "n2": READY}, rule, [("present", ("n1", "n2"))],
                "nothing to send: every node has the environment",
            )
            for rule in (AUTO, ALWAYS, NEVER)
        ),
        (
            {"n1": node(), "n2": READY, "n3": node()}, AUTO,
            [("present", ("n2",)), ("shared", ("n1", "n3"))],
            "2 nodes read the shared bundle: reading from the shared disk (about 0.3 s) is quicker "
            "than sending (1.0 s)",
        ),
        (
            {"n1": node(), "n2": node(SLOW)}, AUTO, [("relay", ("n1", "n2"))],
            "relay to 2 nodes: the shared bundle is slow (1.5 MB/s on n2, about 200.2 s; sending "
            "1.0 s)",
        ),
        (
            {"n1": node(), "n2": node(None), "n3": READY}, AUTO,
            [("present", ("n3",)), ("relay", ("n1", "n2"))],
            "relay to 2 nodes: n2 cannot see the bundle",
        ),
        # sbcast writes to the same path everywhere; nodes of a relay may have roots of their own.
        (
            {"n1": node(None), "n2": node(None, root=ELSEWHERE)},
            TransferRule(Stage.ALWAYS, TransferWay.SBCAST),
            [("sbcast", ("n1",)), ("sbcast", ("n2",))],
            "sbcast to 2 nodes: sending is asked for",
        ),
        (
            {"n1": node(None), "n2": node(None, root=ELSEWHERE)},
            TransferRule(Stage.ALWAYS, TransferWay.RELAY), [("relay", ("n1", "n2"))],
            "relay to 2 nodes: sending is asked for",
        ),
        (
            {"n1": node(None), "n2": node(None, address="")}, TransferRule(without_relay="ssh"),
            [("ssh", ("n1", "n2"))],
            "ssh to 2 nodes: n1, n2 cannot see the bundle; no relay, as n2 has no address for "
            "others",
        ),
    ],
)  # fmt: skip
def test_each_way_and_its_reason(
    manifest: Manifest,
    facts: Facts,
    rule: TransferRule,
    expected: list[tuple[str, tuple[str, ...]]],
    why: str,
) -> None:
    plan, problems = make_plan(facts, rule, manifest, SIZE)
    assert (ways(plan), plan.why, problems) == (expected, why, {})
    assert plan.bytes == SIZE * sum(how not in ("present", "shared") for how, _ in expected)


def test_no_sending_on_request(manifest: Manifest) -> None:
    facts: Facts = {"n1": node(SLOW), "n2": node(None), "n3": READY}
    plan, problems = make_plan(facts, NEVER, manifest, SIZE)
    assert ways(plan) == [("present", ("n3",)), ("shared", ("n1",))]
    assert plan.why == "2 nodes to read the shared bundle, as asked for"
    assert {name: one.what for name, one in problems.items()} == {
        "n2": "the bundle cannot be read there, and staging is off"
    }


@pytest.mark.parametrize(
    ("stage", "others", "without"),
    [
        ("auto", {"n2": node()}, []),
        ("auto", {"n2": node(SLOW)}, []),
        ("auto", {"n2": node(None)}, ["n2"]),
        ("auto", {"n2": node(None), "n3": node()}, ["n2"]),
        ("always", {"n2": node()}, ["n2"]),
        ("always", {"n2": node(None), "n3": node()}, ["n2"]),
    ],
)
def test_a_driver_that_cannot_see_the_bundle_cannot_send_it(
    stage: str, others: Facts, without: list[str]
) -> None:
    """In a batch job it is the first node, which may have the environment already."""
    plan, problems = make_plan({"n1": READY, **others}, TransferRule(Stage(stage)), None, 0)
    assert sorted(problems) == without
    assert all("cannot see the bundle" in one.what for one in problems.values())
    shared = tuple(name for name in others if name not in without)
    assert ways(plan) == [("present", ("n1",)), *([("shared", shared)] if shared else [])]
    assert plan.bytes == 0
    if not problems:
        assert "read the shared bundle" in plan.why


def test_nodes_with_other_roots_are_served_together(manifest: Manifest) -> None:
    """And so are those that lack other layers: each takes what is missing anywhere."""
    facts: Facts = {
        "n1": node(None, lacks=(0,), has_wheel=True),
        "n2": node(None, root="/scratch/stager-7", lacks=(0, 1), has_wheel=True),
        "n3": node(None, lacks=(1,), has_wheel=True),
    }
    plan, _ = make_plan(facts, AUTO, manifest, SIZE)
    (group,) = plan.groups
    assert group.nodes == ("n1", "n2", "n3")
    assert group.layers == tuple(layer.name for layer in manifest.layers[:2])
    assert plan.bytes == group.bytes


def sent(manifest: Manifest, *nodes: dict[str, Any]) -> NodeGroup:
    facts = {f"n{number}": node(None, **one) for number, one in enumerate(nodes)}
    plan, _ = make_plan(facts, AUTO, manifest, SIZE)
    (group,) = plan.groups
    return group


def test_nodes_without_an_older_environment_get_all_of_it(manifest: Manifest) -> None:
    every = tuple(range(len(manifest.layers)))
    for lacks in ({}, {"lacks": every}, {"lacks": every, "has_wheel": True}):
        group = sent(manifest, lacks)
        assert (group.members, group.bytes) == (None, SIZE)
        assert group.layers == tuple(layer.name for layer in manifest.layers)
    assert sent(manifest, {"lacks": (0,), "has_wheel": True}, {}).members is None


def test_what_any_node_of_a_group_lacks_is_sent_to_all(manifest: Manifest) -> None:
    layers = manifest.layers
    has_wheel = {"has_wheel": True}
    group = sent(
        manifest, {"lacks": (2,), **has_wheel}, {"lacks": (0,), **has_wheel}, {"lacks": ()}
    )
    assert manifest.decompressor is None or group.members is not None
    assert group.layers == (layers[0].name, layers[2].name)
    wheel = [manifest.decompressor.name] if manifest.decompressor else []
    lacking = [name for layer in (layers[0], layers[2]) for name, _ in layer.members]
    assert sorted(group.members or ()) == sorted([*wheel, *lacking])
    # A bundle with fewer packages than the last one.
    group = sent(manifest, {"lacks": (), **has_wheel})
    assert (group.members, group.layers) == ((), ())


@pytest.mark.parametrize("lacks", [(), (1, 3)])
@pytest.mark.parametrize("has_wheel", [True, False])
def test_the_size_is_that_of_the_file_that_is_written(
    standard: Packed, tmp_path: Path, lacks: tuple[int, ...], has_wheel: bool
) -> None:
    group = sent(standard.manifest, {"lacks": lacks, "has_wheel": has_wheel})
    assert group.members is not None
    path = tmp_path / "parts.tar"
    with BundleFile(str(standard.path)) as bundle:
        written = write_excerpt(bundle, group.members, str(path))
    assert group.bytes == written == path.stat().st_size


def test_a_slow_network_makes_reading_the_shared_bundle_pay(manifest: Manifest) -> None:
    facts = {"n1": node(30e6), "n2": node(30e6)}
    for scale, way in ((1, "relay"), (15, "shared")):
        plan, _ = make_plan(facts, AUTO, manifest, SIZE, ASSUMED.scale_rates(send=scale))
        assert ways(plan) == [(way, ("n1", "n2"))]
