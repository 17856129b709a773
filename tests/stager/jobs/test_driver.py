from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pytest

from stager.jobs.driver import run_hook


@dataclass(frozen=True)
class Verdict:
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


def test_its_failure_is_a_warning() -> None:
    warnings: list[str] = []
    run_hook(["sleep", "600"], Verdict(), warnings.append, 0.2)
    (warning,) = warnings
    assert warning.startswith("the on-failure command failed: ")
    assert "more than 0.2 s" in warning
