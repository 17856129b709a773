"""What is started: literal argument lists, and the choices in them."""

import pytest

from bundle.launch import commands
from bundle.launch.commands import choose_backend, choose_nproc, choose_threads
from bundle.launch.program_variables import JobDirectories
from bundle.protocol.job import ONE_A_CPU
from bundle.protocol.messages import GroupSettings, LaunchRequest
from tests.support.jobs import launch_request

PLACE = JobDirectories(
    root="/n/stager-7", environment="/n/stager-7/envs/abc", job_dir="/n/stager-7/jobs/42.1"
)


PROGRAM = ["/n/stager-7/jobs/42.1/run_wrapper.py", "train.py", "--epochs", "3"]


def command(request: LaunchRequest, *meeting: str, restarts: int = 0) -> None:
    assert commands.make_torchrun_argv(PLACE, request, "10.1.2.4", PROGRAM) == [
        "/n/stager-7/envs/abc/bin/python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        *meeting,
        "--rdzv-id=42.0",
        f"--max-restarts={restarts}",
        "--log-dir=/n/stager-7/jobs/42.1/torchrun",
        "/n/stager-7/jobs/42.1/run_wrapper.py",
        "train.py",
        "--epochs",
        "3",
    ]


STATIC = ("--master-addr=10.1.2.3", "--master-port=61042", "--rdzv-backend=static")


def test_the_command_of_a_node() -> None:
    command(launch_request(), "--nnodes=3", "--node-rank=1", *STATIC)
    command(launch_request(0, nodes=1), "--nnodes=1", "--node-rank=0", *STATIC)


def meeting(host: int, endpoint: str = "10.1.2.3:61042") -> tuple[str, ...]:
    return (
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=is_host={host}",
        "--local-addr=10.1.2.4",
    )


def test_ranks_that_may_meet_again_meet_through_c10d() -> None:
    for node_rank, nodes, host in ((0, 1, 1), (1, 3, 0), (0, 3, 1)):
        again = launch_request(node_rank, nodes, max_restarts=2)
        command(again, f"--nnodes={nodes}", *meeting(host), restarts=2)
    six = launch_request(settings=GroupSettings("fd00::1", 61042, "gloo", 2), max_restarts=2)
    command(six, "--nnodes=3", *meeting(0, "[fd00::1]:61042"), restarts=2)


def test_which_ranks_a_local_rank_may_be() -> None:
    """Where ranks may be started again, torchrun deals them to nodes anew."""
    assert [list(ranks) for ranks in commands.list_possible_ranks(launch_request())] == [[2], [3]]
    for request in (launch_request(max_restarts=1), launch_request(elastic=(1, 3))):
        assert [list(ranks) for ranks in commands.list_possible_ranks(request)] == [
            [0, 2, 4],
            [1, 3, 5],
        ]


@pytest.mark.parametrize(("span", "said"), [((2, 3), "2:3"), ((3, 3), "3"), ((1, 8), "1:3")])
def test_an_elastic_group(span: tuple[int, int], said: str) -> None:
    command(launch_request(elastic=span), f"--nnodes={said}", *meeting(0))


def test_the_backend() -> None:
    every, some = {"a": 1, "b": 8}, {"a": 4, "b": 0}
    assert [choose_backend(setting, every) for setting in ("auto", "gloo", "nccl")] == [
        "nccl", "gloo", "nccl",
    ]  # fmt: skip
    assert choose_backend("auto", some) == choose_backend("auto", {"a": 0}) == "gloo"
    with pytest.raises(ValueError, match="needs a GPU on every node; none on hpc02, hpc10"):
        choose_backend("nccl", {"hpc10": 0, "hpc01": 4, "hpc02": 0})


def test_ranks_on_a_node() -> None:
    assert choose_nproc(None, {"a": 4, "b": 2}, 16) == 2
    assert choose_nproc(None, {"a": 0, "b": 2}, 16) == 1
    assert [choose_nproc(setting, {"a": 8}, 16) for setting in (3, 1, ONE_A_CPU)] == [3, 1, 16]


def test_threads_of_a_rank() -> None:
    assert [choose_threads(None, cpus, 4) for cpus in (16, 17, 2)] == [4, 4, 1]
    assert choose_threads(8, 2, 4) == 8
