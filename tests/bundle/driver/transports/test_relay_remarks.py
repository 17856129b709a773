"""What a person is told after a relay."""

from __future__ import annotations

from bundle.driver.transports.phase_run import PhaseAnswers
from bundle.driver.transports.relay_source import remarks as remarks_of
from bundle.protocol.messages import Relayed
from bundle.transfer.relay_peers import SILENT_SECONDS

SIZE = 40_000_000
HERE = "the source"


def remarks(
    relayed: dict[str, Relayed],
    size: int,
    out_of_reach: dict[str, dict[str, str]] | None = None,
) -> tuple[str, ...]:
    """What is said once these nodes have told so much."""
    answers = PhaseAnswers({}, 1, print, "unpack")
    answers.relayed.update(relayed)
    answers.out_of_reach.update(out_of_reach or {})
    return remarks_of(answers, size)


def test_a_slow_node_is_named_with_its_rate() -> None:
    seconds = {"node01": 2.0, "node02": 2.2, "node03": 10.0, "node04": 2.1}
    relayed = {node: Relayed(node, seconds=taken) for node, taken in seconds.items()}
    assert remarks(relayed, SIZE) == (
        "node03 is slow: it received 4.0 MB/s, the median of the others is 19.0 MB/s",
    )


def test_nodes_that_are_about_as_fast_are_not() -> None:
    relayed = {"node01": Relayed("node01", seconds=0.1), "node02": Relayed("node02", seconds=1.9)}
    assert remarks(relayed, SIZE) == ()


def test_a_node_that_has_waited_for_a_silent_parent_is_not() -> None:
    waited = {"node01": 1.0, "node02": 1.0, "node03": 1.0 + SILENT_SECONDS + 0.5}
    relayed = {node: Relayed(node, seconds=taken) for node, taken in waited.items()}
    assert remarks(relayed, SIZE) == ()


def test_a_node_that_sent_damaged_bytes_is_named() -> None:
    relayed = {
        "node01": Relayed("node01", seconds=2.0, corrupt=("node03", "node03")),
        "node02": Relayed("node02", failure="no other node can be reached"),
    }
    assert remarks(relayed, SIZE) == (
        "node03 sent damaged bytes to node01, which took them from another node",
    )


def test_a_node_that_could_not_connect_to_another_is_named() -> None:
    """Where it got the file all the same; else that is said where it is."""
    relayed = {
        "node01": Relayed("node01", seconds=2.0),
        "node02": Relayed("node02", failure="no other node can be reached"),
    }
    apart = {"node01": {"node04": "connection refused"}, "node02": {HERE: "no answer"}}
    assert remarks(relayed, SIZE, apart) == (
        "node01 cannot connect to node04 (connection refused), and took the file from another node",
    )


def test_no_more_lines_than_a_person_reads() -> None:
    names = [f"node{number:02}" for number in range(100)]
    relayed = {name: Relayed(name, seconds=1.0) for name in names}
    lines = remarks(relayed, SIZE, {name: {"node00": "no answer"} for name in names})
    assert len(lines) == 9
    assert lines[-1] == "... and 92 more lines"


def test_one_of_two_nodes_is_slow() -> None:
    """The other is what it is compared with, and not the mean of both."""
    relayed = {"node01": Relayed("node01", seconds=2.0), "node02": Relayed("node02", seconds=10.0)}
    assert remarks(relayed, SIZE) == (
        "node02 is slow: it received 4.0 MB/s, the median of the others is 20.0 MB/s",
    )


def test_a_slow_node_is_named_where_others_have_failed() -> None:
    """Those that failed at once, or after long, count for nothing."""
    seconds = {"node01": 2.0, "node02": 10.0, "node03": 2.0}
    relayed = {node: Relayed(node, seconds=taken) for node, taken in seconds.items()}
    for number, taken in enumerate((0.1, 0.1, 0.1, 90.0), 4):
        name = f"node{number:02}"
        relayed[name] = Relayed(name, seconds=taken, failure="its relay ended")
    assert remarks(relayed, SIZE) == (
        "node02 is slow: it received 4.0 MB/s, the median of the others is 20.0 MB/s",
    )


def test_no_more_slow_nodes_than_a_person_reads() -> None:
    names = [f"node{number:02}" for number in range(40)]
    seconds = {name: 20.0 if number < 12 else 1.0 for number, name in enumerate(names)}
    lines = remarks({name: Relayed(name, seconds=seconds[name]) for name in names}, SIZE)
    assert len(lines) == 9
    assert lines[0] == "node00 is slow: it received 2.0 MB/s, the median of the others is 40.0 MB/s"
    assert lines[-1] == "... and 4 more lines"
