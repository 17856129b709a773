"""The measurement of the network by real ranks: on one machine, and on nodes with a bad network."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time

import pytest

from tests.support.launching import variables, warm_ranks
from tests.support.needs import lacks, needs
from tests.support.ports import held_port
from tests.support.warm_ranks import Rank, as_torchrun_does
from trainer.config import TrainerError
from trainer.network import all_reduce
from trainer.network.all_reduce import MOST_NODES, PREFIX, parse, schedule


@pytest.mark.parametrize("wrong", [["--size-mb", "0"], ["--size-mb", "1025"], ["--timeout", "x"]])
def test_values_that_make_no_sense_name_their_option(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(wrong)
    assert stop.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def pairs_of(rounds):
    """All pairs, in order; no node is in two of a round."""
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(set(busy)) == len(busy)
    return sorted(itertools.chain.from_iterable(rounds))


@pytest.mark.parametrize("nodes", [0, 1, 2, 7, 8, MOST_NODES])
def test_every_pair_meets_once_in_as_few_rounds_as_there_can_be(nodes):
    rounds = schedule(nodes)
    assert pairs_of(rounds) == list(itertools.combinations(range(nodes), 2))
    assert len(rounds) == (0 if nodes < 2 else nodes - 1 + nodes % 2)


def test_of_many_nodes_each_meets_its_neighbours_and_the_head():
    rounds = schedule(100)
    line = {(n, n + 1) for n in range(99)}
    assert pairs_of(rounds) == sorted(line | {(0, n) for n in range(1, 100)})
    assert len(rounds) <= 101


# --- plain TCP -----------------------------------------------------------------------------------


def test_who_can_be_connected_to_and_who_cannot():
    refusing = ("127.0.0.1", held_port())
    with all_reduce.open_listener("127.0.0.1") as one, all_reduce.open_listener("127.0.0.1") as two:
        targets = {f"n{n}": (one, two)[n % 2].getsockname()[:2] for n in range(600)}
        assert all_reduce.find_unreached(targets, 100.0) == {}
        assert all_reduce.find_unreached({**targets, "n9": refusing}, 100.0) == {
            "n9": "Connection refused"
        }
    assert all_reduce.find_unreached({}, 1.0) == {}


def test_the_address_is_that_of_the_interface_else_towards_the_head():
    assert all_reduce.find_own_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert all_reduce.find_own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    with pytest.raises(TrainerError, match="there is no interface nope0 on "):
        all_reduce.find_own_address({"GLOO_SOCKET_IFNAME": "nope0", "MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(TrainerError, match=r"has no route to the head node, no-such\.invalid"):
        all_reduce.find_own_address({"MASTER_ADDR": "no-such.invalid"})


# --- real ranks ----------------------------------------------------------------------------------


def together(ranks, folder, *arguments):
    """Run ranks that have imported PyTorch before; exit codes, and what they wrote."""
    pytest.importorskip("torch")
    return warm_ranks().start(ranks, folder, ["all-reduce", *arguments]).wait()


def result(out):
    (line,) = [line for line in out.splitlines() if line.startswith(PREFIX)]
    return json.loads(line.removeprefix(PREFIX))


@pytest.mark.slow
def test_two_ranks_of_one_node_have_no_pair_to_measure(tmp_path):
    ranks = as_torchrun_does(2, variables(STAGER_NODE="n1"))
    codes, out, err = together(ranks, tmp_path, "--size-mb", "2")
    assert codes == [0, 0], err
    found = result(out)
    assert out.count("\n") == 1
    assert (found["nodes"], found["pairs"], found["bytes"]) == (["n1"], [], 2 << 20)
    rate = found["bytes"] / found["seconds"] / 1e9
    assert found["gb_per_s"] == pytest.approx(rate, rel=0.01, abs=0.001)


@pytest.mark.slow
def test_two_nodes_of_two_ranks_are_one_pair(tmp_path):
    begun, port = time.monotonic(), held_port()
    ranks = [Rank(env=single(n, 4, port, STAGER_NODE=f"n{n // 2 + 1}")) for n in range(4)]
    codes, out, err = together(ranks, tmp_path, "--size-mb", "4")
    took = time.monotonic() - begun
    assert codes == [0, 0, 0, 0], err
    found = result(out)
    assert (found["world_size"], found["nodes"]) == (4, ["n1", "n2"])
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"]) == ("n1", "n2")
    # However busy the machine is, a message takes no longer than all of it.
    assert (4 << 20) / took / 1e9 < pair["gb_per_s"] + 0.001 < 200
    assert 1 < pair["latency_us"] < took * 1e6


def single(rank, size, port, *, head="127.0.0.1", **more):
    """The variables of one rank without torchrun, as ``srun`` starts it."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": head, "MASTER_PORT": port}
    named = {name: str(value) for name, value in place.items()}
    return variables(**{"STAGER_NODE": f"n{rank + 1}", **named, **more})


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path):
    ranks = [Rank(env=single(0, 2, held_port()))]
    codes, out, err = together(ranks, tmp_path, "--timeout", "1")
    assert (codes, out) == ([1], "")
    assert "n1 (rank 0 of 2) did not meet the others at 127.0.0.1:" in err
    assert "hint: " in err
    assert "Traceback" not in err


