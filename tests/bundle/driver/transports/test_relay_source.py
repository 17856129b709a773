"""What a person is told after a relay."""

from __future__ import annotations

from bundle.driver.transports.relay_source import remarks
from bundle.protocol.answers import Relayed

SIZE = 40_000_000


def test_a_slow_node_is_named_with_its_rate() -> None:
    seconds = {"node01": 2.0, "node02": 2.2, "node03": 10.0, "node04": 2.1}
    relayed = {node: Relayed(node, seconds=taken) for node, taken in seconds.items()}
    assert remarks(relayed, SIZE) == (
        "node03 is slow: it received 4.0 MB/s, the median is 18.6 MB/s",
    )


def test_nodes_that_are_about_as_fast_are_not() -> None:
    relayed = {"node01": Relayed("node01", seconds=0.1), "node02": Relayed("node02", seconds=1.9)}
    assert remarks(relayed, SIZE) == ()


def test_a_node_that_sent_damaged_bytes_is_named() -> None:
    relayed = {
        "node01": Relayed("node01", seconds=2.0, corrupt=("node03", "node03")),
        "node02": Relayed("node02", failure="no other node can be reached"),
    }
    assert remarks(relayed, SIZE) == (
        "node03 sent damaged bytes to node01, which took them from another node",
    )
