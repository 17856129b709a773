"""The driver's side of a relay: its nodes' places, what the source reads, and what is said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bundle.driver.transports.agent_program import pack_message
from bundle.driver.transports.phase_run import PhaseAnswers
from bundle.driver.transports.relay_source import (
    RelayDirectory,
    describe_damage,
    find_candidates,
    find_obstacle,
    listen,
    order_by_switches,
    order_candidates,
    send,
)
from bundle.driver.transports.relay_source import describe_transfer as remarks_of
from bundle.driver.transports.transport import Event, Transfer
from bundle.protocol.codec import decode
from bundle.protocol.events import Remark
from bundle.protocol.messages import Ready, Relayed, RelayStart
from bundle.protocol.problem import NodeError, ProblemCode
from bundle.transfer.relay_chunks import SOURCE, TREES, list_ancestors
from bundle.transfer.relay_peers import (
    SILENT_SECONDS,
    RelayCandidates,
    RelayPlace,
    compute_node_key,
)
from bundle.transfer.relay_process import RelayProcess
from tests.support.relay_step import FAILING, FALLS_SILENT, GIVES_UP, relay_run


def test_nodes_below_one_switch_are_neighbours_and_without_any_the_list_stays() -> None:
    """Nodes that do not listen are left out."""
    switches = {"node03": "top.a", "node10": "top.b", "node1": "top.a", "node2": "top.b"}
    above = {name: Ready(name, switches=switch) for name, switch in switches.items()}
    names = (*switches, "login")
    assert order_by_switches(names, above) == ("node03", "node1", "node10", "node2")
    assert order_by_switches(names, {name: Ready(name) for name in switches}) == names[:4]


def test_the_source_listens_in_the_range_that_a_firewall_leaves_open() -> None:
    with contextlib.closing(listen(None)) as one:
        taken = one.getsockname()[1]
        with contextlib.closing(listen(range(taken, taken + 20))) as other:
            assert other.getsockname()[1] in range(taken + 1, taken + 20)


MEMORY = "/proc/self/mem"
"""The kernel answers EIO where this process has no memory, as for a broken disk."""


@pytest.mark.parametrize(
    ("spoil", "code", "why"),
    [
        (os.unlink, ProblemCode.BUNDLE_UNREADABLE, "No such file or directory"),
        (
            lambda path: os.truncate(path, 400),
            ProblemCode.BUNDLE_UNREADABLE,
            "it has become shorter: 400 of 1000 bytes are left",
        ),
        (None, ProblemCode.BUNDLE_DISK_FAULT, "Input/output error"),
    ],
)
def test_a_file_that_cannot_be_read_is_no_nodes_fault(
    transfer: Transfer, spoil: Callable[[str], None] | None, code: ProblemCode, why: str
) -> None:
    """It had been there when the job began."""
    if spoil is None:
        transfer = Transfer(MEMORY, "", 1_000_000, "00" * 32)
    else:
        spoil(transfer.source)
    kinds = {"node01": FAILING, "node02": FAILING}
    with relay_run(kinds) as run, pytest.raises(NodeError) as caught:
        send(transfer, run)
    problem = caught.value.problem
    assert (problem.code, problem.where, problem.why) == (code, transfer.source, why)


def test_a_source_that_is_killed_is_heard_of_at_once_and_is_no_nodes_fault(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, each node would give up by itself, and each would be named."""
    begin = RelayProcess.begin

    def begin_and_die(source: RelayProcess, candidates: RelayCandidates | None) -> None:
        begin(source, candidates)
        os.kill(source._child, signal.SIGKILL)

    monkeypatch.setattr(RelayProcess, "begin", begin_and_die)
    with (
        relay_run({"node01": FALLS_SILENT, "node02": FALLS_SILENT}) as run,
        pytest.raises(NodeError) as caught,
    ):
        send(transfer, run)
    assert run.liveness.lost == {}
    problem = caught.value.problem
    assert problem.code is ProblemCode.RELAY_SOURCE_ENDED
    assert (problem.where, problem.why) == (transfer.source, "its relay was ended by SIGKILL")
    assert os.uname().nodename in problem.what


