"""The logs of a job as one stream: order, names, choice, errors, and following."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver.logs import DRIVER, Logs
from bundle.protocol.enumerations import Allocation
from stager.core.errors import StagerError
from stager.diagnosis.diagnosis import diagnose
from stager.logs.job_files import JobFiles, LogFile, find_job_files, list_job_files
from stager.logs.lines import (
    Line,
    LineFilter,
    follow_logs,
    merge_logs,
    number_lines,
    read_last_lines,
    read_order,
    read_stamp,
)
from tests.support.failed_logs import trace
from tests.support.jobs import PLAIN


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., Path]:
    """Makes a directory of somebody else's logs: file names to texts."""

    def make(**texts: str) -> Path:
        for name, text in texts.items():
            (tmp_path / name.replace("__", ".")).write_text(text)
        return tmp_path

    return make


def shown(lines: Iterator[Line]) -> list[str]:
    return [f"{line.writer}: {line.text}" for line in lines]


def all_of(folder: Path, **wanted: object) -> list[str]:
    return shown(merge_logs(find_job_files(str(folder), folder), LineFilter(**wanted)))  # type: ignore[arg-type]


# --- a job of stager's own -----------------------------------------------------------------------


class Written:
    """The files of a job, written by the driver's own code at times of our choosing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, 1000.0
        monkeypatch.setattr("bundle.driver.logs.time.time", lambda: self.now)
        place = {"allocation": Allocation.LOCAL, "nodes": ("n1", "n2"), "log_dir": str(folder)}
        self.logs = Logs(replace(PLAIN, id="17", name="a.17.b", **place))

    @property
    def files(self) -> JobFiles:
        return list_job_files(self.folder, "17")

    def say(self, at: float, node: str, task: int, *lines: str) -> None:
        self.now = at
        self.logs.output(node, task, "".join(f"{line}\n" for line in lines).encode(), DRIVER)

    def end(self) -> None:
        self.logs.event(json.dumps({"v": 1, "event": "job", "nodes": ["n1", "n2"]}))
        self.logs.event(json.dumps({"v": 1, "event": "result", "ok": True}))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    return Written(tmp_path / "logs", monkeypatch)


def test_lines_come_in_the_order_in_which_they_were_written(written: Written) -> None:
    written.say(1001, "n2", 1, "first")
    written.say(1002, "n1", 0, "second", "third")
    written.say(1003, "n2", 1, "fourth, with ü and \x1b[1m")
    written.say(1004, "n1", 0, "fifth")
    found = merge_logs(written.files, LineFilter())
    assert [(line.writer, line.number, line.time, line.text) for line in found] == [
        ("n2 1", 1, 1001, "first"),
        ("n1 0", 1, 1002, "second"),
        ("n1 0", 2, 1002, "third"),
        ("n2 1", 2, 1003, "fourth, with ü and "),
        ("n1 0", 3, 1004, "fifth"),
    ]


def test_a_progress_bar_is_one_line(written: Written) -> None:
    for percent in range(100):
        written.now = 1000 + percent
        written.logs.output("n1", 0, f"\r{percent:3}%|{'#' * percent}".encode(), ("rank",))
    written.logs.output("n1", 0, b"\r100%|done\nafter it\n\r  1%|#", ("rank",))
    expected = ["100%|done", "after it", "  1%|#"]
    found = [(line.number, line.text) for line in merge_logs(written.files, LineFilter())]
    assert found == list(enumerate(expected, 1))
    written.end()
    followed = follow_logs(lambda: written.files, LineFilter())
    assert [line.text for line in followed] == expected
    log = written.folder / "a.17.b.17.n1.0.out"
    assert read_last_lines(log, 2) == ("after it", "  1%|#")
    assert list(number_lines(log))[1] == (2, "after it")


def test_what_a_log_has_beyond_the_order_is_not_lost(written: Written) -> None:
    """It comes at the end, however long ago its rank had said something."""
    written.say(1001, "n2", 1, "kept")
    written.say(1002, "n1", 0, "later")
    with (written.folder / "a.17.b.17.n2.1.out").open("a") as log:
        log.write("after the driver was killed\n")
    with written.files.order.open("a") as order:
        order.write("1003.0\tn1\t")
    last = "n2 1: after the driver was killed"
    assert all_of(written.folder) == ["n2 1: kept", "n1 0: later", last]


def test_more_logs_than_files_may_be_open(written: Written) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for task in range(400):
        written.say(1000 + task, "n1", task, f"rank {task}")
    for task in range(400):
        written.say(1400 + task, "n1", task, f"again {task}")
    for handle in written.logs._files.values():
        handle.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        found = all_of(written.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(found) == 800
    assert found[0] == "n1 0: rank 0"
    assert found[-1] == "n1 399: again 399"


def test_long_progress_bars_take_little_memory(tmp_path: Path) -> None:
    bar, ranks = b"\r 12%|####      | 12/100" * 10_000, range(20)
    for rank in ranks:
        (tmp_path / f"a.7.n1.{rank}.out").write_bytes(bar + b"\r100%|done\nafter it\n")
    rows = (f"1000.0\tn1\t{rank}\t{len(bar) + 20}\n" for rank in ranks)
    (tmp_path / "order.7.tsv").write_text("".join(rows))
    tracemalloc.start()
    try:
        found = merge_logs(list_job_files(tmp_path, "7"), LineFilter())
        assert next(found).text == "100%|done"
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 5 * len(bar)
    assert [line.text for line in found].count("after it") == len(ranks)


def test_the_order_of_a_long_job_takes_little_memory(tmp_path: Path) -> None:
    files, pieces = list_job_files(tmp_path, "7"), 20_000
    files.order.write_text("1000.123\tn1\t0\t1000\n" * pieces)
    tracemalloc.start()
    try:
        order = read_order(files)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert order["n1", 0].find_time(pieces * 1000 - 1) == 1000.123
    assert used < 32 * pieces


def test_following_ends_with_the_job(written: Written) -> None:
    written.say(1001, "n1", 0, "before")
    steps: list[Callable[[], None]] = [
        lambda: written.say(1002, "n2", 1, "a new rank"),
        lambda: written.say(1003, "n1", 0, "more", "and more"),
        written.end,
    ]
    stream = follow_logs(lambda: written.files, LineFilter(), sleep=lambda _: steps.pop(0)())
    assert shown(stream) == ["n1 0: before", "n2 1: a new rank", "n1 0: more", "n1 0: and more"]
    assert steps == []


def test_a_line_that_is_half_written_is_followed_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "a.out"
    log.write_text("whole\nhal")

    def grow(_: float) -> None:
        with log.open("a") as handle:
            handle.write("f\n")

    stream = follow_logs(lambda: find_job_files(str(tmp_path), tmp_path), LineFilter(), sleep=grow)
    assert [line.text for line in itertools.islice(stream, 2)] == ["whole", "half"]


def test_a_dry_run_and_a_clean_are_not_the_newest_job(written: Written) -> None:
    written.end()
    folder, raw = written.folder, json.loads(written.files.job.read_text())
    os.utime(written.files.events, (1000, 1000))
    planned = {"18": {"dry_run": True}, "19": {"action": "clean"}, "20": {"action": "verify"}}
    for job_id, changed in planned.items():
        files = list_job_files(folder, job_id)
        files.job.write_text(json.dumps({**raw, "id": job_id, **changed}))
        files.events.write_text("")
        for path in (files.events, files.job):
            os.utime(path, (int(job_id) * 100, int(job_id) * 100))
    assert find_job_files(None, folder).job_id == "20"
    for path in folder.glob("*.20.*"):
        path.unlink()
    assert find_job_files(None, folder).job_id == "17"
    assert find_job_files(str(folder), Path()).job_id == "17"
    with pytest.raises(StagerError) as caught:
        find_job_files("99", folder)
    assert [re.sub(r"\d{4}-.*", "TIME", line) for line in caught.value.context] == [
        f"the jobs in {folder}, the last active first:",
        "  19, clean of a.17.b, TIME",
        "  18, run of a.17.b, dry run, TIME",
        "  17, run of a.17.b, TIME",
    ]
    written.files.events.unlink()
    assert find_job_files(None, folder).job_id == "19", "there is no other"


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"dry_run": True, "action": "clean"}, "dry run of clean"),
        ({}, ""),
    ],
)
def test_a_job_without_ranks_is_named_for_what_it_was(
    written: Written, changed: dict[str, object], kind: str
) -> None:
    files = written.files
    files.job.write_text(json.dumps({**json.loads(files.job.read_text()), **changed}))
    with pytest.raises(StagerError) as caught:
        merge_logs(files, LineFilter())
    none = f"job 17 has left no logs of ranks in {files.folder}"
    said = f"job 17 was a {kind}: it started no ranks" if kind else none
    assert caught.value.message == said
    assert "`stager diagnose 17`" in caught.value.hint


@pytest.mark.parametrize("wanted", ["/nonexistent", "nodes/logs", "latest"])
def test_a_path_that_is_not_there_is_no_job(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(StagerError, match=f"^there is no directory {wanted}$"):
        find_job_files(wanted, tmp_path)


# --- logs of somebody else's launcher ------------------------------------------------------------


def test_stamps_put_foreign_logs_in_order(foreign: Callable[..., Path]) -> None:
    folder = foreign(
        train__77__node01__0__out="[2026-11-22 05:21:31,5] one\nno stamp\n2026-11-22T05:21:35 six",
        train__77__node02__1__out="W1122 05:21:32.1 4711 x.py:1] three\n05 four\n",
    )
    for path in folder.iterdir():
        os.utime(path, (1795324895, 1795324895))
    assert all_of(folder) == [
        "node01 0: [2026-11-22 05:21:31,5] one",
        "node01 0: no stamp",
        "node02 1: W1122 05:21:32.1 4711 x.py:1] three",
        "node02 1: 05 four",
        "node01 0: 2026-11-22T05:21:35 six",
    ]


HERE = time.mktime((2026, 3, 4, 10, 22, 31, 0, 0, -1))
THERE = 1772619751.0


@pytest.mark.parametrize(
    ("line", "at"),
    [
        (b"E0304 10:22:31.5 4711 x.py] y", HERE + 0.5),
        (b"[rank3]:[W0304 10:22:31.5 socket.cpp:460] z", HERE + 0.5),
        (b"[W304 10:22:31.5 x]", HERE + 0.5),
        (b"2026-03-04 10:22:31,250 INFO x", HERE + 0.25),
        (b"  time      : 2026-03-04_10:22:31", HERE),
        (b"03/04/2026 10:22:31 - WARNING - x", HERE),
        (b"[03/04/26 10:22:31] INFO x", HERE),
        (b"ERROR 03-04 10:22:31 [core.py:1141] x", HERE),
        (b"Mar  4 10:22:31 node03 kernel: x", HERE),
        (b"Wed Mar  4 10:22:31 2026[1,3]<stderr>:x", HERE),
        (b"slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2026-03-04T10:22:31 ***", HERE),
        (b"2026-03-04T10:22:31.5Z x", THERE + 0.5),
        (b"2026-03-04T12:22:31.500+02:00 node03 slurmd[12]: x", THERE + 0.5),
        (b"[2026-03-04 10:22:31,5+0000] x", THERE + 0.5),
        (b"Wed Mar  4 10:22:31.5 UTC 2026", THERE + 0.5),
        (b"1772619751.5 x", THERE + 0.5),
        (b"[1772619751.500] x", THERE + 0.5),
        (b'{"level": "error", "msg": "x", "ts": 1772619751.5}', THERE + 0.5),
        (b'{"log":"' + b"x" * 300 + b'","time":"2026-03-04T10:22:31.5Z"}', THERE + 0.5),
        (b"step 05:21:32", None),
        (b"E9922 05:21:32.1 x", None),
        (b"W1122 99:21:32.1 x", None),
        (b"", None),
    ],
)
def test_stamps(line: bytes, at: float | None) -> None:
    assert read_stamp(line, 2026) == at
    has_year = any(year in line for year in (b"2026", b"/26", b"1772"))
    assert (read_stamp(line, 1999) == at) == (has_year or at is None)


NAMES = """
    train.77.node01.3.out node01 3
    train.77_4.gpu-a12.0.err gpu-a12 0
    slurm-4711-n12-3.out n12 3
    slurm-4711-c05r2n11.out c05r2n11 -
    rank_5.log - 5
    log_0_2.rank2.txt - 2
    worker-node07.log worker-node07 -
    logs/node07/rank2.txt node07 2
    ip-10-0-0-12/train.log ip-10-0-0-12 -
    attempt_0/1/stderr.log - 1
