"""What travels to which node: every way to decide, and that the sizes are the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bundle.driver.forecast import (
    Nodes,
    forecast_shared_staging,
    forecast_staging,
    measure_staging_work,
)
from bundle.driver.plan import (
    NodeGroup,
    Plan,
    TransferRule,
    forecast_nodes,
    make_plan,
    write_excerpt,
)
from bundle.format.archive import BundleFile
from bundle.format.manifest import Manifest
from bundle.protocol.enumerations import Stage, TransferWay
from bundle.protocol.job import ASSUMED
from bundle.protocol.messages import HostFacts, PreflightAnswer
from stager.pack.bundle import Packed
from tests.support.generated import generated

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


@pytest.mark.parametrize("stage", ["auto", "always", "never"])
def test_where_all_is_there_nothing_travels(manifest: Manifest, stage: str) -> None:
    facts = {"n1": READY, "n2": READY}
    for seen in (manifest, None):
        plan, problems = make_plan(facts, TransferRule(Stage(stage)), seen, SIZE)
        assert ways(plan) == [("present", ("n1", "n2"))]
        assert (plan.bytes, problems) == (0, {})
        assert plan.why == "nothing to send: every node has the environment"


def test_a_shared_bundle_that_is_read_quickly_is_read_where_it_lies(manifest: Manifest) -> None:
    facts = {"n1": node(), "n2": READY, "n3": node()}
    plan, problems = make_plan(facts, AUTO, manifest, SIZE)
    assert ways(plan) == [("present", ("n2",)), ("shared", ("n1", "n3"))]
    assert (plan.bytes, problems) == (0, {})
    assert plan.why == (
        "2 nodes read the shared bundle: reading from the shared disk (about 0.3 s) is quicker "
        "than sending (1.0 s)"
    )


def test_one_that_is_read_slowly_on_some_node_is_sent(manifest: Manifest) -> None:
    facts = {"n1": node(), "n2": node(SLOW)}
    plan, problems = make_plan(facts, AUTO, manifest, SIZE)
    assert ways(plan) == [("relay", ("n1", "n2"))]
    assert (plan.bytes, problems) == (SIZE, {})
    assert plan.why == (
        "relay to 2 nodes: the shared bundle is slow (1.5 MB/s on n2, about 200.2 s; sending 1.0 s)"
    )


def test_one_that_some_node_cannot_see_is_sent(manifest: Manifest) -> None:
    facts: Facts = {"n1": node(), "n2": node(None), "n3": READY}
    plan, problems = make_plan(facts, AUTO, manifest, SIZE)
    assert ways(plan) == [("present", ("n3",)), ("relay", ("n1", "n2"))]
    assert problems == {}
    assert plan.why == "relay to 2 nodes: n2 cannot see the bundle"
    many = {f"n{number}": node(None) for number in range(5)}
    plan, _ = make_plan(many, AUTO, manifest, SIZE)
    assert plan.why == "relay to 5 nodes: n0, n1, n2 and 2 more cannot see the bundle"


def test_the_users_way_of_sending(manifest: Manifest) -> None:
    facts = {"n1": node(None), "n2": node(None, root="/scratch/stager-7")}
    plan, _ = make_plan(facts, TransferRule(Stage.ALWAYS, TransferWay.SBCAST), manifest, SIZE)
    # It writes to the same path everywhere; nodes of a relay may have roots of their own.
    assert ways(plan) == [("sbcast", ("n1",)), ("sbcast", ("n2",))]
    assert plan.why == "sbcast to 2 nodes: sending is asked for"
    plan, _ = make_plan(facts, TransferRule(Stage.ALWAYS, TransferWay.RELAY), manifest, SIZE)
    assert ways(plan) == [("relay", ("n1", "n2"))]
    facts["n2"] = node(None, address="", root="/scratch/stager-7")
    plan, _ = make_plan(facts, TransferRule(without_relay="ssh"), manifest, SIZE)
    assert ways(plan) == [("ssh", ("n1",)), ("ssh", ("n2",))]  # where there is no Slurm
    assert plan.why.startswith("ssh to 2 nodes: ")


@pytest.mark.parametrize("way", ["auto", "relay"])
def test_nodes_without_an_address_cannot_relay(manifest: Manifest, way: str) -> None:
    facts = {"n1": node(None), "n2": node(None, address="")}
    plan, _ = make_plan(facts, TransferRule(way=TransferWay(way)), manifest, SIZE)
    assert ways(plan) == [("sbcast", ("n1", "n2"))]
    assert plan.why == (
        "sbcast to 2 nodes: n1, n2 cannot see the bundle; no relay, as n2 has no address for others"
    )


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


def test_each_group_that_has_something_to_do_is_foretold(manifest: Manifest) -> None:
    facts: Facts = {"n1": node(None), "n2": READY, "n3": node(None, root="/scratch/stager-7")}
    plan, _ = make_plan(facts, AUTO, manifest, SIZE)
    work = measure_staging_work(manifest.layers, manifest.layers, SIZE)
    assert plan.staged == (forecast_staging(work, Nodes(2, cpus=1)),)
    plan, _ = make_plan(facts, TransferRule(way=TransferWay.SBCAST), manifest, SIZE)
    assert plan.staged == (forecast_staging(work, Nodes(1, cpus=1), relayed=False),) * 2
    assert make_plan({"n2": READY}, AUTO, manifest, SIZE)[0].staged == ()
    plan, _ = make_plan({"n1": node()}, AUTO, manifest, SIZE)
    assert plan.staged == (forecast_shared_staging(work, Nodes(1, cpus=1), FAST),)


def test_a_slow_network_makes_reading_the_shared_bundle_pay(manifest: Manifest) -> None:
    facts = {"n1": node(30e6), "n2": node(30e6)}
    for scale, way in ((1, "relay"), (15, "shared")):
        plan, _ = make_plan(facts, AUTO, manifest, SIZE, ASSUMED.scale_rates(send=scale))
        assert ways(plan) == [(way, ("n1", "n2"))]


def test_only_what_is_missing_is_weighed(manifest: Manifest) -> None:
    """A few kilobytes are read as quickly as they are sent, however slow the file system."""
    old, fresh = {"lacks": (0,), "has_wheel": True}, {"lacks": range(len(manifest.layers))}
    for lacks, way in ((old, "shared"), (fresh, "relay")):
        assert ways(make_plan({"n1": node(SLOW, **lacks)}, AUTO, manifest, SIZE)[0]) == [
            (way, ("n1",))
        ]


def on_cpus(cpus: int) -> PreflightAnswer:
    return PreflightAnswer(host=generated(HostFacts, 0, cpus=cpus))


def test_the_nodes_as_the_model_sees_them() -> None:
    facts: Facts = {"n1": on_cpus(8), "n2": on_cpus(4), "n3": PreflightAnswer("n3")}
    assert forecast_nodes(("n1", "n2"), facts) == Nodes(2, cpus=4)
    assert forecast_nodes(("n1", "n3"), facts, sharing=2) == Nodes(2, cpus=1, sharing=2)
    assert forecast_nodes((), facts) == Nodes(1, cpus=1)
