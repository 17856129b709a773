"""Who is named where bytes of a relay come damaged: their sender, or their receiver."""

from __future__ import annotations

import pytest

from bundle.driver.transports.relay_source import damage_lines
from bundle.protocol.messages import Relayed


def lines(failure: str = "", **corrupt: str) -> list[str]:
    """What is said once nodes have reported from whom bytes came damaged."""
    return damage_lines(
        {
            node: Relayed(node, corrupt=tuple(senders.split()), failure=failure)
            for node, senders in corrupt.items()
        }
    )


@pytest.mark.parametrize(
    ("corrupt", "named"),
    [
        pytest.param({"n1": ""}, [], id="nothing came damaged"),
        pytest.param({"n1": "n2 n2", "n3": ""}, ["n2 sent"], id="one sender"),
        pytest.param({"n1": "n2", "n3": "n2"}, ["n2 sent", "n2 sent"], id="to two nodes"),
        pytest.param({"n1": "n2 n4", "n3": ""}, ["n1 damages"], id="from two senders to one node"),
        pytest.param(
            {"n1": "n2 n4", "n3": "n4 n2"}, ["n1 damages", "n3 damages"], id="two such nodes"
        ),
        pytest.param(
            {"n1": "n2 n4", "n3": "n2", "n5": "n4"},
            ["n2 sent", "n4 sent", "n2 sent", "n4 sent"],
            id="two senders, and each fails another node",
        ),
        pytest.param(
            {"n1": "n2 n4", "n3": "n2"}, ["n2 sent", "n4 sent", "n2 sent"], id="one of them does"
        ),
        pytest.param(
            {"n1": "n2 n4 n5", "n3": "n5"}, ["n1 damages", "n5 sent"], id="a sender of its own"
        ),
    ],
)
def test_who_is_named(corrupt: dict[str, str], named: list[str]) -> None:
    assert [" ".join(line.split()[:2]) for line in lines(**corrupt)] == named


def test_a_node_that_damages_what_it_receives() -> None:
    assert lines(n1="n2 n4") == [
        "n1 damages what it receives: data from n2, n4 arrived damaged there, and nowhere else; "
        "check its memory and its network card"
    ]


def test_where_a_node_has_the_file_all_the_same_that_is_said() -> None:
    assert lines(n1="n2") == ["n2 sent damaged bytes to n1, which took them from another node"]
    assert lines(failure="it fell silent", n1="n2") == ["n2 sent damaged bytes to n1"]