LIMITED = """\
from dataclasses import replace
import sys
from trainer.network import all_reduce, dist as rendezvous_store
from trainer.__main__ import _exit_without_finalizing, main
rendezvous_store._LINGER = {linger}
real = all_reduce.{step}
all_reduce.{step} = lambda meeting, other: real(replace(meeting, timeout={seconds}), other)
_exit_without_finalizing(main())
"""
"""One step of it has little time, and not all: a rank may come late on a busy machine."""

HANGS = """\
import os, socket, time
from trainer.network import all_reduce
from trainer.__main__ import main
def hang(*asked):
    while True:
        try:
            socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
        except OSError:
            os._exit(1)
        time.sleep(0.1)
all_reduce._measure_pair = hang
main()
"""
"""It answers nobody for as long as rank 0 is there."""


def limited(folder, step, seconds, linger=20.0):
    """A program in which one step has so much time, and ranks stay so long after a fault."""
    program = folder / f"{step}.py"
    program.write_text(LIMITED.format(step=step, seconds=seconds, linger=linger))
    return str(program)


def pair(folder, *arguments, second="", program="", **setting):
    """Two nodes of one rank; the second one runs another program, or has another setting."""
    port = held_port()
    if second:
        (folder / "second.py").write_text(second)
        second = str(folder / "second.py")
    ranks = [Rank(env=single(0, 2, port), program=program)]
    ranks.append(Rank(env=single(1, 2, port, **setting), program=second))
    return together(ranks, folder, *arguments)


@pytest.mark.slow
def test_a_node_that_hangs_is_named_with_its_partner(tmp_path):
    patient = limited(tmp_path, "_measure_pairs", 2, linger=1.0)
    codes, out, err = pair(tmp_path, program=patient, second=HANGS)
    assert (codes[0], out) == (1, "")
    assert "error: n1 and n2: 16 MiB did not get through: " in err
    assert "Traceback" not in err


WRONG = """\
import sys
import torch
from trainer.network import all_reduce
from trainer.__main__ import main
real = torch.distributed.all_reduce
def adds(tensor, group=None):
    real(tensor, group=group)
    tensor[5] += 1
torch.distributed.all_reduce = adds
sys.exit(main())
"""


