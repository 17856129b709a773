"""The places of a job's ranks, as its driver leaves them: rank 5 reads a file, others wait."""

from __future__ import annotations

import json
from pathlib import Path

from bundle.protocol.codec import encode
from bundle.protocol.events import Hang, JobStacks
from bundle.protocol.messages import CollectiveState, ProcessState, RankState, ThreadStack

ENVIRONMENT = f"/tmp/stager-1000/envs/{'a' * 64}"
PACKAGES = f"{ENVIRONMENT}/lib/python3.11/site-packages"
WAITS = (
    f"{PACKAGES}/torch/distributed/distributed_c10d.py:2810 all_reduce",
    f"{PACKAGES}/torch/distributed/c10d_logger.py:81 wrapper",
    "/w/train.py:52 step",
    "/w/train.py:80 <module>",
    "<frozen runpy>:88 _run_code",
    "/logs/run_wrapper.py:60 main",
)
READS = (
    "/usr/lib/python3.11/socket.py:706 readinto",
    f"{ENVIRONMENT}/project/data/loader.py:88 read_shard",
    "/w/train.py:50 step",
)
HANG = Hang(
    kind="behind",
    rank=5,
    node="node03",
    ranks=(5,),
    waiting=6,
    operation="all_reduce",
    number=4711,
    place="loader.py:88 read_shard",
    text="rank 5 on node03 has not entered all_reduce 4711, which 6 ranks wait in; it is in "
    "loader.py:88 read_shard",
)


def rank_state(rank: int, frames: tuple[str, ...], entered: int, state: str = "S") -> RankState:
    group = CollectiveState("default_pg", (), entered, entered, 4710, "all_reduce", "[8] Float")
    process = ProcessState(100 + rank, "python", state, "nfs_wait" if state == "D" else "")
    return RankState(rank, process, (ThreadStack("MainThread", frames),), (group,))


def job_stacks(job_id: str = "77", hang: Hang | None = HANG) -> JobStacks:
    waiting = {rank: rank_state(rank, WAITS, 4711) for rank in (0, 1, 2, 3, 4, 6)}
    silent = RankState(7, ProcessState(0, state="?"), no_answer="its node has not answered")
    nodes = {
        "node01": tuple(waiting[rank] for rank in (0, 1)),
        "node02": tuple(waiting[rank] for rank in (2, 3)),
        "node03": (waiting[4], rank_state(5, READS, 4710, "D")),
        "node04": (waiting[6], silent),
    }
    return JobStacks(job_id, 1_790_000_312.0, 312.4, nodes, hang)


def write_stacks(folder: Path, stacks: JobStacks) -> Path:
    path = folder / f"stacks.{stacks.job_id}.json"
    path.write_text(json.dumps(encode(stacks)))
    return path
