"""The model of transfer and phases: its limits, its order, and what it shares with the code."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bundle.driver.forecast import block_seconds
from bundle.protocol.events import StagingWork
from bundle.protocol.job import ASSUMED

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks.model import scale  # noqa: E402
from benchmarks.model.job import PhaseCosts, phase_seconds  # noqa: E402
from benchmarks.model.transfer import Site, StagingCosts, broadcast_block, relay, sbcast  # noqa: E402

MB = 10**6
# Programs that take no time: only links count.
NAMES = (field.name for field in fields(StagingCosts))
FREE = StagingCosts(**{**dict.fromkeys(NAMES, 0.0), "efficiency": 1.0})
REAL = replace(FREE, receive_byte=1.2e-9, send_byte=0.6e-9, unpack_byte=1.2e-9)
WORK = StagingWork(sent=40 * MB, bytes=40 * MB, files=100)
LINK = 25.0 * MB
NO_LATENCY = Site(nodes=1, link=LINK, latency=0.0)
PHASE = PhaseCosts(fixed=1.0, driver=0.01, agent=0.2)


def wire(nodes: int, **more: object) -> float:
    return relay(WORK, replace(NO_LATENCY, nodes=nodes, **more), FREE).sent  # type: ignore[arg-type]


def test_one_node_takes_the_size_over_the_rate() -> None:
    assert wire(1) == pytest.approx(40 * MB / LINK)


def test_more_nodes_take_longer_by_chunks_on_a_path_and_not_by_files() -> None:
    counts = (1, 2, 4, 8, 16, 32, 64)
    seconds = [wire(nodes) for nodes in counts]
    assert seconds == sorted(seconds)
    assert seconds[-1] < 1.1 * seconds[0]


@pytest.mark.parametrize(
    "worse",
    [
        {"link": LINK / 2},
        {"source_link": LINK / 2},
        {"latency": 0.01},
        {"disk": 5.0 * MB},
        {"cpus": 1, "shared": True},
    ],
    ids=lambda worse: next(iter(worse)),
)
def test_a_worse_site_takes_longer(worse: dict[str, float]) -> None:
    site = replace(NO_LATENCY, nodes=8)
    before = relay(WORK, site, REAL).unpacked
    assert relay(WORK, replace(site, **worse), REAL).unpacked > before  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "depth"), [(2, 4), (3, 3), (8, 1), (8, 2), (8, 3)])
def test_a_block_of_a_full_tree_takes_what_the_forecast_says(width: int, depth: int) -> None:
    nodes = sum(width**level for level in range(1, depth + 1))
    expected = block_seconds(nodes, width)
    assert broadcast_block(nodes, width, ASSUMED.link, ASSUMED.exchange) == pytest.approx(expected)


def test_sbcast_grows_with_the_nodes_and_the_relay_does_not() -> None:
    few, many = (replace(NO_LATENCY, nodes=nodes) for nodes in (2, 64))
    assert sbcast(WORK, many, FREE).sent > 4 * sbcast(WORK, few, FREE).sent
    assert relay(WORK, many, FREE).sent < 1.1 * relay(WORK, few, FREE).sent


def test_nodes_of_their_own_work_at_the_same_time() -> None:
    site = Site(nodes=100, cpus=2)
    assert phase_seconds(PHASE, site) == pytest.approx(1.0 + 100 * 0.01 + 0.2, rel=0.1)


# --- fitting, and what is committed --------------------------------------------------------------


def test_the_page_has_the_assumptions_of_the_code() -> None:
    page = (REPO / "docs" / "scale.md").read_text(encoding="utf-8")
    for value in (f"{scale.WORK.files:,}", f"{scale.SITE.cpus} CPUs", f"{scale.IMPORTS:g} s"):
        assert value in page
