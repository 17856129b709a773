"""Tracebacks and marks, in logs that several ranks write to."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.diagnosis.scan import Hit, scan
from stager.diagnosis.traceback import marked, trace_at
from stager.logs.clock import Clock
from stager.logs.files import find


def hits(tmp_path: Path, text: str) -> tuple[Hit, ...]:
    (tmp_path / "slurm.out").write_text(text)
    files = find(str(tmp_path), tmp_path)
    return scan(files.logs[0], Clock(files)).hits


@pytest.mark.parametrize(
    ("line", "text", "rank", "task"),
    [
        ("[rank3]: KeyError: 'x'", "KeyError: 'x'", 3, None),
        ("[rank3]:[E1122 X.cpp:1] y", "[E1122 X.cpp:1] y", 3, None),
        ("[default1]:[rank12]:[E x", "[E x", 12, None),  # torchrun's is the local rank
        ("[default1]:step 1", "step 1", None, None),
        ("1: [default0]: x", "x", None, None),  # a task that is a torchrun is none
        ("[4]: x", "x", 4, None),
        ("12: step 1", "step 1", None, 12),
        (" 3: step 1", "step 1", None, 3),
        ("12:30:45 INFO x", "12:30:45 INFO x", None, None),
        ("2026-11-22 x", "2026-11-22 x", None, None),
    ],
)
def test_marks(line: str, text: str, rank: int | None, task: int | None) -> None:
    found = marked(line)
    assert (found.text, found.rank, found.task) == (text, rank, task)


def of(rank: int, closing: str) -> list[str]:
    text = f'Traceback (most recent call last):\n  File "t.py", line {rank}\n    go()\n{closing}'
    return [f"[rank{rank}]: {line}" for line in text.split("\n")]


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


def test_an_exception_that_led_to_another_one(tmp_path: Path) -> None:
    """The last that the catalogue knows: it tells what was wanted when the first one came."""
    text = "\n".join(of(0, "socket.gaierror: [Errno -2] Name or service not known"))
    text += "\n[rank0]: \n[rank0]: During handling of the above exception, another exception "
    text += "occurred:\n[rank0]: \n" + "\n".join(of(0, "OSError: We couldn't connect to "))
    text += "'https://huggingface.co' to load the files\n"
    (hit,) = hits(tmp_path, text)
    assert hit.entry.kind == "missing-asset"


def test_one_without_an_end_hides_nothing(tmp_path: Path) -> None:
    text = "Traceback (most recent call last):\n  File x\n2026-11-22 INFO OfflineModeIsEnabled: a\n"
    (hit,) = hits(tmp_path, text)
    assert hit.entry.name == "offline-hub"


def test_a_zero_byte_before_a_mark(tmp_path: Path) -> None:
    (hit,) = hits(tmp_path, "step\n" * 100 + "\0" + "\n".join(of(4, "KeyError: 'x'")) + "\n")
    assert (hit.rank, len(hit.trace)) == (4, 4)


def test_progress_bars_are_written_over(tmp_path: Path) -> None:
    bar = "".join(f"Epoch 0: {n}%|###| {n}/100\r" for n in range(100)) * 30
    (hit,) = hits(tmp_path, f"{bar}OSError: [Errno 28] No space left on device\r\n")
    assert hit.text == "OSError: [Errno 28] No space left on device"
    assert hits(tmp_path, f"No space left on device\r{bar}done\n") == ()


def test_the_label_of_a_task_that_is_a_torchrun_is_no_rank(tmp_path: Path) -> None:
    line = "1: OSError: [Errno 28] No space left on device\n"
    (hit,) = hits(tmp_path, line)
    assert hit.rank == 1
    told = "1: E1122 05:30:00.1 9 torch/distributed/elastic/x.py:1] failed (exitcode: 1) local_rank"
    assert {hit.rank for hit in hits(tmp_path, line + told + ": 0 (pid: 9)\n")} == {None}


def test_where_lines_are_still_to_come() -> None:
    lines = [line.encode() for line in of(0, "KeyError: 'x'")]
    assert trace_at(lines[:3], 0, 200).open
    assert trace_at(lines, 0, 200).open  # another one may follow from it
    assert not trace_at([*lines, *[b"[rank0]: step"] * 4], 0, 200).open


@pytest.mark.parametrize("mark", ["", "[rank1]: ", "3: "])
def test_a_source_file_that_cannot_be_read_has_no_traceback(tmp_path: Path, mark: str) -> None:
    told = ['  File "train.py", line 2', "    for i in range(3)", "        ^", "SyntaxError: no"]
    text = "".join(f"{mark}{line}\n" for line in ["step 1", *told, "step 2"])
    (found,) = hits(tmp_path, text)
    assert found.trace == tuple(told)
    assert found.number == 5


def test_what_is_indented_above_is_not_always_a_place(tmp_path: Path) -> None:
    (found,) = hits(tmp_path, "    for i in range(3)\n        ^\nSyntaxError: no\n")
    assert found.trace == ()
