"""What is told of the commands that start ranks: real ones, as nodes make them."""

from __future__ import annotations

from dataclasses import replace

from bundle.driver.state import drop_known_command
from bundle.launch import commands
from bundle.launch.program_variables import JobDirectories, RankGroup
from bundle.protocol.messages import Started

GROUP = RankGroup(
    node="n0",
    node_rank=0,
    nnodes=64,
    nproc=2,
    address="10.0.0.1",
    port=6000,
    interface="eth0",
    backend="gloo",
    threads=1,
    max_restarts=0,
    elastic=None,
    grace_seconds=30,
    own_address="10.0.0.1",
    on_cpus=True,
)


def started(group: RankGroup, rank: int, *, root: str = "/tmp/stager-7") -> Started:
    """The event of a node."""
    node = replace(group, node=f"n{rank}", node_rank=rank, own_address=f"10.0.0.{rank + 1}")
    directories = JobDirectories(
        root=root, environment=f"{root}/envs/12ab", job_dir=f"{root}/jobs/4711.{rank}.0"
    )
    program = commands.wrapper(directories, ("train.py", "--epochs", "3"))
    argv = commands.torchrun(directories, node, "4711.0", program)
    return Started(node.node, argv=tuple(argv), interface="eth0")


def test_nodes_whose_commands_differ_by_the_node_only_are_told_once() -> None:
    for group in GROUP, replace(GROUP, elastic=(2, 64), max_restarts=1):
        known: set[tuple[str, ...]] = set()
        first, *others = (drop_known_command(started(group, rank), known) for rank in range(64))
        assert first == started(group, 0)
        assert {event.argv for event in others} == {()}
        assert [event.node for event in others] == [f"n{rank}" for rank in range(1, 64)]


def test_another_command_is_told() -> None:
    known: set[tuple[str, ...]] = set()
    events = (
        started(GROUP, 0),
        started(GROUP, 1, root="/scratch/stager-7"),
        started(replace(GROUP, nnodes=63), 2),
        started(replace(GROUP, port=6001), 3),
    )
    assert all(drop_known_command(event, known) == event for event in events)