@pytest.mark.slow
def test_a_wrong_sum_is_told_by_every_rank_and_written_once(tmp_path):
    codes, out, err = pair(tmp_path, "--size-mb", "1", second=WRONG)
    assert (codes, out) == ([1, 1], "")
    assert err.count("error: n2: rank 1: element 5 of the sum is 19, not 18") == 1
    assert err.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"GLOO_SOCKET_IFNAME": "nope0"}, "n2: there is no interface nope0 on "),
        ({"PYTORCH_DIST_BACKEND": "nccl", "CUDA_VISIBLE_DEVICES": ""}, "0 GPUs for 1 rank"),
        ({"PYTORCH_DIST_BACKEND": "mpi"}, "PYTORCH_DIST_BACKEND=mpi is neither gloo nor nccl"),
    ],
)
def test_a_setting_that_one_node_cannot_follow_ends_all(tmp_path, setting, named):
    codes, out, err = pair(tmp_path, **setting)
    assert (codes, out) == ([1, 1], "")
    assert err.count("error: ") == err.count(named) == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_alone_there_is_nobody_to_talk_to(tmp_path):
    codes, out, err = together([Rank(env=variables())], tmp_path)
    assert (codes, out) == ([1], "")
    assert "there are no other ranks" in err
    assert "hint: start it with torchrun" in err


# --- nodes with a network of their own -----------------------------------------------------------


def ip(*words, check=True):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


@pytest.fixture
def network():
    """Three network namespaces on one bridge: {node: (namespace, address, outer interface)}."""
    needs("namespaces", "ip")
    mark = f"{os.getpid() % 100000}"
    bridge, nodes = f"ar{mark}", {}
    made = ip("link", "add", bridge, "type", "bridge", check=False)
    if made.returncode:
        lacks("namespaces", f"no bridge can be made: {made.stderr}")
    try:
        ip("link", "set", bridge, "up")
        for number in (1, 2, 3):
            name, outer, address = f"ar{mark}n{number}", f"ar{mark}v{number}", f"10.78.0.{number}"
            ip("netns", "add", name)
            nodes[name] = (address, outer)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield nodes
    finally:
        for name, (_, outer) in nodes.items():
            ip("link", "del", outer, check=False)  # with its namespace it would go some time later
            ip("netns", "del", name, check=False)
        ip("link", "del", bridge, check=False)


def across(network, folder, *arguments, program=""):
    """A rank on each node, as ``srun`` starts them."""
    (head, _), port = next(iter(network.values())), held_port()
    more = {"head": head, "GLOO_SOCKET_IFNAME": "eth0"}
    ranks = []
    for rank, node in enumerate(network):
        env = single(rank, 3, port, STAGER_NODE=node, **more)
        ranks.append(Rank(env=env, network=f"/run/netns/{node}", program=program))
    return together(ranks, folder, *arguments)


@pytest.mark.full
@pytest.mark.slow
def test_two_nodes_of_a_network_that_cannot_talk(network, tmp_path):
    one, two, three = network
    # What n2 sends to n3 goes to a card that nobody has; both still reach the head.
    nobody = ("10.78.0.3", "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
    ip("-n", two, "neigh", "replace", *nobody)
    codes, out, err = across(network, tmp_path, program=limited(tmp_path, "_reach_all", 3))
    assert 0 not in codes
    assert PREFIX not in out
    named = f"{two} and {three}: {two} cannot connect to 10.78.0.3: no answer within 3 s"
    assert err.count(named) == 1
    assert f"{one} and " not in err


@pytest.mark.full
@pytest.mark.slow
def test_a_network_on_which_small_packets_pass_and_large_ones_vanish(network, tmp_path):
    """Everything works until data is sent."""
    one, two, three = network
    codes, out, err = across(network, tmp_path, "--size-mb", "4")
    assert codes == [0, 0, 0], err
    assert len(result(out)["pairs"]) == 3
    ip("link", "set", network[three][1], "mtu", "600")
    codes, out, err = across(network, tmp_path, program=limited(tmp_path, "_measure_pairs", 10))
    assert 0 not in codes
    assert PREFIX not in out
    assert f"{three}: 16 MiB did not get through: " in err
    assert f"{one} and {two}" not in err
