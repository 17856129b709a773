"""The model: the tree of a broadcast, its parts reckoned by hand, and that more takes longer."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bundle.driver.forecast import (
    BLOCK,
    Nodes,
    Staging,
    best_width,
    block_seconds,
    forecast,
    forecast_broadcast,
    forecast_relay,
    forecast_staging,
    forecast_step,
)
from bundle.driver.transports import slurm_text
from bundle.protocol.codec import DecodeError, decode, encode
from bundle.protocol.enumerations import Launcher
from bundle.protocol.events import StagingWork
from bundle.protocol.job import ASSUMED, Rates

ROUND = Rates(
    link=BLOCK / 0.02,
    exchange=0.01,
    broadcast=0.5,
    relay=0.4,
    relay_level=0.1,
    received=1e-9,
    byte=2e-9,
    file=1e-4,
    link_file=1e-5,
    environment=0.25,
    step=0.3,
    node=0.01,
    agent=0.1,
    probe=0.4,
    torchrun=2.0,
)
"""Rates that one can reckon with by hand: a block takes 20 ms to one node."""
TEN_BLOCKS = StagingWork(sent=10 * BLOCK, bytes=10**9, files=20_000)


@pytest.mark.parametrize(
    ("nodes", "width"), [(1, 1), (2, 2), (3, 3), (6, 2), (9, 3), (64, 4), (4_000, 4), (10_000, 3)]
)
def test_the_width_that_takes_least_time(nodes: int, width: int) -> None:
    assert best_width(nodes, 64, ROUND) == width
    assert slurm_text.choose_fanout(nodes, (23, 11)) == best_width(nodes, 64)
    costs = [block_seconds(nodes, one, ROUND) for one in range(1, 65)]
    assert block_seconds(nodes, width, ROUND) == min(costs)


@pytest.mark.parametrize(
    ("blocks", "nodes", "sent", "relayed"),
    [
        (10, Nodes(3), 0.5 + 10 * 0.07, 0.4 + 0.2 + 0.2),
        (10, Nodes(6), 0.5 + 10 * 0.1, 0.4 + 0.2 + 0.2),
        # The nodes of one machine share what carries the bytes.
        (10, Nodes(6, sharing=6), 0.5 + 10 * 0.14, 0.4 + 1.2 + 0.2),
        (0, Nodes(6), 0.0, 0.0),
        # A part of a block takes its part of the link, and is acknowledged as well.
        (0.5, Nodes(1), 0.5 + 0.01 + 0.01, 0.4 + 0.01 + 0.1),
        # A file that is relayed travels once; each level adds a little.
        (10, Nodes(14), 0.5 + 10 * 0.15, 0.4 + 0.2 + 0.3),
    ],
)
def test_sending_by_hand(blocks: float, nodes: Nodes, sent: float, relayed: float) -> None:
    size = int(blocks * BLOCK)
    assert forecast_broadcast(size, nodes, ROUND) == pytest.approx(sent)
    assert forecast_relay(size, nodes, ROUND) == pytest.approx(relayed)


def test_staging_by_hand() -> None:
    made = forecast_staging(TEN_BLOCKS, Nodes(3, cpus=4), ROUND, relayed=False)
    content, received = 20_000 * 1e-4 + 10**9 * 2e-9, 10 * BLOCK * 1e-9
    assert made.send == pytest.approx(1.2)
    assert made.unpack == pytest.approx(0.25 + (content + received) / 4)
    assert made.tail == pytest.approx(content / 4 / 10 + 0.125)
    assert made.seconds == made.send + made.tail
    relayed = forecast_staging(TEN_BLOCKS, Nodes(14, cpus=4), ROUND)
    assert relayed.send == forecast_relay(TEN_BLOCKS.sent, Nodes(14), ROUND)
    assert Staging(send=2.0, unpack=5.0, tail=0.5).seconds == 5.0  # hidden behind the unpacking
    links = StagingWork(sent=BLOCK, bytes=0, files=0, linked=30_000)  # are made by one process
    made = forecast_staging(links, Nodes(1, cpus=8), ROUND)
    assert made.unpack == pytest.approx(0.25 + 0.3 + BLOCK * 1e-9 / 8)
    made = forecast_staging(TEN_BLOCKS, Nodes(1000, cpus=4), ROUND, speed=BLOCK / 2)
    assert (made.send, made.unpack) == (pytest.approx(20), pytest.approx(0.25 + 1.0))
    # Nodes that share a machine share its CPUs.
    alone, three = Nodes(3, cpus=2), Nodes(3, cpus=2, sharing=3)
    assert forecast_staging(TEN_BLOCKS, three, ROUND).unpack == pytest.approx(
        0.25 * 1.5 + 3 * (forecast_staging(TEN_BLOCKS, alone, ROUND).unpack - 0.25)
    )
    for nodes, agents in ((alone, 0.1), (three, 0.15)):
        assert forecast_step(nodes, ROUND) == pytest.approx(0.3 + 0.03 + agents)


def test_the_phases_by_hand() -> None:
    nodes = Nodes(10, cpus=4)
    staged = forecast_staging(TEN_BLOCKS, nodes, ROUND)
    made = forecast([staged, staged], nodes, ROUND)
    step = 0.3 + 0.1 + 0.1
    found = made.preflight, made.stage, made.probe, made.launch
    assert found == pytest.approx((step, 2 * (staged.seconds + step), 0.4, 2.0))
    assert made.total == pytest.approx(step + 2.4 + made.stage)
    together = forecast([staged], nodes, ROUND)  # in the step that looked at the nodes
    assert together.stage == pytest.approx(staged.seconds)
    told = made.to_json()
    assert list(told) == [*made._fields, "total"]
    assert told["send"] == round(2 * staged.send, 3)
    # Nothing to stage takes no time, and torchrun begins while nodes that are ready are probed.
    made = forecast([], Nodes(2), ROUND, launcher=Launcher.SRUN)
    assert (made.send, made.unpack, made.stage) == (0, 0, 0)
    assert made.preflight == made.launch == pytest.approx(0.42)
    assert forecast([], Nodes(2), ROUND).launch == pytest.approx(2.0 - 0.4)


def test_rates_travel_as_json() -> None:
    assert decode(Rates, encode(ROUND)) == ROUND
    for raw in ([], {**asdict(ASSUMED), "colour": 1.0}, "fast"):
        with pytest.raises(DecodeError):
            decode(Rates, raw)
    for value in (0, -1.0, float("inf"), float("nan"), "1", None, True):
        with pytest.raises(ValueError, match=r"byte"):
            decode(Rates, {**asdict(ASSUMED), "byte": value})
