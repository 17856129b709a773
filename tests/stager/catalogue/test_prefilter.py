"""Texts in lines, found by their words: never fewer than are there."""

from __future__ import annotations

import random
from pathlib import Path

from stager.catalogue.catalogue import Prefilter
from stager.logs.job_files import LogFile
from stager.logs.lines import Line, LogReader, Suspects
from stager.logs.merged_lines import errors_of

TEXTS = ("No space left on device", "ignal", "' not found", "error: ", "oom", "REQUEST_FILE_BCAST")


def test_what_is_there_is_found() -> None:
    sieve, chance = Prefilter(TEXTS), random.Random(5)
    words = [
        "a",
        "signal",
        "xoom,",
        "error:",
        "No",
        "space",
        "left",
        "on",
        "device",
        "'x' not found",
    ]
    words += TEXTS
    for _ in range(300):
        lines = [
            " ".join(chance.choices(words, k=chance.randint(0, 4))).encode()
            for _ in range(chance.randint(1, 8))
        ]
        found = sieve.among(lines)
        present = {text.encode() for text in TEXTS if any(text.encode() in line for line in lines)}
        assert set(found.texts) == present
        assert found.at == tuple(
            at for at, line in enumerate(lines) if any(text in line for text in present)
        )


def test_nothing_is_found_in_nothing() -> None:
    assert Prefilter(TEXTS).among([]).at == ()
    assert Prefilter(TEXTS).among([b"", b"step loss lr"]).texts == ()


def test_errors_are_the_same_as_in_all_lines(tmp_path: Path) -> None:
    chance = random.Random(7)
    mark = ("", "[rank0]: ", "[rank1]: ")
    lines = []
    for number in range(6_000):
        before = chance.choice(mark)
        stamp = f"2026-11-22 05:{number // 100:02}:00 " if chance.random() < 0.2 else ""
        lines.append(f"{stamp}{before}step {number} loss 0.5")
        if chance.random() < 0.03:
            lines += [f"{before}Traceback (most recent call last):"]
            lines += [f'{before}  File "x.py", line {number}'] * chance.randint(0, 30)
            lines += [f"{before}KeyError: {number}"] if chance.random() < 0.8 else []
        if chance.random() < 0.03:
            lines += [chance.choice(["srun: ERROR x", "a PANIC", "UserWarning: error", "Killed"])]
    path = tmp_path / "slurm.out"
    path.write_text("\n".join(lines) + "\n")
    log = LogFile(path=path)

    def told(found: list[Line]) -> list[tuple[int, str]]:
        return [(line.number, line.text) for line in found]

    picked = LogReader(log, Suspects())
    some = list(picked.rest())
    assert len(some) < len(lines) * 0.9
    assert told(list(errors_of(some))) == told(list(errors_of(LogReader(log).rest())))
