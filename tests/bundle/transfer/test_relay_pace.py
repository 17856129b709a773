"""When the chunks of one tree come too slowly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bundle.driver.transports import relay_source
from bundle.driver.transports.phase_run import PhaseAnswers
from bundle.protocol.messages import Relayed
from bundle.transfer.relay import Pace
from bundle.transfer.relay_chunks import MOST_CHUNK_BYTES, ChunkFile, parent
from tests.support.namespaces import namespace
from tests.support.needs import needs

TOTAL = 300
SECONDS = 2.0


@pytest.fixture
def file(tmp_path: Path) -> ChunkFile:
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    return ChunkFile(handle, 2 * TOTAL * MOST_CHUNK_BYTES)


def slow_times(file: ChunkFile, pace: Pace, began: int, mine: list[int], other: int) -> list[int]:
    """Let so many chunks come in each second; return the seconds after which it was slow."""
    slow = []
    for second, chunks in enumerate(mine, began + 1):
        for tree, more in enumerate((chunks, other)):
            file.have[tree] = min(file.have[tree] + more, TOTAL)
        if pace.is_slow(float(second)):
            slow.append(second)
    return slow


def test_a_rate_near_the_other_halfs_is_not_slow(file: ChunkFile) -> None:
    pace = Pace(file, 0, SECONDS, 0.0)
    assert slow_times(file, pace, 0, [12] * 10, other=20) == []


def test_a_low_rate_is_told_once_for_each_measurement(file: ChunkFile) -> None:
    pace = Pace(file, 0, SECONDS, 0.0)
    assert slow_times(file, pace, 0, [5] * 6, other=20) == [2, 4, 6]


def test_what_was_well_for_long_is_slow_as_soon_as_it_is(file: ChunkFile) -> None:
    pace = Pace(file, 0, SECONDS, 0.0)
    assert slow_times(file, pace, 0, [10] * 20 + [1] * 2, other=10) == [22]


def test_a_half_that_is_ahead_is_not_slow(file: ChunkFile) -> None:
    file.have[0] = 200
    pace = Pace(file, 0, SECONDS, 0.0)
    assert slow_times(file, pace, 0, [1] * 8, other=20) == []


def test_where_both_halves_stand_still_nothing_is_slow(file: ChunkFile) -> None:
    file.have[:] = [40, 50]
    pace = Pace(file, 0, SECONDS, 0.0)
    assert slow_times(file, pace, 0, [0] * 60, other=0) == []
    assert slow_times(file, pace, 60, [10] * 4, other=10) == []


def test_few_chunks_are_no_measure(file: ChunkFile) -> None:
    pace = Pace(file, 0, SECONDS, 0.0)
    assert slow_times(file, pace, 0, [0] * 7, other=1) == []
    assert slow_times(file, pace, 7, [0], other=1) == [8]


def test_once_the_other_half_is_there_its_mean_rate_counts(file: ChunkFile) -> None:
    pace = Pace(file, 0, SECONDS, 0.0)
    assert slow_times(file, pace, 0, [15] * 10, other=30) == []
    assert file.have[1] == TOTAL
    pace.restart(10.0)
    assert slow_times(file, pace, 10, [20] * 4, other=0) == []
    assert slow_times(file, pace, 14, [3] * 4, other=0) == [16, 18]


def test_a_file_of_one_chunk_has_no_other_half(tmp_path: Path) -> None:
    handle = os.open(tmp_path / "small", os.O_RDWR | os.O_CREAT)
    pace = Pace(ChunkFile(handle, 17), 0, SECONDS, 0.0)
    assert not any(pace.is_slow(float(second)) for second in range(100))


# --- a node whose link is slow --------------------------------------------------------------------

_SLOW = parent(1, 7, 0)
"""It has two children in one tree, which have children in the other."""
_RELAY = f"""
from pathlib import Path
from random import Random
from tests.torture.network import Network
from tests.torture.relay_nodes import Swarm
from tests.torture.rounds import NotHere

try:
    network = Network(8, "80mbit")
    network.shape({_SLOW}, "3mbit")
except NotHere as exc:
    print(json.dumps(str(exc)))
    sys.exit()
swarm = Swarm(Path({{folder!r}}), network, 7, {{size}}, Random(7))
swarm.start({{{{}}}})
swarm.begin()
swarm.await_outcomes(300)
for place in swarm.outcomes:
    swarm.assert_whole(place)
print(json.dumps({{{{place: outcome.seconds for place, outcome in swarm.outcomes.items()}}}}))
swarm.close()
"""


def test_a_node_with_a_slow_link_is_slow_and_those_below_it_are_not(tmp_path: Path) -> None:
    """They go on above it, and it alone is named."""
    needs("ip")
    size = 6_000_000  # 0.6 s at the usual rate, 16 s at the low one
    for attempt in range(3):  # a node that gets no processor for long is slow as well, and named
        folder = tmp_path / str(attempt)
        folder.mkdir()
        seconds = namespace("-n", "", _RELAY.format(folder=str(folder), size=size))
        if isinstance(seconds, str):
            pytest.skip(seconds)
        assert isinstance(seconds, dict)
        answers = PhaseAnswers({}, 7, print, "unpack")
        answers.relayed.update(
            {f"node{place}": Relayed(seconds=taken) for place, taken in seconds.items()}
        )
        said = relay_source.remarks(answers, size)
        if len(said) == 1:
            break
    [remark] = said
    assert remark.startswith(f"node{_SLOW} is slow: it received "), (remark, seconds)
