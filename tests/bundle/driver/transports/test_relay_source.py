"""What a person is told after a relay."""

from __future__ import annotations

import contextlib
import socket

import pytest

from bundle.driver.transports.phase_answers import PhaseAnswers
from bundle.driver.transports.relay_source import in_network_order, listen, why_hopeless
from bundle.driver.transports.relay_source import remarks as remarks_of
from bundle.protocol.answers import Ready, Relayed
from bundle.transfer.relay_parent import SILENT_SECONDS

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
        "node03 is slow: it received 4.0 MB/s, the median is 18.6 MB/s",
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


# --- whether nodes reach each other --------------------------------------------------------------

NODES = tuple(f"node{number:02}" for number in range(1, 41))


def test_where_all_reach_each_other_there_is_hope() -> None:
    assert why_hopeless(NODES, {}) == ""


@pytest.mark.parametrize(("cut_off", "hope"), [(20, True), (21, False)])
def test_where_most_nodes_reach_no_other_there_is_none(cut_off: int, hope: bool) -> None:
    apart = {name: {"node33": "connection refused"} for name in NODES[:cut_off]}
    why = (
        ""
        if hope
        else (
            "most nodes cannot connect to others, node01 to node33 for example: connection refused"
        )
    )
    assert why_hopeless(NODES, apart) == why


def test_a_few_nodes_that_reach_no_other_are_sent_to_from_here() -> None:
    apart = {name: {"node07": "no answer"} for name in NODES[:6]}
    assert why_hopeless(NODES[:7], apart) == ""
    apart["node07"] = {"node01": "no answer"}
    assert why_hopeless(NODES[:7], apart)


def test_where_most_that_tried_this_host_do_not_reach_it_there_is_none() -> None:
    """One node in two tries it here."""
    tried = NODES[1::2]
    apart = {name: {HERE: "no answer within 1.5 s"} for name in tried[:10]}
    assert why_hopeless(NODES, apart) == ""
    apart[tried[10]] = {HERE: "no answer within 1.5 s"}
    assert why_hopeless(NODES, apart) == (
        "nodes cannot connect to this host, node02 for example: no answer within 1.5 s"
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_a_few_nodes_all_try_this_host(count: int) -> None:
    apart = {name: {HERE: "no answer"} for name in NODES[:count]}
    assert why_hopeless(NODES[:count], apart)


# --- their order ---------------------------------------------------------------------------------


def test_nodes_below_one_switch_are_neighbours() -> None:
    switches = {"node01": "top.a", "node02": "top.b", "node03": "top.a", "node04": "top.b"}
    listening = {name: Ready(name, switches=above) for name, above in switches.items()}
    order = in_network_order(switches, listening)
    assert order == ("node01", "node03", "node02", "node04")


def test_without_switches_the_order_is_that_of_the_list() -> None:
    """And nodes that do not listen are left out."""
    names = ("node2", "node10", "node1", "login")
    listening = {name: Ready(name) for name in names[:3]}
    assert in_network_order(names, listening) == names[:3]


# --- where the source listens --------------------------------------------------------------------


def test_the_source_listens_in_the_range_that_a_firewall_leaves_open() -> None:
    with contextlib.closing(listen(None)) as one:
        taken = one.getsockname()[1]
        with contextlib.closing(listen(range(taken, taken + 3))) as other:
            assert other.getsockname()[1] in (taken + 1, taken + 2)


def test_a_range_in_which_all_ports_are_taken() -> None:
    with contextlib.closing(listen(None)) as one:
        taken = one.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            listen(range(taken, taken + 1))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_nodes_may_come_by_either_protocol(address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with contextlib.closing(listen(None)) as source:
        port = source.getsockname()[1]
        socket.create_connection((address, port), timeout=10).close()
