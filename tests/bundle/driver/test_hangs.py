"""Verdicts about ranks that do not go on, one line of the table for each kind of hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bundle.driver.hangs import UNKNOWN_STATE, States, find_hang
from bundle.protocol.events import Hang
from bundle.protocol.messages import CollectiveState, ProcessState, RankState, ThreadStack

SITE = "/e/lib/python3.11/site-packages"
BACKWARD = ("/home/me/train.py:40 step", "/home/me/train.py:9 <module>")
WAITING = (f"{SITE}/torch/distributed/distributed_c10d.py:3252 all_reduce", *BACKWARD)
READING = ("/home/me/loader.py:88 read_shard", *BACKWARD)
LOADING = (f"{SITE}/torch/utils/data/dataloader.py:1283 _get_data", *BACKWARD)


def rank(number: int, *frames: str, **fields: Any) -> RankState:
    threads = (ThreadStack("main", frames),) if frames else ()
    process = ProcessState(1000 + number, "python3", "S", "futex_wait_queue")
    return replace(RankState(number, process, threads), **fields)


def group(enqueued: int, completed: int, **fields: Any) -> CollectiveState:
    state = CollectiveState("default_pg", (), enqueued, -1, completed, "all_reduce", "[8] Float")
    return replace(state, **fields)


def wait(number: int, *groups: CollectiveState, **fields: Any) -> RankState:
    return rank(number, *WAITING, groups=groups or (group(4711, 4710),), **fields)


def process(state: str, seconds: float = 0.0, pid: int = 1002, name: str = "python3") -> Any:
    return ProcessState(pid, name, state, "nfs_wait" if state == "D" else "", seconds)


BEHIND = group(4710, 4710)
GONE = {"process": ProcessState(0, state=""), "no_answer": "it has ended"}
WORKER = process("Z", pid=77, name="pt_data_worker")
TENSOR = (group(12, 11, group="tensor", ranks=(2, 3)), group(7, 7))
ROW, COLUMN = (group(5, 4, group=name, ranks=(0, 1)) for name in ("row", "column"))

CASES: dict[str, tuple[list[RankState], dict[str, Any], str]] = {
    "loader": (
        [wait(0), wait(1), rank(2, *READING, groups=(BEHIND,)), wait(3)],
        {"kind": "behind", "rank": 2, "node": "n1", "waiting": 3, "number": 4711, "certain": True},
        "rank 2 on n1 has not entered all_reduce 4711, which 3 ranks wait in; "
        "it is in loader.py:88 read_shard",
    ),
    "a worker of its loader": (
        [
            wait(0),
            rank(
                *(1, *LOADING),
                threads=(ThreadStack("main", LOADING), ThreadStack("process 9", READING)),
                groups=(BEHIND,),
            ),
        ],
        {"kind": "behind", "rank": 1, "place": "loader.py:88 read_shard"},
        "it is in loader.py:88 read_shard",
    ),
    "C code that holds the GIL": (
        [wait(0), wait(1), rank(2, no_answer="no stacks within 2 s")],
        {"kind": "elsewhere", "rank": 2, "number": 4711, "place": ""},
        "2 ranks wait in all_reduce 4711, and rank 2 on n1 may not have entered it; "
        "it gave no stack: no stacks within 2 s",
    ),
    "a chain of groups": (
        [
            wait(0, group(8, 7)),
            wait(1, group(8, 7)),
            wait(2, *TENSOR),
            rank(3, *READING, groups=(group(11, 11, group="tensor", ranks=(2, 3)), group(7, 7))),
        ],
        {"kind": "behind", "rank": 3, "ranks": (3,), "group": "default_pg", "waiting": 3},
        "rank 3 on n1 has not entered all_reduce 8, which 2 ranks wait in; 3 ranks wait in all; ",
    ),
    "a circle": (
        [
            wait(0, ROW, replace(COLUMN, enqueued=4)),
            wait(1, replace(ROW, enqueued=4), COLUMN),
            wait(2, group(6, 6)),
        ],
        {"kind": "mismatch", "ranks": (1, 0), "group": "row", "number": 5},
        "rank 1 on n0 waits in all_reduce 5 of group column and has not entered all_reduce 5 of "
        "group row, which 1 rank waits in: groups of ranks wait for each other",
    ),
    "another operation": (
        [wait(0), wait(1, group(4711, 4710, operation="broadcast")), wait(2)],
        {"kind": "mismatch", "ranks": (1,), "certain": True},
        "rank 1 on n0 is in broadcast 4711 ([8] Float), and 2 ranks in all_reduce 4711 "
        "([8] Float): the program does not call the same operations in all ranks",
    ),
    "other shapes": (
        [wait(0), wait(1), wait(2, group(4711, 4710, shapes="[9] Float"))],
        {"kind": "mismatch", "ranks": (2,)},
        "rank 2 on n1 is in all_reduce 4711 ([9] Float)",
    ),
    "an early leaver": (
        [wait(0), rank(1, **GONE), wait(2)],
        {"kind": "behind", "rank": 1, "number": 4711, "certain": True},
        "rank 1 on n0 has not entered all_reduce 4711, which 2 ranks wait in; it has ended",
    ),
    "a dead worker": (
        [wait(0), rank(1, *LOADING, groups=(BEHIND,), children=(WORKER,))],
        {"kind": "stopped", "rank": 1, "waiting": 1, "certain": True},
        "process 77 (pt_data_worker) of rank 1 on n0 is dead, and the rank has not noticed",
    ),
    "a helper that has ended in each rank": (
        [rank(number, *READING, children=(WORKER,)) for number in range(3)],
        {"kind": "unknown"},
        "ranks 0, 1, 2 on n0, n1 print nothing",
    ),
    "a stopped process": (
        [wait(0), wait(1), wait(2, process=process("T"))],
        {"kind": "stopped", "rank": 2, "waiting": 2},
        "process 1002 (python3) of rank 2 on n1 is stopped by a signal or a debugger (SIGCONT",
    ),
    "a file system that does not answer": (
        [wait(0), wait(1), rank(2, *READING, groups=(BEHIND,), process=process("D"))],
        {"kind": "held", "rank": 2, "place": "loader.py:88 read_shard", "certain": False},
        "process 1002 (python3) of rank 2 on n1 is held by the kernel in nfs_wait, as by a file "
        "system or device that is slow or does not answer; it is in loader.py:88 read_shard",
    ),
    "the network": (
        [wait(number) for number in range(4)],
        {"kind": "network", "rank": None, "ranks": (), "waiting": 4, "certain": True},
        "4 ranks wait in all_reduce 4711, and none is behind: the network between them does not "
        "deliver; rank 0 is in train.py:40 step",
    ),
    "a device that has not begun": (
        [wait(0, group(9, 5, started=6)), wait(1, group(9, 5, started=5))],
        {"kind": "behind", "rank": 1, "number": 6},
        "rank 1 on n0 has not begun collective operation 6, which 1 rank waits in",
    ),
    "a rank that Gloo reports one operation late": (
        [wait(0), rank(1, *READING, groups=(group(4710, 4709),))],
        {"kind": "behind", "rank": 1},
        "rank 1 on n0 has not entered all_reduce 4711",
    ),
    "an outlier": (
        [rank(0, *BACKWARD), rank(1, *BACKWARD), rank(2, *READING), rank(3, *BACKWARD)],
        {"kind": "elsewhere", "ranks": (2,), "operation": "", "certain": True},
        "rank 2 on n1 is not in train.py:40 step, where 3 ranks are; "
        "it is in loader.py:88 read_shard",
    ),
    "no majority": (
        [rank(0, *READING), rank(1, *BACKWARD)],
        {"kind": "unknown", "ranks": (0, 1), "certain": True},
        "ranks 0, 1 on n0 print nothing, in 2 places; rank 0 is in loader.py:88 read_shard",
    ),
    "no answer": (
        [
            rank(number, process=process(UNKNOWN_STATE), no_answer="its node...")
            for number in (0, 1)
        ],
        {"kind": "unknown", "certain": False},
        "no rank shows where it is; rank 0 gave no stack: its node...",
    ),
}


def index(ranks: list[RankState]) -> States:
    return {one.rank: (f"n{one.rank // 2}", one) for one in ranks}


def judge(ranks: list[RankState], before: list[RankState]) -> Hang:
    hang = find_hang(index(ranks), index(before), 3.0)
    assert hang is not None
    return hang


@pytest.mark.parametrize(("ranks", "fields", "text"), CASES.values(), ids=CASES)
def test_each_hang_has_its_verdict(
    ranks: list[RankState], fields: dict[str, Any], text: str
) -> None:
    hang = judge(ranks, ranks)
    assert {name: getattr(hang, name) for name in fields} == fields
    assert text in hang.text
    assert hang.node == ("" if hang.rank is None else f"n{hang.rank // 2}")


def spend(state: RankState) -> RankState:
    return replace(state, process=replace(state.process, seconds=0.4))


def spend_in_worker(state: RankState) -> RankState:
    return replace(state, children=(process("R", 0.4, pid=9),))


def move(state: RankState) -> RankState:
    return replace(state, threads=(ThreadStack("main", BACKWARD),))


def start_another(state: RankState) -> RankState:
    return replace(state, children=(process("S", pid=10),))


@pytest.mark.parametrize("change", [spend, spend_in_worker, move, start_another])
def test_a_busy_rank_may_be_at_work(change: Callable[[RankState], RankState]) -> None:
    reader = rank(1, *READING, groups=(BEHIND,), children=(process("S", pid=9),))
    hang = judge([wait(0), change(reader)], [wait(0), reader])
    assert (hang.kind, hang.rank, hang.certain) == ("behind", 1, False)
    assert hang.text.endswith("it may be at work")


def test_ranks_that_come_further_do_not_hang() -> None:
    before = [wait(0), rank(1, *READING, groups=(BEHIND,))]
    after = [wait(0, group(4713, 4712)), rank(1, *READING, groups=(group(4712, 4712),))]
    assert find_hang(index(after), index(before), 3.0) is None
    assert find_hang({}, index(before), 3.0) is None


def test_one_look_alone_is_not_certain() -> None:
    ranks = [wait(0), rank(1, *READING, groups=(BEHIND,))]
    hang = judge(ranks, [])
    assert (hang.rank, hang.certain) == (1, False)


def test_a_read_from_a_disk_is_no_hang() -> None:
    reading = [rank(0, *READING, process=process("D", 1.02))]
    for before, kind in (("D", "held"), ("S", "unknown")):
        # To answer takes a little of the CPU's time.
        assert judge(reading, [rank(0, *READING, process=process(before, 1.0))]).kind == kind


def test_a_thousand_ranks_in_many_groups() -> None:
    """The driver reads the output of all ranks in the same thread."""
    of_rank = [
        tuple(
            group(4711, 4710, group=f"g{size}", ranks=tuple(range(first, first + size)))
            for size in (8, 64, 512)
            for first in [number // size * size]
        )
        for number in range(1024)
    ]
    ranks = [wait(number, group(9, 8), *of_rank[number]) for number in range(1024)]
    ranks[700] = rank(
        700,
        *READING,
        groups=tuple(replace(one, enqueued=one.completed) for one in ranks[700].groups),
    )
    began = time.process_time()
    hang = judge(ranks, ranks)
    assert (hang.kind, hang.ranks, hang.waiting) == ("behind", (700,), 1023)
    assert time.process_time() - began < 10  # 0.1 s, unless it grows with the square