class GivingUpAt(list[Event]):
    """The events of a relay, whose nodes give up when the first one comes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, event: Event) -> None:
        super().append(event)
        self._path.touch()


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "hanging"])
def test_a_source_that_stands_still_is_named_while_the_nodes_wait(
    transfer: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """They can say only that it is silent. One that was stopped is no reason not to use sbcast."""
    begin = RelayProcess.begin

    def begin_and_stop(source: RelayProcess, candidates: RelayCandidates | None) -> None:
        begin(source, candidates)
        os.kill(source.pid, signal.SIGSTOP)

    if stopped:
        monkeypatch.setattr(RelayProcess, "begin", begin_and_stop)
    else:  # as in a read from a disk that does not answer
        monkeypatch.setattr("bundle.transfer.relay.Relay.run", lambda *_: time.sleep(600))
    monkeypatch.setattr("bundle.driver.transports.relay_source.STILL_SECONDS", 1.0)
    events, host = GivingUpAt(tmp_path / "mark"), os.uname().nodename
    with relay_run({"node01": f"{GIVES_UP}{tmp_path / 'mark'}"}, events) as run:
        if stopped:
            assert send(transfer, run)[0] == {"node01": "no other node can be reached"}
        else:
            with pytest.raises(NodeError) as caught:
                send(transfer, run)
            problem = caught.value.problem
            assert problem.code is ProblemCode.RELAY_SOURCE_HANGS
            assert (problem.where, host in problem.what) == (transfer.source, True)
    [remark] = [event for event in events if isinstance(event, Remark)]
    assert f"the process on {host} that sends the bundle has stood still for 1 s" in remark.text
    assert ("stopped, state T" in remark.text) == stopped


def test_where_a_node_has_no_file_or_this_host_cannot_listen_another_way_is_left(
    transfer: Transfer,
) -> None:
    with relay_run({"node01": FAILING}) as run:
        assert send(transfer, run)[0] == {"node01": "no other node can be reached"}
    with contextlib.closing(listen(None)) as one, relay_run({"node01": FAILING}) as run:
        taken = one.getsockname()[1]
        failed, _ = send(transfer, run, range(taken, taken + 1))
    host = os.uname().nodename
    assert failed == {"node01": f"{host} cannot be its source: Address already in use"}


def places_of(nodes: int) -> list[RelayPlace]:
    """So many nodes whose addresses and ports follow no rule, and their source."""
    places = [RelayPlace(SOURCE, "the source", "", 40_000)]
    for position in range(1, nodes + 1):
        scattered = position * 2_654_435_761
        address = f"10.{scattered >> 8 & 255}.{scattered >> 16 & 255}.{scattered & 255}"
        name = f"gpu-{position:05}.cluster.example"
        places.append(RelayPlace(position, name, address, 32_768 + scattered % 28_000))
    return places


def answer_to(places: Sequence[RelayPlace], position: int) -> bytes:
    """What the source sends to a node."""
    answer = RelayDirectory(places)(compute_node_key(places[position].name))
    assert answer is not None
    return answer


@pytest.mark.parametrize("nodes", [1, 100])
def test_a_node_knows_those_above_it_and_the_source_alone(nodes: int) -> None:
    places = places_of(nodes)
    for position in range(1, nodes + 1):
        told = decode(RelayCandidates, json.loads(zlib.decompress(answer_to(places, position))))
        assert told == find_candidates(position, places)
        for tree in range(TREES):
            assert sorted(told.by_tree[tree]) == sorted(list_ancestors(position, nodes, tree))
        wanted = {candidate for chain in told.by_tree for candidate in chain}
        assert [place.position for place in told.places] == sorted(wanted)
        assert all(places[place.position] == place for place in told.places)


def test_the_source_is_tried_before_those_far_above() -> None:
    """A firewall that drops what is sent costs time for each one that is tried."""
    *above, source = list_ancestors(1, 1000, 0)
    assert len(above) > 4
    assert order_candidates(1, 1000, 0) == (*above[:3], source, *above[3:])


def test_the_bytes_of_a_node_hardly_grow_with_the_number_of_nodes() -> None:
    """Twice as many nodes are one more place in each tree; before, they were twice as many."""
    sizes = {}
    for nodes in (64, 512, 4096):
        places = places_of(nodes)
        directory = RelayDirectory(places)
        answers = [
            directory(compute_node_key(place.name)) or b"" for place in places[1 :: nodes // 64]
        ]
        start = pack_message(RelayStart(port=40_000, nodes=nodes))
        sizes[nodes] = max(map(len, answers)) + len(start)
    assert sizes[4096] < 1500
    assert sizes[4096] - sizes[512] < 2 * (sizes[512] - sizes[64])
    total = 4096 * sizes[4096]
    assert total < 6_000_000  # all names, addresses and ports to each one: 160,000,000


HERE = "the source"
NONE = "no answer within 1.5 s"


@pytest.mark.parametrize(
    ("nodes", "out_of_reach", "most", "why"),
    [
        (50, "node33", 31, "most nodes cannot connect to others, for example last to node33: "),
        (100, "node33", 50, "most nodes cannot connect to others, for example last to node33: "),
        (40, HERE, 20, "nodes cannot connect to this host, for example last: "),
    ],
)
def test_where_most_nodes_cannot_connect_there_is_no_relay(
    nodes: int, out_of_reach: str, most: int, why: str
) -> None:
    reports = {f"node{number}": {out_of_reach: NONE} for number in range(most)}
    assert find_obstacle(nodes, reports) == ""
    reports["last"] = {out_of_reach: NONE}
    assert find_obstacle(nodes, reports) == why + NONE
    reports["node0"] = {}  # it has reached the others after all
    assert find_obstacle(nodes, reports) == ""


def damage_of(failure: str = "", **corrupt: str) -> list[str]:
    """What is said once nodes have reported from whom bytes came damaged."""
    return describe_damage(
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
            {"n1": "n2 n4 n5", "n3": "n5"}, ["n1 damages", "n5 sent"], id="a sender of its own"
        ),
    ],
)
def test_who_is_named(corrupt: dict[str, str], named: list[str]) -> None:
    assert [" ".join(line.split()[:2]) for line in damage_of(**corrupt)] == named


SIZE = 40_000_000


def remarks(
    relayed: dict[str, Relayed], size: int, out_of_reach: dict[str, dict[str, str]] | None = None
) -> tuple[str, ...]:
    """What is said once these nodes have told so much."""
    answers = PhaseAnswers({}, 1, print, "unpack")
    answers.relayed.update(relayed)
    answers.out_of_reach.update(out_of_reach or {})
    return remarks_of(answers, size)


@pytest.mark.parametrize(
    ("seconds", "failed", "said"),
    [
        ((2.0, 2.2, 10.0, 2.1), (), "node03 is slow: it received 4.0 MB/s, the median {}19.0 MB/s"),
        # One that has waited for a silent parent is not.
        ((1.0, 1.0, 1.0 + SILENT_SECONDS + 0.5), (), ""),
        # It is compared with the other, and not with the mean of both.
        ((2.0, 10.0), (), "node02 is slow: it received 4.0 MB/s, the median {}20.0 MB/s"),
        # Those that failed at once, or after long, count for nothing.
        ((2.0, 10.0, 2.0), (0.1, 0.1, 0.1, 90.0),
         "node02 is slow: it received 4.0 MB/s, the median {}20.0 MB/s"),
    ],
)  # fmt: skip
def test_a_slow_node_is_named_with_its_rate(
    seconds: tuple[float, ...], failed: tuple[float, ...], said: str
) -> None:
    relayed = {}
    for number, taken in enumerate((*seconds, *failed), 1):
        name, failure = f"node{number:02}", "its relay ended" if number > len(seconds) else ""
        relayed[name] = Relayed(name, seconds=taken, failure=failure)
    expected = (said.format("of the others is "),) if said else ()
    assert remarks(relayed, SIZE) == expected


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
