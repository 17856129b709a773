from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pytest

from stager.jobs.driver import run_hook


@dataclass(frozen=True)
class Verdict:
    """What is told."""

    ok: bool = False
    cause: str = "\u001b[31mbad\u007f"


def test_the_verdict_is_told_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    warnings: list[str] = []
    run_hook([sys.executable, "-c", "print(input() + input())"], Verdict(), warnings.append)
    run_hook(["cat"], Verdict(), warnings.append)
    captured = capfd.readouterr()
    assert captured.out == ""
    first, _, rest = captured.err.partition("\n")
    assert first == '{  "schema": 1,'
    assert json.loads(rest) == {"schema": 1, "ok": False, "cause": "\u001b[31mbad\u007f"}
    assert rest.isascii()
    assert "\x7f" not in rest
    assert warnings == []


@pytest.mark.parametrize(
    ("argv", "seconds", "words"),
    [
        (["false"], 60.0, "exit status 1: false"),
        (["sleep", "600"], 0.2, "more than 0.2 s"),
        (["/nowhere/notify"], 60.0, "cannot start /nowhere/notify"),
    ],
)
def test_its_failure_is_a_warning(argv: list[str], seconds: float, words: str) -> None:
    warnings: list[str] = []
    run_hook(argv, Verdict(), warnings.append, seconds)
    (warning,) = warnings
    assert warning.startswith("the on-failure command failed: ")
    assert words in warning
