"""The measurement of the network by real ranks: on one machine, and on nodes with a bad network."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.needs import lacks, needs
from trainer.config import TrainerError
from trainer.network import mesh
from trainer.network.all_reduce import MOST_NODES, PREFIX, AllReduceOptions, parse, schedule

REPO = Path(__file__).resolve().parents[3]


# --- the command line, and who talks to whom -----------------------------------------------------


def test_options():
    assert parse([]) == AllReduceOptions(size_mb=16, timeout=60)
    assert parse(["--size-mb", "1", "--timeout", "5"]) == AllReduceOptions(size_mb=1, timeout=5)


@pytest.mark.parametrize("wrong", [["--size-mb", "0"], ["--size-mb", "1025"], ["--timeout", "x"]])
def test_values_that_make_no_sense_name_their_option(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(wrong)
    assert stop.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4, 7, 8, 31, MOST_NODES])
def test_every_pair_meets_once_in_as_few_rounds_as_there_can_be(nodes):
    rounds = schedule(nodes)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == list(itertools.combinations(range(nodes), 2))
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(set(busy)) == len(busy)
    assert len(rounds) == (0 if nodes < 2 else nodes - 1 + nodes % 2)


@pytest.mark.parametrize("nodes", [MOST_NODES + 1, 100])
def test_of_many_nodes_each_meets_its_neighbours_and_the_head(nodes):
    rounds = schedule(nodes)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(set(pairs)) == len(pairs) == 2 * nodes - 3
    ring = {(n, n + 1) for n in range(nodes - 1)}
    assert set(pairs) == ring | {(0, n) for n in range(1, nodes)}
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(set(busy)) == len(busy)
    assert len(rounds) <= nodes + 1


# --- plain TCP -----------------------------------------------------------------------------------


def test_who_can_be_connected_to_and_who_cannot():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        refusing = gone.getsockname()[:2]
    with mesh.listen("127.0.0.1") as one, mesh.listen("127.0.0.1") as two:
        targets = {f"n{n}": (one, two)[n % 2].getsockname()[:2] for n in range(600)}
        assert mesh.unreached(targets, 5.0) == {}
        assert mesh.unreached({**targets, "n9": refusing}, 5.0) == {"n9": "Connection refused"}
    assert mesh.unreached({}, 1.0) == {}


def test_the_address_is_that_of_the_interface_else_towards_the_head():
    assert mesh.own_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert mesh.own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    with pytest.raises(TrainerError, match="there is no interface nope0 on "):
        mesh.own_address({"GLOO_SOCKET_IFNAME": "nope0", "MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(TrainerError, match=r"has no route to the head node, no-such\.invalid"):
        mesh.own_address({"MASTER_ADDR": "no-such.invalid"})


# --- real ranks ----------------------------------------------------------------------------------


def variables(**more):
    dropped = ("GLOO_", "NCCL_", "PYTORCH_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | more


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def started(argvs):
    """Processes, each given as (argv, variables); none is left behind."""
    running = []
    try:
        for argv, env in argvs:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            running.append(subprocess.Popen(argv, env=env, start_new_session=True, **pipes))
        yield running
    finally:
        for one in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, 9)
            one.communicate()


def finished(argvs, timeout=150):
    """Run such processes to their end; their exit codes and what they wrote."""
    with started(argvs) as running:
        until = time.monotonic() + timeout
        said = [one.communicate(timeout=max(until - time.monotonic(), 1)) for one in running]
        return [one.returncode for one in running], *map("".join, zip(*said, strict=True))


def launched(nodes, ranks, *arguments, head="127.0.0.1", prefix=(), **more):
    """``torchrun`` on each of these nodes, with so many ranks each."""
    pytest.importorskip("torch")
    port = str(free_port())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes))]
    torchrun += ["--nproc-per-node", str(ranks), "--master-addr", head, "--master-port", port]
    torchrun += ["--log-dir", os.environ["HOME"]]  # the test's own, and gone with it
    command = ["-m", "trainer", "all-reduce", *arguments]
    for rank, node in enumerate(nodes):
        begin = [part.format(node=node) for part in prefix]
        argv = [*begin, *torchrun, "--node-rank", str(rank), *command]
        yield argv, variables(STAGER_NODE=node, **more)


def result(out):
    (line,) = [line for line in out.splitlines() if line.startswith(PREFIX)]
    return json.loads(line.removeprefix(PREFIX))


@pytest.mark.slow
def test_two_ranks_of_one_node_have_no_pair_to_measure():
    codes, out, err = finished(launched(["n1"], 2, "--size-mb", "2"))
    assert codes == [0], err
    found = result(out)
    assert out.count("\n") == 1
    assert (found["world_size"], found["nodes"], found["pairs"]) == (2, ["n1"], [])
    assert (found["backend"], found["bytes"]) == ("gloo", 2 << 20)
    assert found["gb_per_s"] == pytest.approx(found["bytes"] / found["seconds"] / 1e9, rel=0.01)


@pytest.mark.slow
def test_two_nodes_of_two_ranks_are_one_pair():
    codes, out, err = finished(launched(["n1", "n2"], 2, "--size-mb", "4"))
    assert codes == [0, 0], err
    found = result(out)
    assert (found["world_size"], found["nodes"]) == (4, ["n1", "n2"])
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"]) == ("n1", "n2")
    assert 0.01 < pair["gb_per_s"] < 200
    assert 1 < pair["latency_us"] < 100_000


def single(rank, size, port, *arguments, program=("-m", "trainer"), **more):
    """One rank without torchrun, as ``srun`` starts it."""
    pytest.importorskip("torch")
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    argv = [sys.executable, *program, "all-reduce", *arguments]
    named = {name: str(value) for name, value in place.items()}
    return argv, variables(STAGER_NODE=f"n{rank + 1}", **named, **more)


@pytest.mark.slow
def test_three_ranks_without_torchrun():
    port = free_port()
    codes, out, err = finished([single(rank, 3, port, "--size-mb", "1") for rank in range(3)])
    assert codes == [0, 0, 0], err
    found = result(out)
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [
        ("n1", "n2"),
        ("n1", "n3"),
        ("n2", "n3"),
    ]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named():
    started_at = time.monotonic()
    codes, out, err = finished([single(0, 2, free_port(), "--timeout", "3")])
    assert (codes, out) == ([1], "")
    assert "n1 (rank 0 of 2) did not meet the others at 127.0.0.1:" in err
    assert "hint: " in err
    assert "Traceback" not in err
    assert time.monotonic() - started_at < 60


HANGS = """import sys, time
from trainer.network import all_reduce
from trainer.__main__ import main
all_reduce._measure_pair = lambda *asked: time.sleep(300)
sys.exit(main())
"""


@pytest.mark.slow
def test_a_node_that_hangs_is_named_with_its_partner():
    port = free_port()
    ranks = [single(0, 2, port, "--timeout", "4")]
    ranks += [single(1, 2, port, "--timeout", "4", program=("-c", HANGS))]
    with started(ranks) as (one, _):
        out, err = one.communicate(timeout=90)
    assert (one.returncode, out) == (1, "")
    assert "error: n1 and n2: 16 MiB did not get through: " in err
    assert "Traceback" not in err


WRONG = """import sys
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
def test_a_wrong_sum_is_told_by_every_rank_and_written_once():
    port = free_port()
    ranks = [single(0, 2, port, "--size-mb", "1")]
    ranks += [single(1, 2, port, "--size-mb", "1", program=("-c", WRONG))]
    codes, out, err = finished(ranks)
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
def test_a_setting_that_one_node_cannot_follow_ends_all(setting, named):
    port = free_port()
    codes, out, err = finished([single(0, 2, port), single(1, 2, port, **setting)])
    assert (codes, out) == ([1, 1], "")
    assert err.count("error: ") == err.count(named) == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_alone_there_is_nobody_to_talk_to():
    pytest.importorskip("torch")
    argv = [sys.executable, "-m", "trainer", "all-reduce"]
    codes, out, err = finished([(argv, variables())])
    assert (codes, out) == ([1], "")
    assert "there are no other ranks" in err
    assert "hint: start it with torchrun" in err


