"""Logs that are whole torchruns', named by Slurm's tasks: whose ranks they have."""

from __future__ import annotations

from pathlib import Path

from stager.diagnosis.diagnosis import diagnose
from stager.diagnosis.failure import Diagnosis
from stager.diagnosis.process_exits import find_torchruns
from stager.logs.job_files import find_job_files

RAISED = """\
Traceback (most recent call last):
  File "/home/you/train.py", line 1, in <module>
    go()
ValueError: the labels are wrong
"""
WAITED = """\
[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "/home/you/train.py", line 1, in <module>
[rank{0}]:     torch.distributed.all_reduce(loss)
[rank{0}]: RuntimeError: [/x/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation
"""
TABLE = """\
E1122 06:40:55.2 738 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) \
local_rank: {local} (pid: 7) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_06:40:55
  host      : {node}
  rank      : {rank} (local_rank: {local})
  exitcode  : {code} (pid: 741)
  error_file: <N/A>
"""
"""What torchrun 2.13 closes with, without its frames."""
ENDED = "W1122 06:40:55.3 9 torch/distributed/elastic/agent/server/api.py:753] Received 15 death\n"


def logs(folder: Path, *texts: str) -> Diagnosis:
    """The diagnosis of one log a node."""
    for task, text in enumerate(texts):
        (folder / f"train.9.node0{task + 1}.{task}.out").write_text(f"step 1\n{text}")
    return diagnose(find_job_files(str(folder), folder))


def table(rank: int, each: int, code: int = 1) -> str:
    return TABLE.format(rank=rank, local=rank % each, node=f"node0{rank // each + 1}", code=code)


def test_the_table_names_the_rank_of_a_traceback(tmp_path: Path) -> None:
    found = logs(tmp_path, ENDED, RAISED + table(3, 2), ENDED)
    assert (found.first.node, found.first.rank, found.first.exit_code) == ("node02", 3, 1)
    assert found.first.kind == "python-error"
    assert found.consequences == ()


def test_a_rank_that_nobody_has_heard_of_is_missed(tmp_path: Path) -> None:
    """Its torchrun has two ranks, as the others' tables tell, and one of them has waited."""
    waited = [WAITED.format(rank) + table(rank, 2) for rank in (0, 2, 5)]
    waited[0] = WAITED.format(1) + waited[0]
    waited[2] = WAITED.format(4) + waited[2]
    found = logs(tmp_path, *waited)
    assert (found.first.node, found.first.rank, found.first.kind) == ("node02", 3, "hang")
    assert (found.missing, found.consequences) == ((3,), (0, 1, 2, 4, 5))


def test_one_rank_a_torchrun_is_its_task(tmp_path: Path) -> None:
    found = logs(tmp_path, ENDED, ENDED, RAISED + table(2, 1))
    assert (found.first.node, found.first.rank) == ("node03", 2)


def test_a_later_node_tells_how_many_there_are(tmp_path: Path) -> None:
    """Where only the first rank of a node has failed."""
    found = logs(tmp_path, ENDED, ENDED, RAISED + table(8, 4))
    assert (found.first.node, found.first.rank) == ("node03", 8)


def test_ranks_that_are_tasks_are_left_alone(tmp_path: Path) -> None:
    found = logs(tmp_path, "step 2\n", RAISED)
    assert (found.first.node, found.first.rank) == ("node02", 1)
    names = find_job_files(str(tmp_path), tmp_path).logs
    assert find_torchruns(names).first == {}
    assert [find_torchruns(names).drop_task(log).rank for log in names] == [0, 1]


def test_a_log_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.9.node01.0.out").write_text(RAISED + table(1, 2))
    names = find_job_files(str(tmp_path), tmp_path).logs
    (tmp_path / "train.9.node01.0.out").unlink()
    assert find_torchruns(names).blamed == {}
