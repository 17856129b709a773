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
    forecast_shared_staging,
    forecast_staging,
    forecast_step,
    levels,
    measure_staging_work,
)
from bundle.driver.transports import slurm_text
from bundle.protocol.codec import DecodeError, decode, encode
from bundle.protocol.enumerations import Launcher
from bundle.protocol.events import StagingWork
from bundle.protocol.job import ASSUMED, Rates
from stager.pack.bundle import Packed

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
    ("nodes", "width", "deep"),
    [
        *((1, 8, 1), (8, 8, 1), (9, 8, 2), (72, 8, 2), (73, 8, 3), (584, 8, 3), (585, 8, 4)),
        *((4_000, 8, 4), (4_680, 8, 4), (4_681, 8, 5), (10_000, 8, 5)),
        *((1, 1, 1), (5, 1, 5), (6, 2, 2), (7, 2, 3), (64, 64, 1), (65, 64, 2)),
    ],
)
def test_the_levels_of_the_tree(nodes: int, width: int, deep: int) -> None:
    assert levels(nodes, width) == deep


def test_a_block_takes_its_levels_times_the_receivers_of_one_sender() -> None:
    assert block_seconds(8, 8, ROUND) == pytest.approx(8 * 0.02 + 0.01)
    assert block_seconds(9, 8, ROUND) == pytest.approx(2 * 8 * 0.02 + 2 * 0.01)
    assert block_seconds(6, 2, ROUND) == pytest.approx(2 * 2 * 0.02 + 2 * 0.01)


@pytest.mark.parametrize(
    ("nodes", "width"), [(1, 1), (2, 2), (3, 3), (6, 2), (9, 3), (64, 4), (4_000, 4), (10_000, 3)]
)
def test_the_width_that_takes_least_time(nodes: int, width: int) -> None:
    assert best_width(nodes, 64, ROUND) == width
    assert slurm_text.choose_fanout(nodes, (23, 11)) == best_width(nodes, 64)
    costs = [block_seconds(nodes, one, ROUND) for one in range(1, 65)]
    assert block_seconds(nodes, width, ROUND) == min(costs)