# --- nodes with a network of their own -----------------------------------------------------------

NETNS = ("ip", "netns", "exec")


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
        for name in nodes:
            ip("netns", "del", name, check=False)
        ip("link", "del", bridge, check=False)


def across(network, *arguments):
    nodes = launched(
        list(network),
        1,
        *arguments,
        head=next(iter(network.values()))[0],
        prefix=(*NETNS, "{node}"),
        GLOO_SOCKET_IFNAME="eth0",
    )
    return finished(nodes, 240)


@pytest.mark.slow
def test_a_network_and_what_can_be_wrong_with_it(network):
    one, two, three = network
    codes, out, err = across(network, "--size-mb", "4", "--timeout", "20")
    assert codes == [0, 0, 0], err
    assert len(result(out)["pairs"]) == 3

    # What n2 sends to n3 goes to a card that nobody has; both still reach the head.
    nobody = ("10.78.0.3", "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
    ip("-n", two, "neigh", "replace", *nobody)
    codes, out, err = across(network, "--timeout", "5")
    ip("-n", two, "neigh", "del", "10.78.0.3", "dev", "eth0")
    assert 0 not in codes
    assert PREFIX not in out
    named = f"{two} and {three}: {two} cannot connect to 10.78.0.3: no answer within 5 s"
    assert err.count(named) == 1
    assert f"{one} and " not in err

    # Small packets pass, large ones vanish: everything works until data is sent.
    ip("link", "set", network[three][1], "mtu", "600")
    codes, out, err = across(network, "--timeout", "6")
    assert 0 not in codes
    assert PREFIX not in out
    assert f"{three}: 16 MiB did not get through: " in err
    assert f"{one} and {two}" not in err