"""
NEITHER = """
    slurm-4711.out train-4711.out gpu-4711.out gpt2_ddp_4711.out gpu8_4711.out train.o4711
    resnet50-2026-11-22.log slurm-81234_7.out train_4711_seed1.out train_4711_fold_3.out
    71604_0_log.err local_rank1.log
"""


@pytest.mark.parametrize(
    ("name", "node", "rank"),
    [*map(str.split, NAMES.strip().splitlines()), *((name, "-", "-") for name in NEITHER.split())],
)
def test_names_tell_node_and_rank(tmp_path: Path, name: str, node: str, rank: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n")
    (log,) = find_job_files(str(tmp_path), tmp_path).logs
    assert (log.node or "-", "-" if log.rank is None else str(log.rank)) == (node, rank)


def test_the_folders_of_torchrun(tmp_path: Path) -> None:
    for place in ("a_x/attempt_0/0", "a_x/attempt_1/1", "b_x/attempt_0/1"):
        path = tmp_path / place / "stdout.log"
        path.parent.mkdir(parents=True)
        path.write_text("x\n")
    logs = find_job_files(str(tmp_path), tmp_path).logs
    assert [(log.attempt, log.local_rank, log.rank) for log in logs] == [
        (0, 0, None),  # of two nodes: which ranks they have is not known
        (1, 1, None),
        (0, 1, None),
    ]
    (log,) = find_job_files(str(logs[1].path), tmp_path).logs
    assert (log.attempt, log.local_rank) == (1, 1)


@pytest.mark.parametrize(
    ("older", "newest"),
    [
        (["slurm-99.out"], ["slurm-100.out", "steps/1000/rank0.txt"]),
        (["train-81233-0.out", "train-81233-128.out"],
         ["train-81234-0.out", "train-81234-128.out"]),
        (["gpt2_ddp_4711.out", "gpt2_ddp_4711.err"], ["gpt2_ddp_4712.out", "gpt2_ddp_4712.err"]),
        (["train.o4711", "train.e4711"], ["train.o4720", "train.e4720"]),
        (["71604_0_log.err"], ["71605_0_log.err", "71605_1_log.err"]),
        (["4711/rank0.txt"], ["4712/rank0.txt", "4712/rank1.txt"]),
        (["t.77.node01.0.out"], ["t.78.node01.0.out", "t.78.node12.100.out"]),
        ([], ["slurm-81234_3.out", "slurm-81234_7.out"]),
        ([], ["nccl.node01.4711.log", "nccl.node01.4712.log"]),
        ([], ["rank0-20261121.out", "rank1-20261122.out"]),
        ([], ["attempt_0/128/stdout.log", "attempt_0/129/stdout.log"]),
    ],
)  # fmt: skip
def test_the_newest_of_somebody_else_s_jobs_counts(
    tmp_path: Path, older: list[str], newest: list[str]
) -> None:
    for name in [*newest, *older, "app.log"]:  # a copy has other times
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")

    def found(wanted: str) -> list[str]:
        logs = find_job_files(wanted, tmp_path).logs
        return sorted(log.path.relative_to(tmp_path).as_posix() for log in logs)

    assert found(str(tmp_path)) == sorted([*newest, "app.log"])  # which is of nobody knows which
    others = find_job_files(str(tmp_path), tmp_path).other_jobs
    assert [found(number) for number in others] == ([sorted(older)] if older else [])


def test_files_that_are_no_logs_are_left_alone(foreign: Callable[..., Path]) -> None:
    folder = foreign(a__log="a line\n", model__pt="x", train__py="x")
    (folder / "blob").write_bytes(b"\0\1\2")
    assert [log.path.name for log in find_job_files(str(folder), folder).logs] == ["a.log"]


# --- which lines ---------------------------------------------------------------------------------


def test_ranks_nodes_and_patterns_choose(written: Written) -> None:
    for task in range(4):
        written.say(1000 + task, f"n{task // 2 + 1}", task, f"step {task}", "loss 0.5")
    assert all_of(written.folder, ranks=(2,)) == ["n2 2: step 2", "n2 2: loss 0.5"]
    assert all_of(written.folder, nodes=("n1",), pattern=re.compile("step")) == [
        "n1 0: step 0",
        "n1 1: step 1",
    ]
    with pytest.raises(StagerError) as caught:
        all_of(written.folder, ranks=(9,))
    assert caught.value.hint == "the logs are of ranks 0 to 3 on n1, n2"


def test_prefixes_in_a_shared_log_choose_too(foreign: Callable[..., Path]) -> None:
    folder = foreign(
        slurm_77__out=(
            "node1: [default2]:[rank2]: one\nnode2: [default2]:[rank6]: two\n"
            "node2.cluster: [1,6]<stderr>:three\n5: four\nfive\n"
        ),
        train__77__node02__1__out="[rank6]: six\nseven\n",  # a task that is a torchrun
    )
    six = ["node02 6: six", "node2 6: node2: [default2]:[rank6]: two"]
    assert sorted(all_of(folder, ranks=(6,))) == [
        *six,
        "node2.cluster 6: node2.cluster: [1,6]<stderr>:three",
    ]
    assert all_of(folder, ranks=(5,)) == ["5: 5: four"]
    assert all_of(folder, ranks=(6,), nodes=("node02",)) == six[:1]
    assert len(all_of(folder, nodes=("node2",))) == 2


@pytest.mark.parametrize(
    "shape",
    [
        "(Worker pid=5) ERROR 07-29 21:48:5{} [core.py:1141] ",
        "<<my own {}>> ",
        "\x1b[31m[1,{}]\x1b[0m ",
    ],
)
def test_errors_with_a_prefix_are_whole(foreign: Callable[..., Path], shape: str) -> None:
    lines = trace("ValueError: x").splitlines()
    text = "".join(f"{shape.format(at)}{line}\n" for at, line in enumerate(lines))
    found = all_of(foreign(slurm__out=f"step 1\n{text}step 2\n"), errors=True)
    assert [line[-8:] for line in found] == [line[-8:] for line in lines]


def test_errors_come_once_and_without_noise(foreign: Callable[..., Path]) -> None:
    noise = (
        "/x/y.py:3: UserWarning: an error might be near\n  warnings.warn(\n"
        "[c10d] The hostname of the client socket cannot be "
        "retrieved. err=-3\nepoch 1 loss 0.3\n"
    )
    first, again = trace("ValueError: row 17 is bad"), trace("ValueError: row 18 is bad")
    other = trace("KeyError: 'x'", "/home/you/other.py")
    folder = foreign(
        t__7__n1__0__out=noise + first + "go on\n",
        t__7__n1__1__out=noise + again,
        t__7__n1__2__out=again + other,
    )
    assert all_of(folder, errors=True) == [
        *(f"n1 0: {line}" for line in first.splitlines()),
        "n1 1: ValueError: row 18 is bad  (the same traceback as above, here as well)",
        *(f"n1 2: {line}" for line in other.splitlines()),
    ]


# --- files that mean no good ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["n.7.node1.0.out", "order.7.tsv", "events.7.jsonl"])
def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "n.7.batch.out").write_text("said\n")
    (tmp_path / "job.7.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    (tmp_path / "n.7.node1.1.out").symlink_to("/dev/zero")
    found = list(merge_logs(list_job_files(tmp_path, "7"), LineFilter()))
    assert [line.text for line in found] == ["said"]
    assert diagnose(list_job_files(tmp_path, "7")).first is None
    assert read_last_lines(tmp_path / name, 2) == ()


_HUGE = f"5.0\tn1\t0\t{2**62 - 1}"


@pytest.mark.parametrize(
    "row",
    ["1\tn1\t0\t-5", f"1\tn1\t0\t{'9' * 40}", "inf\tn1\t0\t2", "x", f"{_HUGE}\n{_HUGE}"],
)
def test_an_order_that_cannot_be_true_is_left(tmp_path: Path, row: str) -> None:
    (tmp_path / "events.7.jsonl").write_text("")
    (tmp_path / "n.7.n1.0.out").write_text("one\ntwo\n")
    (tmp_path / "order.7.tsv").write_text(f"5.0\tn1\t0\t4\n{row}\n")
    found = list(merge_logs(list_job_files(tmp_path, "7"), LineFilter()))
    assert [(line.time, line.text) for line in found] == [(5.0, "one"), (5.0, "two")]


@pytest.mark.parametrize("time", ["Infinity", "1e300", "-5", "NaN", "1" + "0" * 400, "[]"])
def test_an_event_whose_time_cannot_be_has_none(tmp_path: Path, time: str) -> None:
    (tmp_path / "a.1.out").write_text(f'{{"v": 1, "time": {time}}}\nhello\n')
    found = list(merge_logs(find_job_files(str(tmp_path), tmp_path), LineFilter()))
    assert [(line.time, line.text) for line in found if line.text == "hello"] == [(0.0, "hello")]


def test_many_files_are_not_compared_with_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3000):
        (tmp_path / f"rank{number}.log").write_text("hi\n")
    calls = 0

    def counted(self: LogFile, other: object) -> bool:
        nonlocal calls
        calls += 1
        return self is other

    monkeypatch.setattr(LogFile, "__eq__", counted)
    assert len(all_of(tmp_path)) == 3000
    assert calls < 3000


def test_what_nobody_may_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank0.log").write_text("x\n")
    monkeypatch.setattr("stager.logs.job_files.os.access", lambda *_: False)  # root reads all
    with pytest.raises(StagerError, match="cannot be read"):
        find_job_files(str(tmp_path / "rank0.log"), tmp_path)


@pytest.mark.parametrize(
    ("redirected", "code", "said"), [(">/dev/full", 1, "No space left"), ("2>&-", 0, "")]
)
def test_output_that_cannot_be_written(
    tmp_path: Path, redirected: str, code: int, said: str
) -> None:
    (tmp_path / "rank0.log").write_text("ValueError: x\n" * 9)
    stager = Path(sys.executable).with_name("stager")
    done = subprocess.run(
        ["sh", "-c", f'"$0" logs "$1" {redirected}', stager, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert code or done.stdout.count("ValueError") == 9