def test_sending_by_hand() -> None:
    for nodes, block in ((Nodes(3), 0.07), (Nodes(6), 0.1), (Nodes(6, sharing=6), 0.14)):
        made = forecast_broadcast(10 * BLOCK, nodes, ROUND)
        assert made == pytest.approx(0.5 + 10 * block)
    assert forecast_broadcast(0, Nodes(6), ROUND) == 0.0
    # A part of a block takes its part of the link, and is acknowledged as well.
    assert forecast_broadcast(BLOCK // 2, Nodes(1), ROUND) == pytest.approx(0.5 + 0.01 + 0.01)


def test_relaying_by_hand() -> None:
    """The file travels once; each level adds a little."""
    assert forecast_relay(10 * BLOCK, Nodes(1), ROUND) == pytest.approx(0.4 + 0.2 + 0.1)
    assert forecast_relay(10 * BLOCK, Nodes(14), ROUND) == pytest.approx(0.4 + 0.2 + 0.3)
    assert forecast_relay(0, Nodes(14), ROUND) == 0.0
    # The nodes of one machine share what carries the bytes.
    assert forecast_relay(10 * BLOCK, Nodes(6, sharing=6), ROUND) == pytest.approx(0.4 + 1.2 + 0.2)
    made = forecast_staging(TEN_BLOCKS, Nodes(14, cpus=4), ROUND)
    assert made.send == forecast_relay(TEN_BLOCKS.sent, Nodes(14), ROUND)


def test_staging_by_hand() -> None:
    made = forecast_staging(TEN_BLOCKS, Nodes(3, cpus=4), ROUND, relayed=False)
    content, received = 20_000 * 1e-4 + 10**9 * 2e-9, 10 * BLOCK * 1e-9
    assert made.send == pytest.approx(1.2)
    assert made.unpack == pytest.approx(0.25 + (content + received) / 4)
    assert made.tail == pytest.approx(content / 4 / 10 + 0.125)
    assert made.seconds == made.send + made.tail
    assert Staging(send=2.0, unpack=5.0, tail=0.5).seconds == 5.0  # hidden behind the unpacking
    links = StagingWork(sent=BLOCK, bytes=0, files=0, linked=30_000)  # are made by one process
    made = forecast_staging(links, Nodes(1, cpus=8), ROUND)
    assert made.unpack == pytest.approx(0.25 + 0.3 + BLOCK * 1e-9 / 8)
    made = forecast_shared_staging(TEN_BLOCKS, Nodes(1000, cpus=4), BLOCK / 2, ROUND)
    assert (made.send, made.unpack) == (pytest.approx(20), pytest.approx(0.25 + 1.0))


def test_nodes_that_share_a_machine_share_its_cpus() -> None:
    alone, three = Nodes(3, cpus=2), Nodes(3, cpus=2, sharing=3)
    assert forecast_staging(TEN_BLOCKS, three, ROUND).unpack == pytest.approx(
        0.25 * 1.5 + 3 * (forecast_staging(TEN_BLOCKS, alone, ROUND).unpack - 0.25)
    )
    assert forecast_step(alone, ROUND) == pytest.approx(0.3 + 0.03 + 0.1)
    assert forecast_step(three, ROUND) == pytest.approx(0.3 + 0.03 + 0.15)
    assert forecast_step(Nodes(2, cpus=4, sharing=2), ROUND) == pytest.approx(0.3 + 0.02 + 0.1)


def test_the_phases_by_hand() -> None:
    nodes = Nodes(10, cpus=4)
    staged = forecast_staging(TEN_BLOCKS, nodes, ROUND)
    made = forecast([staged, staged], nodes, ROUND)
    step = 0.3 + 0.1 + 0.1
    assert made.preflight == pytest.approx(step)
    assert made.stage == pytest.approx(2 * (staged.seconds + step))
    assert made.probe == pytest.approx(0.4)
    assert made.launch == pytest.approx(2.0)
    assert made.total == pytest.approx(step + 2.4 + made.stage)
    together = forecast([staged], nodes, ROUND)  # in the step that looked at the nodes
    assert together.stage == pytest.approx(staged.seconds)
    told = made.to_json()
    assert list(told) == [*made._fields, "total"]
    assert told["send"] == round(2 * staged.send, 3)


def test_nothing_to_stage_takes_no_time() -> None:
    """And torchrun begins while nodes that are ready are probed."""
    made = forecast([], Nodes(2), ROUND, launcher=Launcher.SRUN)
    assert (made.send, made.unpack, made.stage) == (0, 0, 0)
    assert made.preflight == made.launch == pytest.approx(0.42)
    assert forecast([], Nodes(2), ROUND).launch == pytest.approx(2.0 - 0.4)


def test_the_work_of_layers(standard: Packed) -> None:
    layers = standard.manifest.layers
    made = measure_staging_work(layers[:2], layers, 4096)
    assert made.files + made.linked == standard.manifest.files
    assert made.bytes == sum(layer.unpacked_size for layer in layers[:2])
    assert measure_staging_work(layers, layers, 1).linked == 0


# --- rates ---------------------------------------------------------------------------------------


def test_rates_that_are_scaled() -> None:
    nodes = Nodes(3, cpus=4)
    twice = ROUND.scale_rates(send=2.0)
    assert forecast_broadcast(10 * BLOCK, nodes, twice) == pytest.approx(
        2 * forecast_broadcast(10 * BLOCK, nodes, ROUND)
    )
    unpacked = forecast_staging(TEN_BLOCKS, nodes, ROUND.scale_rates(unpack=3.0))
    assert unpacked.unpack == pytest.approx(3 * forecast_staging(TEN_BLOCKS, nodes, ROUND).unpack)
    assert unpacked.send == forecast_staging(TEN_BLOCKS, nodes, ROUND).send
    assert forecast_step(nodes, ROUND.scale_rates(step=0.5)) == pytest.approx(
        forecast_step(nodes, ROUND) / 2
    )
    assert ROUND.scale_rates() == ROUND


def test_rates_travel_as_json() -> None:
    assert decode(Rates, encode(ROUND)) == ROUND
    for raw in ([], {**asdict(ASSUMED), "colour": 1.0}, "fast"):
        with pytest.raises(DecodeError):
            decode(Rates, raw)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "1", None, True])
def test_a_rate_that_no_clock_has_shown_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"byte"):
        decode(Rates, {**asdict(ASSUMED), "byte": value})
