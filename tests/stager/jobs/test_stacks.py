"""Where the ranks of a job are: its driver is asked, and what it answers is shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.protocol.codec import encode
from stager.core.errors import StagerError
from stager.jobs.stacks import FoundStacks, describe_stacks, find_stacks, group_ranks
from stager.logs.job_files import JobFiles, KeptJob
from tests.support.building import Project
from tests.support.processes import until
from tests.support.stacks import WAITS, job_stacks, rank_state, write_stacks
from tests.support.stories import Told, running, trainable, went_well

NODES = ["node01", "node02", "node03", "node04"]
WATCHED = {"launch": {"watch": True}}


def launched(folder: Path) -> Told:
    told = Told(folder).say("job", nodes=NODES).phase("preflight", 0.5, NODES)
    return told.say("begin", phase="launch")


@contextmanager
def driver(files: JobFiles, *, answers: bool = True) -> Iterator[list[int]]:
    """Stands in for a driver that answers once; gives the modes of the requests."""
    modes: list[int] = []

    def answer() -> None:
        if until(files.stacks_request.exists, 10):
            modes.append(files.stacks_request.stat().st_mode & 0o777)
            time.sleep(0.5)  # an answer takes its time
            if answers:
                write_stacks(files.folder, job_stacks())
            files.stacks_request.unlink()

    thread = threading.Thread(target=answer)
    thread.start()
    yield modes
    thread.join()


def text(found: FoundStacks, **options: bool) -> list[str]:
    return list(describe_stacks(found, **options))


def test_the_driver_of_a_running_job_is_asked(tmp_path: Path) -> None:
    files, said = launched(tmp_path).write(**WATCHED), []
    write_stacks(tmp_path, replace(job_stacks(), silent=1.0))  # of an earlier question
    with driver(files) as modes:
        found = find_stacks(files, said.append)
    assert (found.stacks, found.has_ended, modes) == (job_stacks(), False, [0o600])
    assert said == ["asking job 77 where its ranks are: up to 50 s"]
    assert not files.stacks_request.exists()
    write_stacks(tmp_path, replace(job_stacks(), silent=1.0))
    with driver(files):  # another user asks just before
        assert find_stacks(files, lambda _: files.stacks_request.touch()).stacks == job_stacks()


def test_a_real_job_while_it_runs_and_after_it(project: Project) -> None:
    trainable(project)
    asked = ("stacks", "--log-dir", str(project.root.parent / "logs"))
    with running(project):
        done = project.stager(*asked)
    assert done.returncode == 0, done.stderr
    assert "2 ranks: 0-1 on local[1-2]\n  train.py:" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" <module>")
    assert "(the job has ended)" in project.stager(*asked).stdout.replace("\n ", "")


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    files = launched(tmp_path).write(**WATCHED)
    with pytest.raises(StagerError, match="job 77 has not answered") as caught:
        find_stacks(files, print, seconds=0.3)
    assert "squeue -j 77" in caught.value.hint
    assert str(files.events) in caught.value.hint
    assert not files.stacks_request.exists()
    write_stacks(tmp_path, job_stacks())
    with (
        driver(files, answers=False),
        pytest.raises(StagerError, match="job 77 has not answered") as caught,
    ):
        find_stacks(files, print)
    assert caught.value.context == (f"the last answer is an older one: {files.stacks}",)


def test_a_job_that_cannot_be_asked(tmp_path: Path) -> None:
    starting = Told(tmp_path / "a").say("job", nodes=NODES)
    for files, why in (
        (starting.write(**WATCHED), "has not started its ranks yet"),
        (launched(tmp_path / "b").write(), "launch.watch = false, so its ranks"),
        (went_well(tmp_path / "c", NODES).write(**WATCHED), "has ended, and no stacks"),
        (JobFiles(folder=tmp_path, job_id=""), "not those of a job of stager's"),
    ):
        with pytest.raises(StagerError, match=why) as caught:
            find_stacks(files, print)
        assert caught.value.hint


def test_the_last_answer_of_a_job_that_has_ended(tmp_path: Path) -> None:
    files = went_well(tmp_path, NODES).write(**WATCHED)
    files.stacks.write_text('{"job_id": "77", ')
    with pytest.raises(StagerError, match="no stacks of its ranks were kept"):
        find_stacks(files, print)
    write_stacks(tmp_path, job_stacks())
    found = find_stacks(files, print)
    assert (found.stacks, found.has_ended) == (job_stacks(), True)
    assert any("(the job has ended)" in line for line in text(found))


def test_the_verdict_then_the_smaller_groups_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stager.jobs.stacks.format_time", lambda _: "2026-09-21 13:38:32")
    found = FoundStacks(job_stacks(), KeptJob(run_dir="/w"), has_ended=False)
    assert text(found) == [
        "the ranks hang: rank 5 on node03 has not entered all_reduce 4711, which 6 ranks",
        "  wait in; it is in loader.py:88 read_shard",
        "",
        "job 77 at 2026-09-21 13:38:32, 312 s after the last output",
        "",
        "rank 5 on node03",
        "  after all_reduce 4710, [8] Float",
        "  its process 105 is held by the kernel, as for a file or a device (nfs_wait)",
        "  data/loader.py:88 read_shard",
        "  train.py:50 step",
        "  libraries: socket (socket.py:706 readinto)",
        "",
        "rank 7 on node04",
        "  no stack: its node has not answered",
        "",
        "6 ranks: 0-4,6 on node[01-04]",
        "  in all_reduce 4711, [8] Float",
        "  train.py:52 step",
        "  train.py:80 <module>",
        "  libraries: torch (distributed_c10d.py:2810 all_reduce and 1 frame)",
    ]
    full = text(found, is_full=True)
    assert "  thread MainThread:" in full
    assert "    torch/distributed/c10d_logger.py:81 wrapper" in full


def test_hostile_values_stay_text_that_fits() -> None:
    frames = tuple(f"/w/{'d/' * 60}file{number}.py:{number} f" for number in range(30))
    state = rank_state(0, frames, 4711, "\x1b")
    stacks = replace(job_stacks(hang=None), nodes={"n" * 200: (state,)})
    lines = text(FoundStacks(stacks, KeptJob(), has_ended=False))
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  ...") and line.endswith("/file0.py:0 f") for line in lines)
    assert "  and 18 more, which -v shows" in lines
    nobody = FoundStacks(replace(stacks, nodes={}), KeptJob(), has_ended=False)
    assert text(nobody)[-1] == "no rank is running"


def test_errors_and_warnings_of_nccl_follow_and_all_it_says_on_request() -> None:
    told = "NCCL version 2.27\n\nErrors\n======\n\nDEAD\n  node \x1b[2J1 " + "n" * 90 + "\n"
    stacks = replace(job_stacks(), nccl=told)
    found = FoundStacks(stacks, KeptJob(), has_ended=False)
    shown = [*text(found)[-6:]]
    assert shown[:5] == ["NCCL's RAS service:", "  Errors", "  ======", "", "  DEAD"]
    assert len(shown[5]) == 80
    assert "  NCCL version 2.27" in text(found, is_full=True)
    assert "NCCL" not in str(text(FoundStacks(replace(stacks, nccl="fine"), KeptJob(), False)))


def test_ranks_in_another_operation_are_another_group() -> None:
    stacks = job_stacks()
    one, two = stacks.nodes["node01"]
    elsewhere = tuple(f"/scratch{frame}" for frame in WAITS[:2])  # its node root
    far = replace(one, rank=2, threads=(replace(one.threads[0], frames=elsewhere + WAITS[2:]),))
    other = replace(two, groups=(replace(two.groups[0], operation="broadcast"),))
    stacks = replace(stacks, nodes={"node01": (one, other), "node02": (far,)})
    assert [ranks for ranks, _ in group_ranks(stacks)] == [
        "rank 1 on node01",
        "2 ranks: 0,2 on node[01-02]",
    ]
    assert set(encode(stacks)) == {"job_id", "time", "silent", "nodes", "hang", "ending", "nccl"}
