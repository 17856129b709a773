"""Tracebacks and marks, in logs that several ranks write to."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.diagnosis.hits import BLOCK, Hit, scan_logs
from stager.logs.job_files import find_job_files
from tests.support.failed_logs import trace


def hits(tmp_path: Path, text: str) -> list[Hit]:
    (tmp_path / "slurm.out").write_text(text)
    files = find_job_files(str(tmp_path), tmp_path)
    return scan_logs(files.logs[:1], files)[0]


def test_the_place_of_a_line_behind_one_that_never_ends(tmp_path: Path) -> None:
    bar = "step\r" * (3 * BLOCK // 5) + "\n"
    line = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of it was killed\n"
    (hit,) = hits(tmp_path, bar + line)
    assert hit.below == len(bar) + len(line)


def of(rank: int, closing: str) -> list[str]:
    return trace(closing, before=f"[rank{rank}]: ").splitlines()


def test_ranks_that_write_at_the_same_time(tmp_path: Path) -> None:
    pairs = zip(of(0, "KeyError: 'x'"), of(1, "ValueError: y"), strict=True)
    mixed = [line for pair in pairs for line in pair]
    found = hits(tmp_path, "\n".join(mixed) + "\n")
    assert [(hit.rank, hit.text, len(hit.trace)) for hit in found] == [
        (0, "KeyError: 'x'", 4),
        (1, "ValueError: y", 4),
    ]


def test_an_exception_that_came_from_another_process(tmp_path: Path) -> None:
    outer = of(2, "RuntimeError: Caught OSError in DataLoader worker process 0.")
    inner = [
        line.replace("Traceback", "Original Traceback") for line in of(2, "OSError: [Errno 28]")
    ]
    (hit,) = hits(tmp_path, "\n".join([*outer, *inner]) + " No space left on device\n")
    assert (hit.rank, hit.entry.name, len(hit.trace)) == (2, "disk-full", 8)


def test_a_message_below_the_exception(tmp_path: Path) -> None:
    """``RuntimeError("\\n...")``: Python prints no colon behind an exception without a message."""
    text = [*of(0, "RuntimeError: "), "[rank0]: ", "[rank0]:   sizes 3 and 4 differ", "[rank1]: b"]
    (hit,) = hits(tmp_path, "\n".join(text) + "\n")
    assert (hit.text, len(hit.trace)) == ("RuntimeError: sizes 3 and 4 differ", 4)


def test_progress_bars_are_written_over(tmp_path: Path) -> None:
    bar = "".join(f"Epoch 0: {n}%|###| {n}/100\r" for n in range(100)) * 30
    (hit,) = hits(tmp_path, f"{bar}OSError: [Errno 28] No space left on device\r\n")
    assert hit.text == "OSError: [Errno 28] No space left on device"
    assert hits(tmp_path, f"No space left on device\r{bar}done\n") == []


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("\x1b[31mCUDA\x1b[0m \x1b[1mout\x1b[0m of memory. Tried to allocate 2 GiB\n",
         "gpu-memory"),
        # A traceback without an end hides nothing.
        ("Traceback (most recent call last):\n  File x\n2026-11-22 INFO OfflineModeIsEnabled: a\n",
         "offline-hub"),
    ],
)  # fmt: skip
def test_what_is_around_a_line_hides_nothing(tmp_path: Path, text: str, entry: str) -> None:
    (hit,) = hits(tmp_path, text)
    assert hit.entry.name == entry


@pytest.mark.parametrize("mark", ["", "[rank1]: ", "3: "])
def test_a_source_file_that_cannot_be_read_has_no_traceback(tmp_path: Path, mark: str) -> None:
    told = ['  File "train.py", line 2', "    for i in range(3)", "        ^", "SyntaxError: no"]
    text = "".join(f"{mark}{line}\n" for line in ["step 1", *told, "step 2"])
    (found,) = hits(tmp_path, text)
    assert (found.trace, found.number) == (tuple(told), 5)
    (found,) = hits(tmp_path, "\n".join(told[1:]) + "\n")
    assert found.trace == (), "what is indented above is not always a place"


def test_the_label_of_a_task_that_is_a_torchrun_is_no_rank(tmp_path: Path) -> None:
    line = "1: OSError: [Errno 28] No space left on device\n"
    (hit,) = hits(tmp_path, line)
    assert hit.rank == 1
    told = "1: E1122 05:30:00.1 9 torch/distributed/elastic/x.py:1] failed (exitcode: 1) local_rank"
    assert {hit.rank for hit in hits(tmp_path, line + told + ": 0 (pid: 9)\n")} == {None}


PLAIN = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    main()",
    "ValueError: shard 17 is empty",
]
LOGURU = """\
2026-03-04 10:00:01.365 | ERROR    | app.train:run:143 - An error has been caught, process 8:
Traceback (most recent call last):

> File "train.py", line 3, in <module>
    main()
    └ <function main at 0x7f10>

ValueError: shard 17 is empty
"""
RICH = """\
[10:00:01] ERROR    it failed                       train.py:12
                    ╭─ Traceback (most recent call las─╮        
                    │ /home/you/train.py:3 in <module> │        
                    ╰──────────────────────────────────╯        
                    ValueError: shard 17 is empty               
"""
RICH_IN_ASCII = """\
+-------- Traceback (most recent call last) --------+
| /home/you/train.py:3 in <module>                  |
+---------------------------------------------------+
ValueError: shard 17 is empty
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 3, in <module>
  |     main()
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 3, in <module>
    | ValueError: shard 17 is empty
    +------------------------------------
"""


def prefixed(shape: str) -> str:
    return "".join(f"{shape.format(text, at=at)}\n" for at, text in enumerate(PLAIN))


@pytest.mark.parametrize(
    ("text", "rank", "node"),
    [
        (prefixed("node1: [rank6]: {}"), 6, "node1"),
        (prefixed("(RayTrainWorker pid=5, ip=10.0.0.5) {}"), None, "10.0.0.5"),
        (prefixed("<<my own 12:0{at}>> {}"), None, ""),
        (prefixed("\x1b[31m[rank6]:\x1b[0m \x1b[1;35m{}\x1b[0m"), 6, ""),
        ("step\n" * 100 + "\0" + prefixed("[rank6]: {}"), 6, ""),
        ("  5%|▌ | 5/100 [00:01<00:19,  4.9it/s]" + prefixed("[rank6]: {}"), 6, ""),
        (LOGURU, None, ""),
        (RICH, None, ""),
        (RICH_IN_ASCII, None, ""),
        (GROUP, None, ""),
    ],
)
def test_decorated_tracebacks_are_seen(
    tmp_path: Path, text: str, rank: int | None, node: str
) -> None:
    last = hits(tmp_path, f"step 1\n{text}")[-1]
    assert last.trace[-1].strip() == "ValueError: shard 17 is empty"
    assert (last.rank, last.node) == (rank, node)
